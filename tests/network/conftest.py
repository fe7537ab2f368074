"""Shared by the tests that make network namespaces."""

from collections.abc import Iterator

import pytest

from laconic.network.testbed import Testbed


@pytest.fixture(scope="session")
def _reason() -> str | None:
    return Testbed.reason_unavailable()


@pytest.fixture
def emulated(_reason: str | None) -> None:
    """Skips the test where no testbed can be had."""
    if _reason is not None:
        pytest.skip(_reason)


@pytest.fixture
def two_hosts(emulated: None) -> Iterator[Testbed]:
    with Testbed(workers=2, rate="100mbit") as testbed:
        yield testbed
