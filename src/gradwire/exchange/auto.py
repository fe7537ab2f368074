"""Auto: chooses the cheaper of gather and sharded for messages that cannot be summed in transit."""

from typing import Literal

from gradwire.comm.cost_model import LinkModel

_DENSE_FACTOR = 1.5
_SPARSE_FACTOR = 8.0
"""Factor by which a gather may take longer; a factor of 8 means up to 16 ranks at any length."""


def gather_s(nbytes: int, size: int, link: LinkModel) -> float:
    """Returns the time of a gather of messages of this length."""
    return link.call_s("gather", nbytes, size)


def sharded_s(nbytes: int, size: int, link: LinkModel) -> float:
    """Returns the time of an all-to-all of shards and a gather of their means."""
    shard = nbytes / size
    return link.call_s("all_to_all", (size - 1) * shard, size) + link.call_s("gather", shard, size)


def choose(
    nbytes: int, size: int, link: LinkModel, *, sparse: bool
) -> Literal["gather", "sharded"]:
    """Returns the exchange for messages of this length; `sparse` ones hold a selection of entries.

    A gather encodes once, where sharded encodes the mean again, so it wins ties and near ties. For
    sparse messages the second encoding cuts the union of all ranks' selections down to one rank's
    number of entries, which costs far more accuracy than rounding again; so sharded must save more.
    """
    factor = _SPARSE_FACTOR if sparse else _DENSE_FACTOR
    near = gather_s(nbytes, size, link) <= factor * sharded_s(nbytes, size, link)
    return "gather" if near else "sharded"
