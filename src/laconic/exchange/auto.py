"""Auto: the cheaper of gather and sharded for messages that cannot be added up on the way."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinkModel:
    """A link as two numbers; the defaults are a slow local network, waking the process included."""

    latency_s: float = 1e-3
    rate_bits: float = 1e9

    def gather_s(self, nbytes: int, size: int) -> float:
        """A ring passes N-1 messages through every link."""
        return (size - 1) * (self.latency_s + 8 * nbytes / self.rate_bits)

    def sharded_s(self, nbytes: int, size: int) -> float:
        """N-1 shards pairwise at once, then a ring of N-1 shards."""
        shard_s = 8 * nbytes / size / self.rate_bits
        return self.latency_s + (size - 1) * shard_s + (size - 1) * (self.latency_s + shard_s)


def choose(nbytes: int, size: int, link: LinkModel) -> Literal["gather", "sharded"]:
    """The exchange that takes less time for messages of this length.

    A gather encodes once, so it is exact where sharded is not: it wins ties and near ties.
    """
    return (
        "gather" if link.gather_s(nbytes, size) <= 1.5 * link.sharded_s(nbytes, size) else "sharded"
    )
