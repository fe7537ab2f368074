"""Buckets: runs of neighbouring entries that share a scale; the last one may be shorter."""

from torch import Tensor


def bucket_count(numel: int, bucket: int) -> int:
    return -(-numel // bucket)


def in_buckets(x: Tensor, bucket: int) -> Tensor:
    """`x` (flat) as [buckets, bucket], filled up with zeros; a view where it fits."""
    buckets = bucket_count(x.numel(), bucket)
    if x.numel() == buckets * bucket:
        return x.view(buckets, bucket)
    rows = x.new_zeros(buckets * bucket)
    rows[: x.numel()] = x
    return rows.view(buckets, bucket)


def spread(scales: Tensor, bucket: int, numel: int) -> Tensor:
    """Each bucket's number for each of its entries: [buckets] to [numel]."""
    return scales.repeat_interleave(bucket)[:numel]
