"""What all tests share: a few real ranks that live for the whole run."""

from collections.abc import Iterator

import pytest

from processes import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four real processes joined by gloo; starting them takes seconds, so they are kept."""
    with Ranks(4) as ranks:
        yield ranks
