"""`pytest tests/errors --bless` writes the messages that the corpus is compared with."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--bless`."""
    parser.addoption("--bless", action="store_true", help="accept the messages as they are now")


@pytest.fixture
def bless(request: pytest.FixtureRequest) -> bool:
    """Whether to write the golden files instead of comparing."""
    return bool(request.config.getoption("--bless", default=False))
