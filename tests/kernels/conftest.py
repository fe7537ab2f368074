"""Shared by the tests of kernels."""

from collections.abc import Iterator

import pytest
import torch

from processes import Ranks


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` gives with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Ranks]:
    """A process of its own: Triton's interpreter is chosen when Triton is imported."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def compiler() -> Iterator[Ranks]:
    """Another one, whose Triton compiles."""
    with Ranks(1) as ranks:
        yield ranks
