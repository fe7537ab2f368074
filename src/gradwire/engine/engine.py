"""All lanes of one model on one rank: what a link and a simulated worker have in common."""

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
from gradwire.comm.meter import Meter, ring_bytes
from gradwire.control.base import Controller
from gradwire.control.runtime import ControllerRuntime
from gradwire.control.timing import Clock
from gradwire.engine.cuda_graphs import CapturedProgram, GraphCache, is_steady
from gradwire.engine.nonfinite import NonFiniteGuard, SkippedSteps, StepVerdict
from gradwire.engine.piggyback import Piggyback
from gradwire.engine.plan import Plan
from gradwire.engine.step import BucketResult, Lane, exchange, together
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.types import Rounds

log = logging.getLogger("gradwire")

Led: TypeAlias = CollectiveProgram[BucketResult]

NanPolicy: TypeAlias = Literal["propagate", "raise", "ignore"]
"""What becomes of a step in which a gradient is not finite on any rank.

propagate: each gradient of its bucket has a NaN on all ranks, so that a loss scaler skips the step,
and nothing is remembered of it. raise: that too, and `backward` raises NonFiniteError on all ranks.
ignore: nobody looks, and residuals need half the memory; what is not finite may stay in them. An
aggregation that bears liars bears as many ranks with such gradients: the step counts without them.
"""


class Engine:
    """The lanes by parameter name, their state, and their statistics."""

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, Tensor],
        rank: int,
        size: int,
        seed: int,
        nan_policy: NanPolicy = "propagate",
        cuda_graphs: bool = True,
        wants_mean: bool = True,
    ) -> None:
        if nan_policy not in get_args(NanPolicy):
            known = [*get_args(NanPolicy)]
            raise ConfigError(f"nan_policy must be one of {known}, got {nan_policy!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        self.rank, self.size, self.seed = rank, size, seed
        self.nan_policy, self.cuda_graphs, self.wants_mean = nan_policy, cuda_graphs, wants_mean
        self.tensors = tensors
        self.plan, self.lanes = plan, self._open(plan)
        self.dense_bytes = 0
        self.skips = SkippedSteps()
        self.loss_scale = 1.0
        self._step = StepVerdict()
        self.helm: ControllerRuntime | None = None
        self._recorder = GraphCache()

    def steer(self, controller: Controller, clock: Clock) -> None:
        """Lets a controller change the method's settings between steps."""
        forget = self._recorder.forget
        self.helm = ControllerRuntime(
            controller, self.plan, self.lanes, self.rank, self.size, clock, forget
        )

    def talk(self, names: Sequence[str], grads: Sequence[Tensor]) -> CollectiveProgram[None]:
        """The conversation about some parameters' gradients, which become their mean.

        What lanes remember of it is a draft until `finish`.
        """
        self.settle()
        self.dense_bytes += ring_bytes(sum(g.nbytes for g in grads), self.size)
        led = partial(self._led, names, grads)
        recording = self._recording(names, grads, led)
        return self._noted(names, grads, led if recording is None else recording.talk)

    def may_record(self) -> bool:
        """Whether the next conversation about all parameters may become a recording on a GPU.

        While it does nobody may wait for the whole GPU, or the recording is spoilt.
        """
        names, on_gpu = tuple(self.tensors), any(t.is_cuda for t in self.tensors.values())
        return on_gpu and self._is_recordable(names) and not self._recorder.has(names)

    def message_bytes(self, names: Sequence[str]) -> int:
        """About how many bytes a message about these parameters has."""
        return sum(self.lanes[name].message_bytes for name in names)

    def is_straight(self) -> bool:
        """Whether a mount may take the mean of gradients by itself, where `pass_by` counts them.

        They need no words beside them: a sum shows by itself what is not finite.
        """
        return self.plan.is_dense() and self.helm is None and not self._has_alarm()

    def pass_by(self, names: Sequence[str], nbytes: int) -> None:
        """A step of some parameters whose gradients (so many bytes) become their mean elsewhere."""
        self.settle()
        self.dense_bytes += ring_bytes(nbytes, self.size)
        for name in names:
            self.lanes[name].begin()

    def _noted(
        self, names: Sequence[str], grads: Sequence[Tensor], lead: Callable[[], Led]
    ) -> CollectiveProgram[None]:
        """The conversation, of which the pilot and the step's verdict hear."""
        if self.helm is not None:
            self.helm.listen(names, grads, self.loss_scale)
        alarm, agreed = yield from lead()
        if alarm is not None:
            self._step.add(alarm)
        if self.helm is not None:
            self.helm.collect(names, agreed)

    def _recording(
        self, names: Sequence[str], grads: Sequence[Tensor], led: Callable[[], Led]
    ) -> CapturedProgram | None:
        """What to replay in place of a conversation, if it can be recorded."""
        on_gpu = bool(grads) and grads[0].is_cuda
        if not on_gpu or not self._is_recordable(names):
            return None
        return self._recorder.find(self.lanes, names, grads, led)

    def _is_recordable(self, names: Sequence[str]) -> bool:
        scaled = self.plan.counts_votes() and self.loss_scale != 1
        if not self.cuda_graphs or scaled or (self.helm is not None and self.helm.pilot.measures):
            return False
        return all(is_steady(self.lanes[name]) for name in names)

    def _led(self, names: Sequence[str], grads: Sequence[Tensor]) -> Led:
        """The conversation itself, with what the pilot has to know."""
        census = None
        if self.helm is not None and grads:
            census = self.helm.census(names, grads[0].device)
        alarm = yield from self._exchanged(names, grads, census)
        return BucketResult(alarm, None if census is None else census.agreed)

    def _exchanged(
        self, names: Sequence[str], grads: Sequence[Tensor], census: Piggyback | None
    ) -> CollectiveProgram[Tensor | None]:
        """The same; returns whether it was in vain, where that is looked for."""
        talks = [exchange(g, self.lanes[name]) for name, g in zip(names, grads, strict=True)]
        if self._has_alarm():
            return (yield from self._guarded(names, talks, grads, census))
        yield from together(talks, census=census)
        return None

    def _has_alarm(self) -> bool:
        """Whether ranks look for what is not finite.

        A dense sum shows it by itself, so there it is looked for only to raise, or for a pilot
        that must know which steps count.
        """
        by_itself = self.plan.is_dense() and self.helm is None
        return self.nan_policy == "raise" or (self.nan_policy == "propagate" and not by_itself)

    def _guarded(
        self,
        names: Sequence[str],
        talks: Sequence[Rounds],
        grads: Sequence[Tensor],
        census: Piggyback | None,
    ) -> CollectiveProgram[Tensor | None]:
        """The same with an alarm: gradients that are not finite anywhere are so everywhere.

        But where the exchange bears some liars, it is as if as many were not there.
        """
        borne = self.plan.bears(self.size)
        alarm = NonFiniteGuard(
            grads, [self.lanes[name].aggregator.propagates_nonfinite for name in names], borne
        )
        yield from together(talks, alarm, census)
        if borne:
            for name in names:
                self.lanes[name].mend()
        if self.plan.counts_votes() and self.loss_scale != 1:
            # A majority is +1 or -1 whatever the scale, and whoever scaled will unscale it.
            torch._foreach_mul_(list(grads), self.loss_scale)
        alarm.spoil(grads)
        return alarm.raised

    def finish(self) -> None:
        """Ends a step. Its drafts are kept if no alarm was raised in any of its talks.

        Called where the talks ran; `settle` then does it, wherever that suits.
        """
        if self.helm is not None:
            self.helm.close()
        self._step.close()

    def settle(self, *, wait: bool = True) -> NonFiniteError | None:
        """Sees to it that the last finished step is kept, or is as if it had not been.

        Returns what to raise, if raising is asked for. Without `wait` all is put off where the host
        would wait for a GPU to tell.
        """
        late = self._step.late or (self.helm is not None and self.helm.late)
        if late and not wait and self.nan_policy != "raise":
            return None
        bad = self._step.take()
        if bad is None:
            return None
        for lane in self.lanes.values():
            lane.forget() if bad else lane.keep()
        if self.helm is not None:
            self.helm.settle(self.steps(), counts=not bad)
        if not bad:
            self.skips.end()
            return None
        text = self.skips.add(self.steps())
        return NonFiniteError(text) if self.nan_policy == "raise" else None

    def switch(self, plan: Plan) -> None:
        """Changes the method; what the memory kept is kept where the new one keeps the same.

        Else it is dropped, with a line in the log; so is what averaging ranks keep of shards.
        """
        self.settle()
        if self.helm is not None:
            self.helm.check(plan)
        old = self.lanes
        self.plan, self.lanes = plan, self._open(plan)
        self._recorder.forget()
        dropped: list[Tensor] = []
        for name, lane in self.lanes.items():
            lane.ctx = lane.ctx._replace(step=old[name].ctx.step)
            same = lane.memory_state.keys() == old[name].memory_state.keys()
            if same:
                lane.memory_state = old[name].memory_state
            dropped += old[name].unsent_keys(kept=not same)
        norm = hypot(*(float(tensor.norm()) for tensor in dropped))
        if norm:
            log.info("switch: residuals of norm %.3g are dropped", norm)
        if self.helm is not None:
            self.helm.take_over(plan, self.lanes, self.helm.pilot, self.steps())

    def _open(self, plan: Plan) -> dict[str, Lane]:
        careful = self.nan_policy != "ignore"
        lanes = {
            name: plan.lane(name, tensor, self.rank, self.size, self.seed, careful)
            for name, tensor in self.tensors.items()
        }
        for lane in lanes.values():
            # A memory that owes nothing remembers the mean.
            lane.ctx = lane.ctx._replace(wants_mean=self.wants_mean or not lane.memory.is_debt)
        return lanes

    def close(self) -> None:
        """Lets go of all recordings, which would otherwise wait for the garbage collector.

        It might come while others record, and no graph may be freed then.
        """
        self._recorder.forget()

    def rescale(self, factor: float) -> None:
        """Multiplies what waits to be sent, since the learning rate has changed by 1/`factor`."""
        self.settle()
        for lane in self.lanes.values():
            lane.rescale(factor)

    def rate_changed(self, before: float, after: float) -> None:
        """Rescales what waits to a new learning rate, which the controller hears of, too."""
        before = read_number("learning_rate_changed", "before", before)
        after = read_number("learning_rate_changed", "after", after)
        if before <= 0 or after <= 0:
            raise ConfigError(f"learning rates must be positive, got {before} and {after}")
        self.rescale(before / after)
        if self.helm is not None:
            self.helm.pilot.rate_changed(self.steps(), before, after)
            self.helm.redirect()

    def epoch_ended(self, learning_rate: float | None) -> None:
        """Tells the controller, if there is one; a rate may end at zero."""
        if learning_rate is not None:
            learning_rate = read_number("epoch_ended", "learning_rate", learning_rate)
            if learning_rate < 0:
                raise ConfigError(f"epoch_ended: learning_rate must be >= 0, got {learning_rate}")
        self.settle()
        if self.helm is not None:
            self.helm.pilot.epoch(self.steps(), learning_rate)
            self.helm.redirect()

    def follow_loss_scale(self, scale: float) -> None:
        """Brings all that is in units of the gradient to a new loss scale."""
        scale = read_number("loss_scale_changed", "scale", scale)
        if scale <= 0:
            raise ConfigError(f"the loss scale must be positive, got {scale}")
        self.settle()
        if scale != self.loss_scale:
            for lane in self.lanes.values():
                lane.change_units(scale / self.loss_scale)
            self.loss_scale = scale

    def steps(self) -> int:
        """Steps that count."""
        return max((lane.ctx.step for lane in self.lanes.values()), default=0)

    def stats(self, meter: Meter) -> dict[str, object]:
        self.settle()
        sent = meter.sent_bytes
        errors = [e for lane in self.lanes.values() if (e := lane.relative_error) is not None]
        waiting = [lane.memory.unsent(lane.memory_state) for lane in self.lanes.values()]
        norms = [tensor.norm() for tensor in waiting if tensor is not None]
        device = next(iter(self.tensors.values())).device if self.tensors else torch.device("cpu")
        return {
            **self.plan.describe(),
            "steps": self.steps(),
            "skipped": self.skips.total,
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
            "relative_error": float(torch.stack(errors).nanmean()) if errors else 0.0,
            "residual_norm": float(torch.stack(norms).norm()) if norms else 0.0,
            "backend": kernels.chosen(device),
            "recordings": self._recorder.recordings,
            **({} if self.helm is None else {"controller": self.helm.stats()}),
        }
