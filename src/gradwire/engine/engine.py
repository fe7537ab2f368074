"""The engine: the lanes of a model on one rank. Integrations and simulated workers share it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import hypot
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.checks import read_number
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.engine.chunks import recut, split_messages
from gradwire.engine.cuda_graphs import GraphCache, is_graph_safe
from gradwire.engine.nonfinite import NonFiniteGuard, SkippedSteps, StepVerdict, Verdict
from gradwire.engine.observer import StepObserver
from gradwire.engine.plan import Plan
from gradwire.engine.step import BucketResult, Lane, lane_rounds, run_rounds
from gradwire.errors import ConfigError, NonFiniteError, WireError
from gradwire.memory._update import kept_moments
from gradwire.spec import format_spec
from gradwire.types import State

log = logging.getLogger("gradwire")

NanPolicy: TypeAlias = Literal["propagate", "raise", "ignore"]
"""Policy for a step in which a gradient is not finite on at least one rank.

propagate: each gradient of its bucket gets a NaN on all ranks, so that a loss scaler skips the
step, and no state changes; a mean of uncompressed gradients keeps the NaN where it was. raise:
also, `backward` raises NonFiniteError on all ranks. ignore: no check, and residuals need half the
memory; they may keep non-finite values. With a robust aggregation, such as gather:aggregate=median,
as many ranks as it tolerates may have non-finite gradients: they are ignored, and the step counts.
"""


class Engine:
    """The lanes of a model by parameter name, their state and their statistics."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        rank: int,
        world_size: int,
        seed: int,
        nan_policy: NanPolicy = "propagate",
        cuda_graphs: bool = True,
        wants_mean: bool = True,
        discards_lanes: bool = False,
    ) -> None:
        """`discards_lanes`: a lane's step may be discarded from outside, whatever the policy."""
        if nan_policy not in get_args(NanPolicy):
            known = [*get_args(NanPolicy)]
            raise ConfigError(f"nan_policy must be one of {known}, got {nan_policy!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.nan_policy, self.cuda_graphs, self.wants_mean = nan_policy, cuda_graphs, wants_mean
        self.tensors = tensors
        self._reversible = discards_lanes or nan_policy != "ignore"
        self._set_plan(plan)
        self.dense_bytes = 0
        self.loss_scale = 1.0
        self.skipped = SkippedSteps(logs=rank == 0)
        self.observer: StepObserver | None = None
        self.any_rank: Callable[[bool], bool] | None = None
        """Combines the non-finite flag with that of ranks outside the group, with a collective."""
        self._verdict = StepVerdict()
        self._graphs = GraphCache()

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._tolerated = plan.tolerated(self.world_size)
        cuts = {name: plan.chunks(name, tensor) for name, tensor in self.tensors.items()}
        self.chunks = {name: chunks for name, chunks in cuts.items() if chunks}
        self.lanes = {
            lane: plan.lane(lane, piece, self.rank, self.world_size, self.seed, self._reversible)
            for name, tensor in self.tensors.items()
            for lane, piece in self._pieces(name, tensor)
        }
        for lane in self.lanes.values():
            # A memory such as ef21, which keeps the mean itself, needs it on every rank.
            wants_mean = self.wants_mean or lane.keeps_mean
            lane.ctx = lane.ctx._replace(wants_mean=wants_mean)
        # The moments of a dense optimiser change after the exchange, which reads none of them.
        keeps = any(lane.keeps_state for lane in self.lanes.values())
        self._keeps_state = keeps and not plan.updates_mean

    def _pieces(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the lanes of a parameter with their parts of a tensor that is shaped like it."""
        if name not in self.chunks:
            return [(name, tensor)]
        return [(chunk.name, chunk.of(tensor)) for chunk in self.chunks[name]]

    def lanes_of(self, name: str) -> list[Lane]:
        """Returns the lane of a parameter, or those of its chunks in order."""
        return [self.lanes[chunk.name] for chunk in self.chunks.get(name, ())] or [self.lanes[name]]

    def bucket_programs(
        self, names: Sequence[str], grads: Sequence[Tensor]
    ) -> list[CollectiveProgram[None]]:
        """Returns programs that replace the gradients of some parameters by their mean.

        There is one for each chunk of a large parameter, so that several can be under way at once.
        They leave the lanes' new state pending until `end_step` and `commit_step`.
        """
        self._begin_bucket(grads)
        return [self._program(*message) for message in split_messages(self.chunks, names, grads)]

    def bucket_program(
        self, names: Sequence[str], grads: Sequence[Tensor]
    ) -> CollectiveProgram[None]:
        """Returns the work of `bucket_programs` as a single program."""
        self._begin_bucket(grads)
        if self.chunks:
            pieces = [
                piece
                for name, grad in zip(names, grads, strict=True)
                for piece in self._pieces(name, grad)
            ]
            names, grads = [lane for lane, _ in pieces], [grad for _, grad in pieces]
        return self._program(names, grads)

    def _begin_bucket(self, grads: Sequence[Tensor]) -> None:
        self.commit_step()
        self.dense_bytes += self.plan.dense_bytes(sum(g.nbytes for g in grads), self.world_size)

    def _program(self, names: Sequence[str], grads: Sequence[Tensor]) -> CollectiveProgram[None]:
        """Returns the program of some lanes, live or from a CUDA graph."""
        start = partial(self._exchange, names, grads)
        captured = None
        if grads and grads[0].is_cuda and self._is_capturable(names):
            captured = self._graphs.find(self.lanes, names, grads, start)
        return self._observed(names, grads, start if captured is None else captured.run)

    def _observed(
        self,
        names: Sequence[str],
        grads: Sequence[Tensor],
        start: Callable[[], CollectiveProgram[BucketResult]],
    ) -> CollectiveProgram[None]:
        """Runs a bucket's exchange, live or from a CUDA graph, and notes its results."""
        if self.observer is not None:
            self.observer.bucket_started(names, grads, self.loss_scale)
        if self.plan.sends_updates and self.loss_scale != 1:
            # Moments and updates do not depend on the loss scale.
            torch._foreach_mul_(list(grads), 1 / self.loss_scale)
        result = yield from start()
        if (self.plan.counts_votes or self.plan.sends_updates) and self.loss_scale != 1:
            # A majority is +1 or -1 at any loss scale, and will be unscaled with the rest.
            unscaled = [g for n, g in zip(names, grads, strict=True) if self._is_unscaled(n)]
            torch._foreach_mul_(unscaled, self.loss_scale)
        if result.nonfinite is not None and result.corrupted is not None:
            self._verdict.add(result.nonfinite, result.corrupted)
        if self.observer is not None:
            self.observer.bucket_ended(names, result.statistics)

    def _is_unscaled(self, name: str) -> bool:
        """Returns whether the mean of a lane does not have the loss scale: an update, or votes."""
        return bool(self.plan.rules) or self.plan.method_of(name).counts_votes

    def _exchange(
        self, names: Sequence[str], grads: Sequence[Tensor]
    ) -> CollectiveProgram[BucketResult]:
        lanes = [self.lanes[name] for name in names]
        rounds = [lane_rounds(grad, lane) for lane, grad in zip(lanes, grads, strict=True)]
        guard = self._guard(lanes, grads) if self._is_guarded() else None
        piggyback = None
        if self.observer is not None and grads:
            piggyback = self.observer.piggyback(names, grads[0].device)
        return run_rounds(rounds, guard, piggyback)

    def _guard(self, lanes: Sequence[Lane], grads: Sequence[Tensor]) -> NonFiniteGuard:
        def drop_nonfinite() -> None:
            for lane in lanes:
                lane.drop_nonfinite()

        repair = drop_nonfinite if self._tolerated else None
        return NonFiniteGuard(grads, lanes, self._tolerated, repair)

    def _is_guarded(self) -> bool:
        """Returns whether ranks exchange a non-finite flag.

        A mean of dense gradients propagates NaN by itself, so there the flag is needed only to
        raise, for an observer that must know which steps count, or if a lane keeps state.
        """
        if self.plan.propagates_nonfinite and not self._is_observed() and not self._keeps_state:
            return self.nan_policy == "raise"
        return self.nan_policy != "ignore"

    def _is_observed(self) -> bool:
        """Returns whether statistics of an observer travel with the next step."""
        return self.observer is not None and not self.observer.is_idle

    def _is_capturable(self, names: Sequence[str]) -> bool:
        scaled = self.plan.counts_votes and self.loss_scale != 1
        measuring = self.observer is not None and self.observer.is_measuring
        if not self.cuda_graphs or scaled or measuring or self.plan.updates_mean:
            return False
        return all(is_graph_safe(self.lanes[name]) for name in names)

    def may_capture_next(self) -> bool:
        """Returns whether the next program of all parameters may be captured as a CUDA graph.

        Meanwhile no thread may synchronise the whole GPU, which would break the capture.
        """
        names, on_gpu = tuple(self.lanes), any(t.is_cuda for t in self.tensors.values())
        return on_gpu and self._is_capturable(names) and not self._graphs.has(names)

    def message_bytes(self, names: Sequence[str]) -> int:
        """Returns the approximate length of a message of these parameters."""
        return sum(lane.message_bytes for name in names for lane in self.lanes_of(name))

    def is_plain_mean(self) -> bool:
        """Returns whether an integration may average gradients itself (`count_dense_bucket`).

        Then no flag and no statistics travel with them: a sum propagates NaN by itself.
        """
        dense = self.plan.is_dense and not self.plan.sends_updates
        return dense and not self._is_observed() and not self._is_guarded()

    def count_dense_bucket(self, names: Sequence[str], nbytes: int) -> None:
        """Counts a step of some parameters whose gradients are averaged elsewhere."""
        self.commit_step()
        self.dense_bytes += self.plan.dense_bytes(nbytes, self.world_size)
        for name in names:
            for lane in self.lanes_of(name):
                lane.begin_step()

    def count_dense_passes(self, passes: int, bucket_bytes: Sequence[int]) -> None:
        """Counts steps of all parameters whose gradients were averaged in these buckets."""
        for nbytes in bucket_bytes:
            self.dense_bytes += passes * self.plan.dense_bytes(nbytes, self.world_size)
        self.set_steps({name: self.steps_of(name) + passes for name in self.tensors})

    def steps_of(self, name: str) -> int:
        """Returns the number of steps of one parameter that counted."""
        return self.lanes_of(name)[0].ctx.step

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Sets the steps of some parameters."""
        for name, step in steps.items():
            for lane in self.lanes_of(name):
                lane.ctx = lane.ctx._replace(step=step)

    def end_step(self) -> None:
        """Ends a step, in the thread that ran its programs; `commit_step` completes it later."""
        if self.observer is not None:
            self.observer.step_ended()
        self._verdict.close()

    def commit_step(self, *, wait: bool = True) -> NonFiniteError | None:
        """Commits the pending state of the last step, or discards it if a flag was raised.

        Returns the error to raise, if the policy is "raise". Raises WireError, and discards the
        step, if this rank received what its peers may not have (`NonFiniteGuard`). Without `wait`
        it does nothing if the host would have to wait for the GPU, unless the policy is "raise".
        """
        pending = self._verdict.pending or (self.observer is not None and self.observer.pending)
        if pending and not wait and self.nan_policy != "raise":
            return None
        verdict = self._verdict.take()
        if verdict is None:
            return None
        bad = verdict.nonfinite
        if self.any_rank is not None and self.nan_policy != "ignore":
            bad = self.any_rank(bad)
        for lane in self.lanes.values():
            lane.discard() if bad else lane.commit()
        if verdict.corrupted:
            raise WireError(
                f"a message of step {self.steps()} that rank {self.rank} received is not finite, "
                "but was when it was sent: it was corrupted on the way (use checksum=True to see "
                "where); restart from a checkpoint"
            )
        if self.observer is not None:
            self.observer.step_committed(self.steps(), counts=not bad)
        if not bad:
            self.skipped.end()
            return None
        text = self.skipped.add(self.steps())
        return NonFiniteError(text) if self.nan_policy == "raise" else None

    def check_step(self) -> Verdict:
        """Ends a step that counts only if others decide so; `settle_step` completes it."""
        self._verdict.close()
        found = self._verdict.take()
        assert found is not None, "the step was just closed"
        return found

    def settle_step(self, *, counts: bool) -> None:
        """Commits the pending state of the last step, or discards it."""
        for lane in self.lanes.values():
            lane.commit() if counts else lane.discard()

    def regroup(self, plan: Plan, rank: int, world_size: int) -> None:
        """Continues as a rank of another group of ranks, with this rank's residuals.

        All state that the ranks of the old group shared begins anew: warm starts, the means that
        memories such as ef21 keep, and, with a line in the log, residuals of shards.
        """
        for lane in self.lanes.values():
            if lane.keeps_mean:
                lane.memory_state = lane.memory.state(lane.ctx.numel, lane.device)
        self.rank, self.world_size = rank, world_size
        self.switch(plan)

    def restart(self) -> float:
        """Makes all state begin anew; returns the norm of the residuals that end."""
        norm = self.errors()["residual_norm"]
        self._set_plan(self.plan)
        self.drop_cuda_graphs()
        return norm

    def switch(self, plan: Plan) -> None:
        """Changes the method; state of a memory of the same kind is kept.

        Other residuals are dropped, with a line in the log, as are residuals of shards.
        """
        self.commit_step()
        if self.observer is not None:
            self.observer.check_plan(plan)
        old = {name: self.lanes_of(name) for name in self.tensors}
        self._set_plan(plan)
        self.drop_cuda_graphs()
        dropped: list[Tensor] = []
        for name in self.tensors:
            dropped += _take_over(old[name], self.lanes_of(name))
        norm = hypot(*(float(tensor.norm()) for tensor in dropped))
        if norm:
            level = logging.INFO if self.rank == 0 else logging.DEBUG
            log.log(level, "switch: residuals of norm %.3g are dropped", norm)
        if self.observer is not None:
            self.observer.plan_changed(plan, self.lanes, self.steps())

    def moments(self) -> list[Tensor]:
        """Returns the moments of a dense optimiser, of all parameters in order."""
        assert self.plan.updates_mean, "moments are those of each worker's own gradients"
        return [x for lane in self.lanes.values() for x in lane.memory_state.values() if x.dim()]

    def drop_cuda_graphs(self) -> None:
        """Frees all captured graphs: after a lane was reconfigured, or when the engine is done.

        The garbage collector might free them while another graph is captured, which would fail.
        """
        self._graphs.clear()

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent; the learning rate was divided by `factor`."""
        self.commit_step()
        for lane in self.lanes.values():
            lane.rescale(factor)

    def learning_rate_changed(self, before: float, after: float) -> None:
        """Rescales residuals to a new learning rate."""
        before = read_number("learning_rate_changed", "before", before)
        after = read_number("learning_rate_changed", "after", after)
        if before <= 0 or after <= 0:
            raise ConfigError(f"learning rates must be positive, got {before} and {after}")
        self.rescale(before / after)
        if self.observer is not None:
            self.observer.learning_rate_changed(self.steps(), before, after)

    def epoch_ended(self, learning_rate: float | None) -> None:
        """Informs the observer, if there is one; the learning rate may be zero."""
        if learning_rate is not None:
            learning_rate = read_number("epoch_ended", "learning_rate", learning_rate)
            if learning_rate < 0:
                raise ConfigError(f"epoch_ended: learning_rate must be >= 0, got {learning_rate}")
        self.commit_step()
        if self.observer is not None:
            self.observer.epoch_ended(self.steps(), learning_rate)

    def loss_scale_changed(self, scale: float) -> None:
        """Converts all state in units of the gradient to a new loss scale."""
        scale = read_number("loss_scale_changed", "scale", scale)
        if scale <= 0:
            raise ConfigError(f"the loss scale must be positive, got {scale}")
        self.commit_step()
        if scale != self.loss_scale:
            if not self.plan.sends_updates:
                for lane in self.lanes.values():
                    lane.scale_loss(scale / self.loss_scale)
            self.loss_scale = scale

    def steps(self) -> int:
        """Returns the number of steps that counted."""
        return max((lane.ctx.step for lane in self.lanes.values()), default=0)

    def errors(self) -> dict[str, float]:
        """Returns the relative error, as it was sampled last, and the norm of the residuals."""
        errors = [e for lane in self.lanes.values() if (e := lane.relative_error) is not None]
        unsent = [lane.memory.unsent(lane.memory_state) for lane in self.lanes.values()]
        norms = [tensor.norm() for tensor in unsent if tensor is not None]
        return {
            "relative_error": float(torch.stack(errors).nanmean()) if errors else 0.0,
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
        }

    def stats(self, meter: Meter) -> dict[str, object]:
        self.commit_step()
        sent = meter.sent_bytes
        device = next(iter(self.tensors.values())).device if self.tensors else torch.device("cpu")
        return {
            **self.plan.describe(),
            "steps": self.steps(),
            "skipped": self.skipped.total,
            "sent_bytes": sent,
            "received_bytes": meter.received_bytes,
            "inside_bytes": meter.inside_bytes,
            "message_bytes": meter.message_bytes,
            "dense_bytes": self.dense_bytes,
            "ratio": self.dense_bytes / sent if sent else 1.0,
            "calls": meter.calls,
            "encode_s": meter.encode_s,
            "wire_s": meter.wire_s,
            "decode_s": meter.decode_s,
            **self.errors(),
            "backend": kernels.backend_for(device),
            "cuda_graphs": len(self._graphs),
            **({"policies": self._policy_stats()} if self.plan.policies else {}),
            **({} if self.observer is None else {"controller": self.observer.stats()}),
        }

    def _policy_stats(self) -> list[dict[str, object]]:
        """Returns what each policy is, and how its parameters are compressed, the default last."""
        found: list[dict[str, object]] = []
        for policy, method, names in self.plan.policies:
            lanes = [lane for name in names for lane in self.lanes_of(name)]
            errors = [e for lane in lanes if (e := lane.relative_error) is not None]
            unsent = [lane.memory.unsent(lane.memory_state) for lane in lanes]
            norms = [tensor.norm() for tensor in unsent if tensor is not None]
            found.append(
                {
                    "pattern": policy.pattern,
                    "spec": format_spec(method.compressor),
                    "memory": format_spec(method.memory),
                    "exchange": str(method.exchange),
                    "parameters": len(names),
                    "compressed": sum(self._is_compressed(name) for name in names),
                    "message_bytes": sum(lane.message_bytes for lane in lanes),
                    "relative_error": float(torch.stack(errors).nanmean()) if errors else 0.0,
                    "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
                }
            )
        return found

    def _is_compressed(self, name: str) -> bool:
        """Returns whether a parameter is sent by the method of its policy, not uncompressed."""
        method = self.plan.method_of(name)
        return not method.is_dense and method.compresses(self.tensors[name], self.plan.min_numel)


def _take_over(old: Sequence[Lane], new: Sequence[Lane]) -> list[Tensor]:
    """Gives a parameter's new lanes the step and memory of the old; returns what is dropped."""
    for lane in new:
        lane.ctx = lane.ctx._replace(step=old[0].ctx.step)
    states: Sequence[State] = [lane.memory_state for lane in old]
    is_same = new[0].memory_state.keys() == states[0].keys()
    kept = _fitted(states, old, new) if is_same else None
    if kept is None:
        # Not the residuals, but the moments of an optimiser.
        moments = [kept_moments(new[0].memory, lane.memory, lane.memory_state) for lane in old]
        for lane, state in zip(new, _fitted(moments, old, new) or (), strict=True):
            lane.memory_state |= state
    for lane, state in zip(new, kept or (), strict=kept is not None):
        lane.memory_state = state
    return [tensor for lane in old for tensor in lane.unsent(with_memory=kept is None)]


def _fitted(
    states: Sequence[State], old: Sequence[Lane], new: Sequence[Lane]
) -> Sequence[State] | None:
    """Returns states in the new lanes' chunks, or None if they cannot be cut."""
    if [lane.ctx.shape for lane in old] == [lane.ctx.shape for lane in new]:
        return states
    return recut(states, [lane.ctx.numel for lane in new])
