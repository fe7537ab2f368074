"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest
import torch

from processes import Ranks


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills the memory of `torch.empty` with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Ranks]:
    """Starts a process for Triton's interpreter, which is enabled when Triton is imported."""
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def compiler() -> Iterator[Ranks]:
    """Starts a process whose Triton compiles."""
    with Ranks(1) as ranks:
        yield ranks
