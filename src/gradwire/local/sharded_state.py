"""State of a model that is sharded inside an island, as torch.distributed.checkpoint wants it.

A tensor with one value for each entry of a sharded parameter becomes a DTensor like it, so that a
checkpoint is cut anew for another layout inside the island. Any other, such as the factors of a
low-rank method for one shard, gets the place of its rank into its key: it fits one layout only.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradwire.local.island import Sharded, is_sharded, local_part

_AT = "@"
"""Separates a key from the place of the rank that has saved it."""

Saved = Mapping[str, Any]
"""A worker's state as `state.write_state` returns it, or a part of it."""


def to_sharded(state: Saved, tensors: Mapping[str, Sharded], place: str) -> dict[str, Any]:
    """Returns a worker's state with DTensors, and with keys that ranks of its island can share."""

    def saved_lane(name: str, lane: Saved) -> Saved:
        like = tensors.get(name)
        memory = dict(_per_entry(key, t, like, place) for key, t in lane["memory"].items())
        own = {_own_key(key, t, like, place): t for key, t in lane["aggregator"].items()}
        return {**lane, "memory": memory, "aggregator": own}

    engines = [
        {**engine, "lanes": {n: saved_lane(n, lane) for n, lane in engine["lanes"].items()}}
        for engine in state["engines"]
    ]
    kinds = {
        kind: dict(_per_entry(name, t, tensors.get(name), place) for name, t in some.items())
        for kind, some in state["tensors"].items()
    }
    return {**state, "engines": engines, "tensors": kinds}


def _per_entry(key: str, tensor: Tensor, like: Sharded | None, place: str) -> tuple[str, Tensor]:
    """Returns the key and the form of a tensor that may have a value for each of some entries."""
    if not tensor.dim() or like is None or tensor.numel() != local_part(like).numel():
        return _own_key(key, tensor, like, place), tensor
    from torch.distributed.tensor import DTensor

    return key, DTensor.from_local(
        tensor.view(local_part(like).shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _own_key(key: str, tensor: Tensor, like: Sharded | None, place: str) -> str:
    """Returns the key of a tensor that belongs to one shard; numbers are equal in an island."""
    if not tensor.dim():
        return key
    # With the shape no checkpoint of another layout has the key.
    shape = "" if like is None else "x".join(map(str, local_part(like).shape))
    return f"{key}{_AT}{place}:{shape}"


def from_sharded(value: Any, place: str) -> Any:
    """Returns a worker's state as its rank at this place uses it, from what `to_sharded` returned.

    What other places have saved for themselves is left out.
    """
    if is_sharded(value):
        return local_part(value).reshape(-1)
    if isinstance(value, list):
        return [from_sharded(one, place) for one in value]
    if not isinstance(value, Mapping):
        return value
    found: dict[str, Any] = {}
    for key, one in value.items():
        name, at, its_place = str(key).rpartition(_AT)
        if not (at and isinstance(one, Tensor)):
            found[key] = from_sharded(one, place)
        elif its_place.startswith(f"{place}:"):
            found[name] = one
    return found
