"""Buckets: runs of neighbouring entries that share a scale; the last one may be shorter."""


def bucket_count(numel: int, bucket: int) -> int:
    return -(-numel // bucket)
