"""What all tests share: this checkout is the one under test, and `pytest --bless`.

With `--bless` golden files and generated blocks of documents are written as they are now.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Processes that tests start import the package from this checkout, installed or not."""
    places = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--bless`."""
    parser.addoption("--bless", action="store_true", help="accept generated texts as they are now")


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden texts instead of comparing."""
    return bool(request.config.getoption("--bless"))
