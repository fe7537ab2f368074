"""Ranks that know TensorFlow."""

from collections.abc import Iterator

import pytest
from named_jobs import NamedJobs

from processes import Ranks


@pytest.fixture(scope="session")
def keras_ranks() -> Iterator[NamedJobs]:
    """Four ranks with Keras on TensorFlow."""
    with Ranks(4, preload=["tensorflow", "gradwire.keras"]) as ranks:
        yield NamedJobs(ranks, "keras_jobs")
