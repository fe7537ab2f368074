"""Outer loop: every few steps workers average their drift from a common anchor.

Local SGD, Qsparse-local-SGD, DiLoCo and SparseLoCo differ in how the drift is compressed and in the
outer step that the anchor takes along the mean drift.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.base import Memory
from gradwire.checks import check_fraction_below_one, check_positive_fraction, check_whole
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.identity import identity_of
from gradwire.local.anchors import Anchors, AnchorStore
from gradwire.local.base import (
    LocalMethod,
    LocalNanPolicy,
    check_nan_policy,
    drift_plan,
    message_ratio,
)
from gradwire.local.fragment import (
    FAILED,
    IDLE,
    IN_FLIGHT,
    Fragment,
    OuterSGD,
    Partition,
    partition_parameters,
)
from gradwire.local.island import forms_of
from gradwire.local.optimizers import Optimizers, learning_rate
from gradwire.local.workers import Group, Wait
from gradwire.policies import MethodSpec, find_policies
from gradwire.types import State

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Streaming:
    """The parts of a model that are synchronised in turn, and the delay of their means.

    Of `fragments` one is sent every `sync_every / fragments` steps. Its mean is applied `delay`
    steps later, and the fraction `alpha` of a parameter stays as the steps in between have left it.
    With `alpha` None these steps stay in full, on top of the mean, and until the mean is applied
    parameters keep only the fraction `ahead` of the drift that was sent.
    """

    fragments: Partition = 1
    delay: int = 0
    alpha: float | None = 0.0
    ahead: float = 1.0

    def check(self, method: str, sync_every: int, count: int) -> None:
        if sync_every % count:
            raise ConfigError(
                f"{method}: sync_every {sync_every} must be a multiple of {count} fragments"
            )
        check_whole(method, "delay", self.delay, 0, sync_every)
        if self.alpha is not None:
            check_fraction_below_one(method, "alpha", self.alpha)
        check_positive_fraction(method, "ahead", self.ahead)
        if self.ahead != 1 and not self.delay:
            raise ConfigError(
                f"{method}: ahead={self.ahead:g} needs a delay: no mean is in flight without one"
            )


def keep_local_steps(delay: int, ahead: float) -> Streaming:
    """Returns the schedule of the whole model that keeps all steps taken during the delay."""
    return Streaming(delay=delay, alpha=None if delay else 0.0, ahead=ahead)


@dataclass(frozen=True)
class DriftCompression:
    """Settings of the compression of drifts."""

    compressor: MethodSpec
    memory: Memory | str | None
    exchange: str
    nan_policy: LocalNanPolicy
    forget_below: float | None = None
    """Residuals are dropped when the learning rate is below this fraction of the last sync's."""

    def check(self, method: str, parameters: Iterable[str]) -> None:
        check_nan_policy(method, self.nan_policy)
        if (policies := find_policies(self.compressor)) is not None:
            # A fragment has some of the parameters, so a pattern may match none of them.
            policies.assign(parameters)
        if self.forget_below is not None:
            check_positive_fraction(method, "forget_below", self.forget_below)


class OuterLoopMethod(LocalMethod):
    """A local method whose workers drift from a common anchor and periodically move it together."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compression: DriftCompression,
        outer: OuterSGD,
        streaming: Streaming,
        sync_every: int,
        group: Group,
        seed: int,
        broadcast: bool,
        anchors: Anchors = "device",
    ) -> None:
        LocalMethod.__init__(self, model, optimizer, sync_every, group, seed, broadcast)
        method = type(self).__name__
        compression.check(method, self.parameters)
        outer.check(method)
        self._store = AnchorStore(anchors)
        self._store.check(method)
        parts = partition_parameters(method, self.parameters, streaming.fragments)
        streaming.check(method, sync_every, len(parts))
        self.outer, self.streaming, self._compression = outer, streaming, compression
        # A shard may be too small for a method that another rank's is large enough for.
        with self._island.same_errors():
            self._fragments = [self._fragment(part) for part in parts]
        self._waits: dict[int, Wait] = {}
        self._failed: dict[int, NonFiniteError] = {}
        self._rate = torch.tensor(learning_rate(self.optimizers), dtype=torch.float64)

    def settings(self) -> dict[str, object]:
        outer = {"forget_below": self._compression.forget_below, "outer": identity_of(self.outer)}
        parts = [list(fragment.parameters) for fragment in self._fragments]
        s = self.streaming
        schedule = {"fragments": parts, "delay": s.delay, "alpha": s.alpha, "ahead": s.ahead}
        first, *others = [fragment.engine.plan.identity() for fragment in self._fragments]
        # Fragments have different plans if policies give their parameters different methods.
        differ = {"plans": others} if any(other != first for other in others) else {}
        # Places differ between workers and runs as they like; formats change the results.
        kept = {"anchors": "bf16"} if self._store.kind == "bf16" else {}
        return {**first, **differ, **outer, **schedule, **kept}

    def planned_ratio(self) -> float:
        """Returns the compression ratio of a sync, times `sync_every`."""
        return self.sync_every * message_ratio(*(part.engine for part in self._fragments))

    def _initialize(self) -> None:
        for fragment in self._fragments:
            fragment.initialize()

    def _step(self) -> None:
        # All means are applied before the first sync starts: simulated workers run a sync when the
        # last of them has started it, and could apply nothing in between.
        errors = dict[int, NonFiniteError]()
        if self.streaming.delay:
            for number, fragment in enumerate(self._fragments):
                error = self._apply_and_capture(number, fragment)
                if error is not None:
                    errors[number] = error
        for number, fragment in enumerate(self._fragments):
            # After a failed sync the parameters must be repaired before the next one.
            if self._is_due(number, 0) and number not in errors:
                self._sync(number, fragment)
        for error in errors.values():
            raise error

    def _apply_and_capture(self, number: int, fragment: Fragment) -> NonFiniteError | None:
        """Applies the mean that is due, and captures the drift that is due."""
        applies, captures = self._is_due(number, self.streaming.delay), self._is_due(number, 0)
        if applies:
            self._wait_for(number)
            if int(fragment.status) == FAILED:
                fragment.status.fill_(IDLE)
                resumed = "a parameter was not finite in the sync that was in flight at the save"
                return self._failed.pop(number, NonFiniteError(resumed))
        # After a failed sync there is no drift in flight.
        applies = applies and int(fragment.status) == IN_FLIGHT
        if applies and captures:
            fragment.apply_and_capture()
        elif applies:
            fragment.apply_mean()
        elif captures:
            fragment.capture_drift()
        return None

    def _is_due(self, number: int, delay: int) -> bool:
        """Returns whether the sync of a fragment was due `delay` steps ago."""
        gap = self.sync_every // len(self._fragments)
        since_first = self.steps - (number + 1) * gap - delay
        return since_first >= 0 and since_first % self.sync_every == 0

    def _wait_for(self, number: int) -> None:
        """Waits for the sync of a fragment; after a state was loaded there is none.

        A NonFiniteError is stored until the mean is due, so that all workers raise it at the same
        step, even if one has waited earlier.
        """
        if number in self._waits:
            try:
                self._waits.pop(number)()
            except NonFiniteError as error:
                self._failed[number] = error
                self._fragments[number].discard_mean()

    def _sync(self, number: int, fragment: Fragment) -> None:
        self._drop_residuals_after_decay(fragment)
        self.syncs += 1
        if self.streaming.delay:
            # Training may synchronise the GPU at any time, which would break a graph capture.
            blocking = fragment.engine.may_capture_next()
            self._waits[number] = self._workers.start(fragment.average_drift(), blocking=blocking)
        else:
            self._workers.run(fragment.sync())

    def _drop_residuals_after_decay(self, fragment: Fragment) -> None:
        fraction = self._compression.forget_below
        before, now = float(self._rate), learning_rate(self.optimizers)
        if fraction is not None and now < fraction * before:
            log.info(
                "the learning rate has fallen from %g to %g; residuals are dropped", before, now
            )
            fragment.engine.rescale(0.0)
        self._rate.fill_(now)

    def _engines(self) -> Sequence[Engine]:
        for number in range(len(self._fragments)):
            self._wait_for(number)
        return [fragment.engine for fragment in self._fragments]

    def _tensors(self) -> dict[str, State]:
        kinds: dict[str, State] = {"anchor": {}, "momentum": {}, "rate": {"last": self._rate}}
        for number, fragment in enumerate(self._fragments):
            kinds["anchor"] |= fragment.anchor
            kinds["momentum"] |= fragment.momentum
            if self.streaming.delay:
                kinds.setdefault("drift", {}).update(fragment.saved_drift())
                kinds.setdefault("status", {})[f"fragment{number}"] = fragment.status
            if fragment.base:
                kinds.setdefault("base", {}).update(fragment.base)
        return kinds

    def _common(self) -> Mapping[str, Tensor]:
        return self._tensors()["anchor"]

    def _fragment(self, parameters: Mapping[str, nn.Parameter]) -> Fragment:
        compression, rank, size = self._compression, self._workers.rank, self._workers.size
        policies, forms = find_policies(compression.compressor), forms_of(parameters)
        plan = drift_plan(
            type(self).__name__,
            compression.compressor if policies is None else policies.restricted(parameters),
            compression.memory,
            compression.exchange,
            forms,
            size,
        )
        engine = Engine(plan, forms, rank, size, self.seed, compression.nan_policy)
        streaming = self.streaming
        alpha, ahead = streaming.alpha, streaming.ahead
        return Fragment(parameters, engine, self.outer, alpha, ahead, self._store)
