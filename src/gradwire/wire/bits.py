"""Bit-packed integers, and the number of buckets: runs of entries that share a scale."""

from torch import Tensor

from gradwire import kernels


def packed_numel(count: int, width: int) -> int:
    """Returns the bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Packs integers below 2^width: value i takes the bits from i*width on of the stream."""
    return kernels.on(values.device).pack_bits(values, width)


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """Unpacks the first `count` values."""
    return kernels.on(packed.device).unpack_bits(packed, width, count)


def bucket_count(numel: int, bucket: int) -> int:
    """Returns the number of buckets; the last one may be shorter."""
    return -(-numel // bucket)
