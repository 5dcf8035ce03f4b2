"""`pytest --bless` writes golden files and generated blocks of documents as they are now."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--bless`."""
    parser.addoption("--bless", action="store_true", help="accept generated texts as they are now")


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden texts instead of comparing."""
    return bool(request.config.getoption("--bless"))
