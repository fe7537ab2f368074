"""Buckets: runs of neighbouring entries that share a scale; the last one may be shorter."""

from torch import Tensor

from gradwire import kernels


def packed_numel(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Integers below 2^width as uint8: value i takes bits i*width and following of the stream."""
    return kernels.at(values).pack_bits(values, width)


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The first `count` values again."""
    return kernels.at(packed).unpack_bits(packed, width, count)


def bucket_count(numel: int, bucket: int) -> int:
    return -(-numel // bucket)
