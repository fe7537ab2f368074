"""Fixtures of the tests of the documentation site."""

from collections.abc import Iterator

import pytest

from gradwire import kernels


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    """Selects the kernels that the site is built with: no compiler, and the same everywhere."""
    kernels.use("reference")
    yield
    kernels.use("auto")
