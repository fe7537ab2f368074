"""Saves an engine's state as tensors and numbers; loads it, also for another world size."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias, TypeGuard, cast, get_args

import torch
from torch import Tensor

from gradwire.checkpoint.json_state import seal, unseal
from gradwire.checks import check_number
from gradwire.engine.engine import Engine
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds
from gradwire.types import State

log = logging.getLogger("gradwire")

FORMAT = 2
"""Version of the state dict."""

Residuals: TypeAlias = Literal["fold", "redistribute", "drop"]
"""What becomes of residuals when ranks become more or fewer, from N to M.

fold: rank j takes those of ranks j, j + M, ... as they are, so that their sum stays the same: right
where the learning rate grows with the number of ranks. redistribute: every rank takes their mean,
so that the mean gradient gets what it was owed: right where the rate stays. drop: they are lost.
"""


def save(lanes: Engine) -> dict[str, object]:
    """This rank's own state; copies, so that training may go on."""
    lanes.settle()
    saved = {
        name: {
            "step": lane.ctx.step,
            "kept": {k: t.clone() for k, t in lane.memory_state.items()},
            "talk": {k: t.clone() for k, t in lane.aggregator_state.items()},
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


def load(lanes: Engine, state: Mapping[str, object]) -> None:
    """Takes up exactly where the state was saved; refuses a state of another set-up."""
    lanes.settle()
    saved, scale = _checked(lanes, state, _identity(lanes)), _scale_of(state)
    with all_or_nothing(lanes):
        _load_helm(lanes, state)
        for name, lane in lanes.lanes.items():
            _load_lane(lane, saved[name])
        lanes.loss_scale = scale


def load_resized(
    lanes: Engine, states: Sequence[Mapping[str, object]], residuals: Residuals
) -> None:
    """Takes up where a run of another number of ranks was saved; `states` in order of its ranks."""
    if residuals not in get_args(Residuals):
        known = [*get_args(Residuals)]
        raise ConfigError(f"residuals must be one of {known}, got {residuals!r}")
    if not states:
        raise ConfigError("state: load_resized needs the states of all ranks, got none")
    lanes.settle()
    identity = {**_identity(lanes), "size": len(states)}
    ranks = [_checked(lanes, s, {**identity, "rank": i}) for i, s in enumerate(states)]
    scale = _scale_of(states[0])
    with all_or_nothing(lanes):
        _load_helm(lanes, states[lanes.rank % len(states)])
        for name, lane in lanes.lanes.items():
            there = [saved[name] for saved in ranks]
            kept = _resized_memory(lane, [s.kept for s in there], residuals)
            talk = _resized_talk(lane, [s.talk for s in there], residuals)
            _load_lane(lane, _Saved(there[0].step, kept, talk))
        lanes.loss_scale = scale
    if lanes.helm is not None and len(states) != lanes.size:
        lanes.helm.resize()
    log.info("state of %d ranks for %d: residuals: %s", len(states), lanes.size, residuals)


def _resized_memory(lane: Lane, states: list[State], residuals: Residuals) -> State:
    if residuals == "drop":
        return lane.memory.state(lane.ctx.numel, lane.device)
    here, size = lane.ctx.rank, lane.ctx.world_size
    weights = [1 / len(states)] * len(states)
    if residuals == "fold":
        weights = [float(rank % size == here) for rank in range(len(states))]
    return lane.memory.combined(states, weights)


def _resized_talk(lane: Lane, states: list[State], residuals: Residuals) -> State:
    """What a rank of before knew, which is mostly what all knew; shards are cut anew."""
    ranks_per_replica = lane.aggregator.ranks_per_replica
    states, rank = states[::ranks_per_replica], lane.ctx.rank // ranks_per_replica
    talk = dict(states[rank % len(states)])
    start, stop = bounds(lane.ctx.numel, lane.ctx.world_size // ranks_per_replica)[rank]
    for key in lane.aggregator.sharded_keys:
        if key in talk:
            whole = torch.cat([state[key] for state in states])
            talk[key] = whole[start:stop].clone()
            if residuals == "drop":
                talk[key].zero_()
            elif residuals == "fold":
                # In units of the mean: for the same sum among fewer ranks it has to be more.
                talk[key] *= len(states) / (lane.ctx.world_size // ranks_per_replica)
    return talk


def _identity(lanes: Engine) -> dict[str, object]:
    who = {"seed": lanes.seed, "rank": lanes.rank, "size": lanes.size}
    return {**lanes.plan.describe(), **who}


def own_part(state: object, key: str) -> Mapping[str, object]:
    """What a rank of this name has saved."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected what state_dict returns, got {type(state).__name__}")
    own = state.get(key)
    if not isinstance(own, Mapping):
        raise ConfigError(f"state: has {sorted(state)}, but not {key}; every rank saves its own")
    return own


def ranks_in_order(states: Sequence[object]) -> list[Mapping[str, object]]:
    """The parts of all ranks of a run, from what each of them has saved."""
    merged: dict[str, object] = {}
    for state in states:
        if not isinstance(state, Mapping):
            raise ConfigError(f"state: expected what state_dict returns, got {state!r:.40}")
        merged |= state
    if len(merged) != len(states):
        raise ConfigError(f"state: expected ranks 0 to {len(states) - 1}, got {sorted(merged)}")
    return [own_part(merged, f"rank{rank}") for rank in range(len(states))]


class _Saved(NamedTuple):
    """What a lane remembers."""

    step: int
    kept: State
    talk: State


def _checked(lanes: Engine, state: object, identity: Mapping[str, object]) -> dict[str, _Saved]:
    """The lanes of a state, if it is one of the set-up expected."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected one rank's, got {type(state).__name__}")
    for key, value in {"format": FORMAT, **identity}.items():
        found = state.get(key)
        if isinstance(found, Tensor) or found != value:
            hint = "; load_resized takes another number of ranks" if key == "size" else ""
            raise ConfigError(f"state: {key} is {found!r}, expected {value!r}{hint}")
    saved = state.get("lanes")
    if not isinstance(saved, Mapping):
        raise ConfigError(f"state: lanes are missing, got {type(saved).__name__}")
    if saved.keys() != lanes.lanes.keys():
        odd = sorted(saved.keys() ^ lanes.lanes.keys())
        raise ConfigError(f"state: parameters differ from the model's: {odd}")
    read = {name: _read(name, there) for name, there in saved.items()}
    for name, lane in lanes.lanes.items():
        if (
            read[name].kept.keys() != lane.memory_state.keys()
            or read[name].talk.keys() != lane.aggregator_state.keys()
        ):
            has, wanted = (
                [*read[name].kept, *read[name].talk],
                [*lane.memory_state, *lane.aggregator_state],
            )
            raise ConfigError(f"state of {name}: has {has}, expected {wanted}")
    return read


def _read(name: str, there: object) -> _Saved:
    """One lane's part, which may have come from anywhere."""
    found = there if isinstance(there, Mapping) else {}
    step, kept, talk = (found.get(key) for key in _Saved._fields)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"state of {name}: step must be a whole number >= 0, got {step!r}")
    if not _is_state(kept) or not _is_state(talk):
        got = f"{type(kept).__name__} and {type(talk).__name__}"
        raise ConfigError(f"state of {name}: kept and talk must be tensors by name, got {got}")
    return _Saved(step, kept, talk)


def _is_state(value: object) -> TypeGuard[State]:
    return isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())


def _scale_of(state: Mapping[str, object]) -> float:
    check_number("state", "loss_scale", state.get("loss_scale"))
    return cast(float, state["loss_scale"])


def _load_helm(lanes: Engine, state: Mapping[str, object]) -> None:
    """The controller first: what a lane remembers has the form that its orders give it."""
    there = "controller" in state
    if there != (lanes.helm is not None):
        said = "a controller" if there else "no controller"
        raise ConfigError(f"state: was saved with {said}; go on in the same way")
    if lanes.helm is not None:
        device = next(iter(lanes.tensors.values())).device
        lanes.helm.load(cast(Mapping[str, object], unseal(cast(str, state["controller"]), device)))


@contextmanager
def all_or_nothing(lanes: Engine) -> Iterator[None]:
    """Brings everything back where a state is refused halfway."""
    helm = None if lanes.helm is None else lanes.helm.save()
    before = {
        name: (dict(lane.memory_state), dict(lane.aggregator_state))
        for name, lane in lanes.lanes.items()
    }
    contexts = {name: lane.ctx for name, lane in lanes.lanes.items()}
    scale = lanes.loss_scale
    try:
        yield
    except ConfigError:
        if lanes.helm is not None and helm is not None:
            lanes.helm.load(helm)
        for name, lane in lanes.lanes.items():
            (lane.memory_state, lane.aggregator_state), lane.ctx = before[name], contexts[name]
        lanes.loss_scale = scale
        raise


def _load_lane(lane: Lane, saved: _Saved) -> None:
    # A method that a controller has left remembers in the form that it had last, to be fitted
    # when it comes back; that of the method at work has to be right.
    at_work = lane.aggregator.state(lane.ctx, lane.device).keys()
    both = (
        (lane.memory_state, saved.kept, lane.memory_state.keys()),
        (lane.aggregator_state, saved.talk, at_work),
    )
    for here, there, needed in both:
        shapes = {k: tuple(t.shape)[: None if k in needed else -1] for k, t in there.items()}
        expected = {k: tuple(t.shape)[: None if k in needed else -1] for k, t in here.items()}
        if shapes != expected:
            raise ConfigError(f"state of {lane.name}: has {shapes}, expected {expected}")
        for key, tensor in there.items():
            if tensor.dtype != here[key].dtype:
                wrong = f"{key} is {tensor.dtype}, expected {here[key].dtype}"
                raise ConfigError(f"state of {lane.name}: {wrong}")
            here[key] = tensor.to(lane.device, copy=True)
    lane.ctx = lane.ctx._replace(step=saved.step)
