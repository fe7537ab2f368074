"""Auto: the cheaper of gather and sharded for messages that cannot be added up on the way."""

from typing import Literal

from laconic.network.model import LinkModel


def gather_s(nbytes: int, size: int, link: LinkModel) -> float:
    """How long a gather of messages of this length takes."""
    return link.call_s("gather", nbytes, size)


def sharded_s(nbytes: int, size: int, link: LinkModel) -> float:
    """The same for shards that travel pairwise, and then one by one around a ring."""
    shard = nbytes / size
    return link.call_s("scatter", (size - 1) * shard, size) + link.call_s("gather", shard, size)


def choose(nbytes: int, size: int, link: LinkModel) -> Literal["gather", "sharded"]:
    """The exchange that takes less time for messages of this length.

    A gather encodes once, so it is exact where sharded is not: it wins ties and near ties.
    """
    near = gather_s(nbytes, size, link) <= 1.5 * sharded_s(nbytes, size, link)
    return "gather" if near else "sharded"
