"""Launches in functions that torch compiles: Dynamo breaks its graph there and looks no further."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo

from minitriton import dynamo, kernels
from tests.runtime.compiled_launches import by_function, direct, guided, once_more, tuned


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("launch", [direct, by_function, tuned, guided, once_more])
def test_a_launch_breaks_the_graph(launch):
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def function(x):
        out = torch.empty_like(x)
        launch(torch.sin(x), out)
        return torch.cos(out)

    compiled = torch.compile(function, backend=backend)
    for n in (300, 300, 700):
        x = torch.randn(n)
        torch.testing.assert_close(compiled(x), torch.cos(3 * torch.sin(x)))
    used = {target for graph in graphs for target in graph}
    assert {torch.sin, torch.cos} <= used
    assert all(torch.sin not in graph or torch.cos not in graph for graph in graphs)


def test_a_whole_graph_is_refused_by_torch_and_not_from_within():
    def function(x):
        out = torch.empty_like(x)
        direct(x, out)
        return out

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(function, backend="eager", fullgraph=True)(torch.randn(100))
    assert "skip" in str(caught.value).lower()


def test_the_librarys_operators_stay_in_the_graph():
    x, weight = torch.randn(4, 64), torch.randn(64)
    function = torch.compile(
        lambda x: torch.relu(kernels.rms_norm(torch.sin(x), weight)), backend="eager",
        fullgraph=True,
    )  # fmt: skip
    expected = torch.relu(torch.nn.functional.rms_norm(torch.sin(x), (64,), weight, eps=1e-6))
    torch.testing.assert_close(function(x), expected, atol=1e-3, rtol=1e-3)


PROGRAM = """
{}
from tests.runtime.compiled_launches import direct
{}
import torch

@torch.compile(backend="eager")
def function(x):
    out = torch.empty_like(x)
    direct(x, out)
    return out

x = torch.randn(100)
torch.testing.assert_close(function(x), 3 * x)
"""


@pytest.mark.parametrize("imports", [("import torch._dynamo", ""), ("", "import torch._dynamo")])
def test_whichever_is_imported_first(imports):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(*imports)], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Dynamo" not in done.stderr  # no warning about what it finds inside


def test_a_torch_with_other_rules_is_left_alone():
    rules = ModuleType("rules")
    dynamo._skip(rules)
    assert not hasattr(rules, "SKIP_DIRS")
