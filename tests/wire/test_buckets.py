"""Buckets: rows that share a scale."""

import pytest
import torch

from laconic.wire.buckets import bucket_count, in_buckets, spread


def test_rows_are_filled_up_with_zeros() -> None:
    assert in_buckets(torch.tensor([1.0, 2.0, 3.0]), 2).tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_rows_that_fit_are_a_view() -> None:
    x = torch.arange(6.0)
    assert in_buckets(x, 3).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("numel", "bucket", "count"), [(0, 4, 0), (1, 4, 1), (8, 4, 2), (9, 4, 3)])
def test_count(numel: int, bucket: int, count: int) -> None:
    assert bucket_count(numel, bucket) == count
    assert in_buckets(torch.zeros(numel), bucket).shape == (count, bucket)


def test_each_entry_gets_its_bucket_s_number() -> None:
    assert spread(torch.tensor([1.0, 2.0]), 3, 5).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
