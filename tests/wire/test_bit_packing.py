"""Number of buckets, whose entries share a scale."""

import pytest

from gradwire.wire.bits import bucket_count


@pytest.mark.parametrize(("numel", "bucket", "count"), [(0, 4, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3)])
def test_count(numel: int, bucket: int, count: int) -> None:
    assert bucket_count(numel, bucket) == count
