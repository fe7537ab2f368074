"""Fixtures: ranks with TensorFlow."""

from collections.abc import Iterator

import pytest
from named_jobs import NamedJobs

from processes import Ranks


@pytest.fixture(scope="session")
def keras_ranks() -> Iterator[NamedJobs]:
    """Starts four ranks with Keras on TensorFlow."""
    with Ranks(4, preload=["tensorflow", "gradwire.keras"]) as ranks:
        yield NamedJobs(ranks, "keras_jobs")
