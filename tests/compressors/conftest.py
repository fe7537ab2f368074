"""What the tests of all methods share."""

from collections.abc import Iterator

import pytest

from gradwire import kernels


@pytest.fixture(params=["numba", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel backend in turn, pinned for one test."""
    kernels.use(request.param)
    yield request.param
    kernels.use("auto")
