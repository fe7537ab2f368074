"""Fixtures of the tests of all methods."""

from collections.abc import Iterator

import pytest

from gradwire import kernels


@pytest.fixture(params=["numba", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Pins each CPU kernel backend in turn for one test."""
    kernels.use(request.param)
    yield request.param
    kernels.use("auto")
