"""Results of several runs in one file."""

import json

import pytest

from minitriton.bench import runs


def result(*titles, command="bench", contenders=("torch",), skipped=()):
    """bench.json of one run."""
    cases = [
        {"run": 0, "title": title, "contenders": {key: {} for key in contenders}, "left_out": {}}
        for title in titles
    ]
    return {
        "schema": runs.SCHEMA,
        "size": "full",
        "runs": [{"command": command}],
        "cases": cases,
        "skipped": dict.fromkeys(skipped, "no time"),
    }


def commands(found):
    return {case["title"]: found["runs"][case["run"]]["command"] for case in found["cases"]}


def test_the_first_run_stands_alone():
    assert runs.merged(None, result("a"), ["a"]) == result("a")


def test_a_second_run_adds_and_replaces():
    first = result("b", "c", command="first")
    both = runs.merged(first, result("a", "c", command="second"), "abc")
    assert commands(both) == {"a": "second", "b": "first", "c": "second"}
    assert [case["title"] for case in both["cases"]] == ["a", "b", "c"]


def test_three_runs_keep_their_numbers():
    two = runs.merged(result("a", command="1"), result("b", command="2"), "abc")
    three = runs.merged(two, result("c", "a", command="3"), "abc")
    assert commands(three) == {"a": "3", "b": "2", "c": "3"}
    assert [run["command"] for run in three["runs"]] == ["2", "3"]


def test_a_case_that_was_cut_short_replaces_nothing():
    both = runs.merged(result("a", command="1"), result("a", command="2", contenders=()), "a")
    assert commands(both) == {"a": "1"} and len(both["runs"]) == 2


def test_skipped_cases_are_those_without_results():
    first = result("a", skipped=["b", "c"])
    both = runs.merged(first, result("b", skipped=["a", "d"]), "abcd")
    assert set(both["skipped"]) == {"c", "d"}


def test_measured():
    assert runs.measured(None) == set()
    found = result("a", "b")
    found["cases"][1]["contenders"] = {}
    assert runs.measured(found) == {"a"}


def test_loading(tmp_path):
    assert runs.load(tmp_path, "full") is None
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result("a")))
    assert runs.load(tmp_path, "full") == result("a")
    with pytest.raises(runs.OtherResults, match="full run"):
        runs.load(tmp_path, "quick")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1, "size": "full"}'])
def test_files_of_another_kind_are_refused(text, tmp_path):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(runs.OtherResults):
        runs.load(tmp_path, "full")
