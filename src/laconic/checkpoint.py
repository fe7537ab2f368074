"""What lanes remember, as plain tensors and numbers, and back: also for another number of ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.exchange.sharded import bounds
from laconic.lanes import Lanes
from laconic.sealed import seal, unseal
from laconic.step import Lane
from laconic.types import State

log = logging.getLogger("laconic")

FORMAT = 2
"""Version of the state dict."""

Residuals: TypeAlias = Literal["fold", "redistribute", "drop"]
"""What becomes of residuals when ranks become more or fewer, from N to M.

fold: rank j takes those of ranks j, j + M, ... as they are, so that their sum stays the same: right
where the learning rate grows with the number of ranks. redistribute: every rank takes their mean,
so that the mean gradient gets what it was owed: right where the rate stays. drop: they are lost.
"""


def save(lanes: Lanes) -> dict[str, object]:
    """This rank's own state; copies, so that training may go on."""
    lanes.settle()
    saved = {
        name: {
            "step": lane.turn.step,
            "kept": {k: t.clone() for k, t in lane.kept.items()},
            "talk": {k: t.clone() for k, t in lane.talk.items()},
        }
        for name, lane in lanes.lanes.items()
    }
    steered = {} if lanes.helm is None else {"controller": seal(lanes.helm.save())}
    return {
        "format": FORMAT,
        "lanes": saved,
        "loss_scale": lanes.loss_scale,
        **_identity(lanes),
        **steered,
    }


def load(lanes: Lanes, state: Mapping[str, object]) -> None:
    """Takes up exactly where the state was saved; refuses a state of another set-up."""
    lanes.settle()
    saved = _checked(lanes, state, _identity(lanes))
    _load_helm(lanes, state)
    for name, lane in lanes.lanes.items():
        there = saved[name]
        _load_lane(lane, there["kept"], there["talk"], cast(int, there["step"]))
    lanes.loss_scale = cast(float, state["loss_scale"])


def load_resized(
    lanes: Lanes, states: Sequence[Mapping[str, object]], residuals: Residuals
) -> None:
    """Takes up where a run of another number of ranks was saved; `states` in order of its ranks."""
    if residuals not in get_args(Residuals):
        known = [*get_args(Residuals)]
        raise ConfigError(f"residuals must be one of {known}, got {residuals!r}")
    lanes.settle()
    identity = {**_identity(lanes), "size": len(states)}
    ranks = [_checked(lanes, s, {**identity, "rank": i}) for i, s in enumerate(states)]
    _load_helm(lanes, states[lanes.rank % len(states)])
    for name, lane in lanes.lanes.items():
        there = [saved[name] for saved in ranks]
        kept = _resized_memory(lane, [cast(State, s["kept"]) for s in there], residuals)
        talk = _resized_talk(lane, [cast(State, s["talk"]) for s in there], residuals)
        _load_lane(lane, kept, talk, cast(int, there[0]["step"]))
    lanes.loss_scale = cast(float, states[0]["loss_scale"])
    log.info("state of %d ranks for %d: residuals: %s", len(states), lanes.size, residuals)


def _resized_memory(lane: Lane, states: list[State], residuals: Residuals) -> State:
    if residuals == "drop":
        return lane.memory.state(lane.turn.numel, lane.device)
    here, size = lane.turn.rank, lane.turn.size
    weights = [1 / len(states)] * len(states)
    if residuals == "fold":
        weights = [float(rank % size == here) for rank in range(len(states))]
    return lane.memory.combined(states, weights)


def _resized_talk(lane: Lane, states: list[State], residuals: Residuals) -> State:
    """What a rank of before knew, which is mostly what all knew; shards are cut anew."""
    unison = lane.talker.unison
    states, rank = states[::unison], lane.turn.rank // unison
    talk = dict(states[rank % len(states)])
    start, stop = bounds(lane.turn.numel, lane.turn.size // unison)[rank]
    for key in lane.talker.shards:
        if key in talk:
            whole = torch.cat([state[key] for state in states])
            talk[key] = whole[start:stop].clone()
            if residuals == "drop":
                talk[key].zero_()
    return talk


def _identity(lanes: Lanes) -> dict[str, object]:
    who = {"seed": lanes.seed, "rank": lanes.rank, "size": lanes.size}
    return {**lanes.plan.describe(), **who}


def _checked(
    lanes: Lanes, state: Mapping[str, object], identity: Mapping[str, object]
) -> Mapping[str, Mapping[str, State | int]]:
    """The lanes of a state, if it is one of the set-up expected."""
    for key, value in {"format": FORMAT, **identity}.items():
        if state.get(key) != value:
            raise ConfigError(f"state: {key} is {state.get(key)!r}, expected {value!r}")
    saved = cast(Mapping[str, Mapping[str, State | int]], state["lanes"])
    if saved.keys() != lanes.lanes.keys():
        odd = sorted(saved.keys() ^ lanes.lanes.keys())
        raise ConfigError(f"state: parameters differ from the model's: {odd}")
    return saved


def _load_helm(lanes: Lanes, state: Mapping[str, object]) -> None:
    """The controller first: what a lane remembers has the form that its orders give it."""
    there = "controller" in state
    if there != (lanes.helm is not None):
        said = "a controller" if there else "no controller"
        raise ConfigError(f"state: was saved with {said}; go on in the same way")
    if lanes.helm is not None:
        device = next(iter(lanes.tensors.values())).device
        lanes.helm.load(cast(Mapping[str, object], unseal(cast(str, state["controller"]), device)))


def _load_lane(lane: Lane, kept: object, talk: object, step: int) -> None:
    for here, there in ((lane.kept, kept), (lane.talk, talk)):
        assert isinstance(there, Mapping)
        shapes = {k: tuple(t.shape) for k, t in there.items()}
        expected = {k: tuple(t.shape) for k, t in here.items()}
        if shapes != expected:
            raise ConfigError(f"state of {lane.name}: has {shapes}, expected {expected}")
        for key, tensor in there.items():
            assert isinstance(tensor, Tensor)
            here[key] = tensor.to(lane.device, copy=True)
    lane.turn = lane.turn._replace(step=step)
