"""Saves an engine's state as tensors and numbers; loads it, also for another world size."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias, TypeGuard, cast, get_args

import torch
from torch import Tensor

from gradwire.checkpoint.json_state import from_json, to_json
from gradwire.checks import check_number
from gradwire.engine.engine import Engine
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError
from gradwire.exchange.sharded import bounds
from gradwire.identity import check_saved_identity
from gradwire.types import State

log = logging.getLogger("gradwire")

FORMAT = 5
"""Version of the state dict."""

Residuals: TypeAlias = Literal["fold", "redistribute", "drop"]
"""Decides about residuals when the number of ranks changes from N to M.

fold: rank j takes those of ranks j, j + M, ... as they are, so that their sum stays the same: right
where the learning rate grows with the number of ranks. redistribute: every rank takes their mean,
so that the mean gradient gets what it was owed: right where the rate stays. drop: they are lost.
"""


def save(engine: Engine) -> dict[str, object]:
    """Returns a copy of this rank's own state."""
    engine.commit_step()
    saved = {
        name: {
            "step": lane.ctx.step,
            "memory": {k: t.clone() for k, t in lane.memory_state.items()},
            "aggregator": {k: t.clone() for k, t in lane.aggregator_state.items()},
        }
        for name, lane in engine.lanes.items()
    }
    observer = engine.observer
    controller = {} if observer is None else {"controller": to_json(observer.state_dict())}
    return {
        "format": FORMAT,
        "lanes": saved,
        "loss_scale": engine.loss_scale,
        **_identity(engine),
        **controller,
    }


def load(engine: Engine, state: Mapping[str, object]) -> None:
    """Restores a saved state; raises ConfigError if it was saved with other settings.

    Refuses non-finite values under any policy: error feedback would return them in every step.
    """
    engine.commit_step()
    with all_or_nothing(engine):
        _adopt_plan(engine, state)
        saved, scale = _checked(engine, state, _identity(engine)), _loss_scale_of(state)
        for name, found in saved.items():
            _check_finite(name, engine.rank, {**found.memory, **found.aggregator})
        _load_controller(engine, state)
        for name, lane in engine.lanes.items():
            _load_lane(lane, saved[name])
        engine.loss_scale = scale


def load_resized(
    engine: Engine, states: Sequence[Mapping[str, object]], residuals: Residuals
) -> None:
    """Restores the state of a run with another world size; `states` in order of its ranks."""
    if residuals not in get_args(Residuals):
        known = [*get_args(Residuals)]
        raise ConfigError(f"residuals must be one of {known}, got {residuals!r}")
    if not states:
        raise ConfigError("state: load_resized needs the states of all ranks, got none")
    engine.commit_step()
    with all_or_nothing(engine):
        _adopt_plan(engine, states[0])
        identity = {**_identity(engine), "size": len(states)}
        ranks = [_checked(engine, s, {**identity, "rank": i}) for i, s in enumerate(states)]
        scale = _loss_scale_of(states[0])
        for rank, lanes in enumerate(ranks):
            for name, found in lanes.items():
                _check_finite(name, rank, _used_tensors(engine.lanes[name], found, residuals))
        _load_controller(engine, states[engine.rank % len(states)])
        for name, lane in engine.lanes.items():
            saved = [lanes[name] for lanes in ranks]
            memory = _resized_memory(lane, [s.memory for s in saved], residuals)
            aggregator = _resized_aggregator(lane, [s.aggregator for s in saved], residuals)
            _load_lane(lane, _SavedLane(saved[0].step, memory, aggregator))
        engine.loss_scale = scale
    if engine.observer is not None and len(states) != engine.world_size:
        engine.observer.world_size_changed()
    log.info("state of %d ranks for %d: residuals: %s", len(states), engine.world_size, residuals)


def _resized_memory(lane: Lane, states: list[State], residuals: Residuals) -> State:
    if residuals == "drop" and not lane.memory.is_debt:
        return lane.memory.state(lane.ctx.numel, lane.device)
    rank, size = lane.ctx.rank, lane.ctx.world_size
    weights = [1 / len(states)] * len(states)
    if residuals == "drop":
        # Not a new state: the moments of an optimiser are kept.
        weights = [0.0] * len(states)
    elif residuals == "fold":
        weights = [float(old_rank % size == rank) for old_rank in range(len(states))]
    return lane.memory.combined(states, weights)


def _resized_aggregator(lane: Lane, states: list[State], residuals: Residuals) -> State:
    """Takes the state of an old rank, which is mostly equal on all; shards are cut anew."""
    ranks_per_replica = lane.aggregator.ranks_per_replica
    states, rank = states[::ranks_per_replica], lane.ctx.rank // ranks_per_replica
    resized = dict(states[rank % len(states)])
    start, stop = bounds(lane.ctx.numel, lane.ctx.world_size // ranks_per_replica)[rank]
    for key in lane.aggregator.sharded_keys:
        if key in resized:
            whole = torch.cat([state[key] for state in states])
            resized[key] = whole[start:stop].clone()
            if residuals == "drop":
                resized[key].zero_()
            elif residuals == "fold":
                # In units of the mean, which must grow if fewer ranks are to keep the same sum.
                resized[key] *= len(states) / (lane.ctx.world_size // ranks_per_replica)
    return resized


def _used_tensors(lane: Lane, saved: "_SavedLane", residuals: Residuals) -> State:
    """Returns the tensors of an old rank's lane of which the new state is made."""
    if residuals != "drop":
        return {**saved.memory, **saved.aggregator}
    shards = lane.aggregator.sharded_keys
    return {key: tensor for key, tensor in saved.aggregator.items() if key not in shards}


def _check_finite(name: str, rank: int, tensors: State) -> None:
    for key, tensor in tensors.items():
        bad = 0
        if tensor.is_floating_point():
            bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            count = "1 entry that is" if bad == 1 else f"{bad} entries that are"
            raise ConfigError(
                f"state of {name}: {key} of rank {rank} has {count} not finite; load an earlier "
                "checkpoint, or without residuals: load_resized(states, residuals='drop')"
            )


def _identity(engine: Engine) -> dict[str, object]:
    # One text: a distributed checkpoint loads only entries that the fresh state has too.
    plan = {"plan": json.dumps(engine.plan.identity())}
    return {**plan, "seed": engine.seed, "rank": engine.rank, "size": engine.world_size}


def own_part(state: object, key: str) -> Mapping[str, object]:
    """Returns the part of a state dict that the rank of this name has saved."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected what state_dict returns, got {type(state).__name__}")
    own = state.get(key)
    if not isinstance(own, Mapping):
        raise ConfigError(f"state: has {sorted(state)}, but not {key}; every rank saves its own")
    return own


def ranks_in_order(states: Sequence[object]) -> list[Mapping[str, object]]:
    """Returns the parts of all ranks, from the state dicts that they have saved."""
    merged: dict[str, object] = {}
    for state in states:
        if not isinstance(state, Mapping):
            raise ConfigError(f"state: expected what state_dict returns, got {state!r:.40}")
        merged |= state
    if len(merged) != len(states):
        raise ConfigError(f"state: expected ranks 0 to {len(states) - 1}, got {sorted(merged)}")
    return [own_part(merged, f"rank{rank}") for rank in range(len(states))]


class _SavedLane(NamedTuple):
    """The saved state of a lane; the names of its fields are keys of the state dict."""

    step: int
    memory: State
    aggregator: State


def _checked(
    engine: Engine, state: object, identity: Mapping[str, object]
) -> dict[str, _SavedLane]:
    """Returns the lanes of a state; raises ConfigError if its settings are not as expected."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"state: expected one rank's, got {type(state).__name__}")
    for key, value in {"format": FORMAT, **identity}.items():
        found = state.get(key)
        if key == "plan":
            check_saved_identity("", found, engine.plan.identity())
        elif isinstance(found, Tensor) or found != value:
            hint = "; load_resized takes another number of ranks" if key == "size" else ""
            raise ConfigError(f"state: {key} is {found!r}, expected {value!r}{hint}")
    saved = state.get("lanes")
    if not isinstance(saved, Mapping):
        raise ConfigError(f"state: lanes are missing, got {type(saved).__name__}")
    if saved.keys() != engine.lanes.keys():
        raise ConfigError(f"state: {_first_other_name(saved, engine.lanes)}")
    lanes = {name: _checked_lane(name, value) for name, value in saved.items()}
    for name, lane in engine.lanes.items():
        if (
            lanes[name].memory.keys() != lane.memory_state.keys()
            or lanes[name].aggregator.keys() != lane.aggregator_state.keys()
        ):
            has, wanted = (
                [*lanes[name].memory, *lanes[name].aggregator],
                [*lane.memory_state, *lane.aggregator_state],
            )
            raise ConfigError(f"state of {name}: has {has}, expected {wanted}")
    return lanes


def _first_other_name(saved: Mapping[str, object], lanes: Mapping[str, Lane]) -> str:
    """Names the first parameter that only the state or only the model has."""
    missing, unknown = [n for n in lanes if n not in saved], [n for n in saved if n not in lanes]
    rest = len(missing) + len(unknown) - 1
    more = f", and {rest} other names differ" if rest else ""
    if missing:
        return f"it has no parameter {missing[0]!r}, which the model has{more}"
    return f"it has a parameter {unknown[0]!r}, which the model does not have{more}"


def _checked_lane(name: str, value: object) -> _SavedLane:
    """Validates the state of one lane, which may have come from anywhere."""
    found = value if isinstance(value, Mapping) else {}
    step, memory, aggregator = (found.get(key) for key in _SavedLane._fields)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"state of {name}: step must be a whole number >= 0, got {step!r}")
    if not _is_state(memory) or not _is_state(aggregator):
        got = f"{type(memory).__name__} and {type(aggregator).__name__}"
        raise ConfigError(
            f"state of {name}: memory and aggregator must be tensors by name, got {got}"
        )
    return _SavedLane(step, memory, aggregator)


def _is_state(value: object) -> TypeGuard[State]:
    return isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())


def _loss_scale_of(state: Mapping[str, object]) -> float:
    check_number("state", "loss_scale", state.get("loss_scale"))
    scale = cast(float, state["loss_scale"])
    if scale <= 0:
        raise ConfigError(f"state: loss_scale must be positive, got {scale!r}")
    return scale


def _load_controller(engine: Engine, state: Mapping[str, object]) -> None:
    """Restores the controller first: its settings determine the shapes of the lanes' states."""
    is_saved = "controller" in state
    if is_saved != (engine.observer is not None):
        found = "a controller" if is_saved else "no controller"
        raise ConfigError(f"state: was saved with {found}; load it with the same setting")
    if engine.observer is not None:
        device = next(iter(engine.tensors.values())).device
        engine.observer.load_state_dict(from_json("controller", state["controller"], device))


def _adopt_plan(engine: Engine, state: object) -> None:
    """Lets an observer that chooses plans continue with the one of the saved state."""
    if engine.observer is not None and isinstance(state, Mapping) and "controller" in state:
        device = next(iter(engine.tensors.values())).device
        engine.observer.adopt_plan(from_json("controller", state["controller"], device))


@contextmanager
def all_or_nothing(engine: Engine) -> Iterator[None]:
    """Restores the engine as it was if a state is refused halfway."""
    controller = None if engine.observer is None else engine.observer.state_dict()
    before = {
        name: (dict(lane.memory_state), dict(lane.aggregator_state))
        for name, lane in engine.lanes.items()
    }
    contexts = {name: lane.ctx for name, lane in engine.lanes.items()}
    scale = engine.loss_scale
    try:
        yield
    except ConfigError:
        if engine.observer is not None and controller is not None:
            engine.observer.load_state_dict(controller)
        for name, lane in engine.lanes.items():
            (lane.memory_state, lane.aggregator_state), lane.ctx = before[name], contexts[name]
        engine.loss_scale = scale
        raise


def _load_lane(lane: Lane, saved: _SavedLane) -> None:
    # The state of a method that a controller has switched away from keeps its last shape, and is
    # fitted when the method is used again; that of the current method must match exactly.
    current = lane.aggregator.state(lane.ctx, lane.device).keys()
    both = (
        (lane.memory_state, saved.memory, lane.memory_state.keys()),
        (lane.aggregator_state, saved.aggregator, current),
    )
    for target, source, exact in both:
        for key, tensor in source.items():
            kept = None if key in exact else -1
            shape, expected = tuple(tensor.shape), tuple(target[key].shape)
            if len(shape) != len(expected) or shape[:kept] != expected[:kept]:
                raise ConfigError(
                    f"state of {lane.name}: {key} has the shape {shape}, expected {expected}"
                )
            if tensor.dtype != target[key].dtype:
                wrong = f"{key} is {tensor.dtype}, expected {target[key].dtype}"
                raise ConfigError(f"state of {lane.name}: {wrong}")
            target[key] = tensor.to(lane.device, copy=True)
    lane.ctx = lane.ctx._replace(step=saved.step)
