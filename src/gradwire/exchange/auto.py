"""Auto: the cheaper of gather and sharded for messages that cannot be added up on the way."""

from typing import Literal

from gradwire.comm.cost_model import LinkModel

_ROUNDED = 1.5
_SPARSE = 8.0
"""How many times longer a gather may take; 8 times means up to 16 ranks, whatever the length."""


def gather_s(nbytes: int, size: int, link: LinkModel) -> float:
    """How long a gather of messages of this length takes."""
    return link.call_s("gather", nbytes, size)


def sharded_s(nbytes: int, size: int, link: LinkModel) -> float:
    """The same for shards that travel pairwise, and then one by one around a ring."""
    shard = nbytes / size
    return link.call_s("scatter", (size - 1) * shard, size) + link.call_s("gather", shard, size)


def choose(
    nbytes: int, size: int, link: LinkModel, *, sparse: bool
) -> Literal["gather", "sharded"]:
    """The exchange for messages of this length; `sparse` ones tell a choice of entries.

    A gather encodes once, so it is exact where sharded is not: it wins ties and near ties. Of
    sparse messages a shard's owner cuts what all ranks chose down to as few entries as one chose,
    which costs far more accuracy than rounding again does; so there sharded has to save more.
    """
    worth = _SPARSE if sparse else _ROUNDED
    near = gather_s(nbytes, size, link) <= worth * sharded_s(nbytes, size, link)
    return "gather" if near else "sharded"
