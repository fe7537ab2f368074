"""Fixtures of the tests that create network namespaces."""

from collections.abc import Iterator

import pytest

from gradwire.testbed.hosts import Testbed


@pytest.fixture
def two_hosts(emulated: None) -> Iterator[Testbed]:
    with Testbed(workers=2, rate="100mbit") as testbed:
        yield testbed
