"""Outer loop: every few steps workers average their drift from a common anchor.

Local SGD, Qsparse-local-SGD, DiLoCo and SparseLoCo differ in how the drift is compressed and in the
outer step that the anchor takes along the mean drift.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base import Compressor, Memory
from gradwire.checks import check_fraction, check_share, check_whole
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.local.base import (
    LocalNanPolicy,
    LocalSteps,
    check_nan_policy,
    drift_plan,
    message_ratio,
)
from gradwire.local.fragment import Division, Fragment, Outer, divide
from gradwire.local.workers import Group, Wait
from gradwire.types import State

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Streaming:
    """Parts of the model that are told in turn, and how long after the mean is taken up.

    Of `fragments` every `sync_every / fragments` steps one is told. Its mean is taken up `delay`
    steps later, and the share `alpha` of a parameter stays as the steps in between have made it.
    With None these steps are kept in full, on top of the mean, and of those that were told the
    share `ahead` is gone until the mean is there.
    """

    fragments: Division = 1
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
            check_share(method, "alpha", self.alpha)
        check_fraction(method, "ahead", self.ahead)
        if self.ahead != 1 and not self.delay:
            raise ConfigError(
                f"{method}: ahead={self.ahead:g} needs a delay: nobody waits for a mean"
            )


def kept_steps(delay: int, ahead: float) -> Streaming:
    """All of the model at once, whose mean comes so late; no step is lost meanwhile."""
    return Streaming(delay=delay, alpha=None if delay else 0.0, ahead=ahead)


@dataclass(frozen=True)
class Telling:
    """What is said of the drift."""

    compressor: Compressor | str
    memory: Memory | str | None
    exchange: str
    nan_policy: LocalNanPolicy
    forget_below: float | None = None
    """Memory is dropped when the learning rate is below this share of the last time's."""

    def check(self, method: str) -> None:
        check_nan_policy(method, self.nan_policy)
        if self.forget_below is not None:
            check_fraction(method, "forget_below", self.forget_below)


class AnchoredSteps(LocalSteps):
    """Workers who go their own ways from an anchor, and from time to time move it together."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        telling: Telling,
        outer: Outer,
        streaming: Streaming,
        sync_every: int,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        LocalSteps.__init__(self, model, optimizer, sync_every, group, seed, broadcast)
        method = type(self).__name__
        telling.check(method)
        outer.check(method)
        parts = divide(method, self.parameters, streaming.fragments)
        streaming.check(method, sync_every, len(parts))
        self.outer, self.streaming, self._telling = outer, streaming, telling
        self._fragments = [self._fragment(part) for part in parts]
        self._waits: dict[int, Wait] = {}
        self._void: dict[int, NonFiniteError] = {}
        self._rate = torch.tensor(self._learning_rate(), dtype=torch.float64)

    def settings(self) -> dict[str, object]:
        told = {"forget_below": self._telling.forget_below, "outer": str(self.outer)}
        parts = [list(fragment.parameters) for fragment in self._fragments]
        when = self.streaming
        late = {"fragments": parts, "delay": when.delay, "alpha": when.alpha, "ahead": when.ahead}
        return {**self._fragments[0].lanes.plan.describe(), **told, **late}

    def planned_ratio(self) -> float:
        """What the compressor saves at a sync, times `sync_every`."""
        return self.sync_every * message_ratio(*(part.lanes for part in self._fragments))

    def _begin(self) -> None:
        for fragment in self._fragments:
            fragment.begin()

    def _step(self) -> None:
        # Simulated workers who have begun to tell go on when all have, and cannot take up before.
        complaints = dict[int, NonFiniteError]()
        if self.streaming.delay:
            for number, fragment in enumerate(self._fragments):
                complaint = self._take_turn(number, fragment)
                if complaint is not None:
                    complaints[number] = complaint
        for number, fragment in enumerate(self._fragments):
            # Those whose mean is void rest: their parameters have yet to be put right.
            if self._due(number, 0) and number not in complaints:
                self._tell(number, fragment)
        for complaint in complaints.values():
            raise complaint

    def _take_turn(self, number: int, fragment: Fragment) -> NonFiniteError | None:
        """Takes up the mean that is due, and notes what is to be told."""
        arrives, departs = self._due(number, self.streaming.delay), self._due(number, 0)
        if arrives:
            self._rest(number)
            if number in self._void:
                fragment.lose()
                return self._void.pop(number)
        # Nothing is under way if the mean before was void.
        arrives = arrives and bool(fragment.drift)
        if arrives and departs:
            fragment.relay()
        elif arrives:
            fragment.arrive()
        elif departs:
            fragment.depart()
        return None

    def _due(self, number: int, late: int) -> bool:
        """Whether a fragment was to be told so many steps ago."""
        gap = self.sync_every // len(self._fragments)
        since_first = self.steps - (number + 1) * gap - late
        return since_first >= 0 and since_first % self.sync_every == 0

    def _rest(self, number: int) -> None:
        """Waits until nothing of a fragment is under way; nothing is after a state was loaded.

        Of a mean that is not finite all workers hear when it is due, whoever has waited before.
        """
        if number in self._waits:
            try:
                self._waits.pop(number)()
            except NonFiniteError as error:
                self._void[number] = error
                self._fragments[number].lose()

    def _tell(self, number: int, fragment: Fragment) -> None:
        self._forget_after_decay(fragment)
        self.syncs += 1
        if self.streaming.delay:
            # Whoever trains may wait for the whole GPU at any time.
            in_peace = fragment.lanes.may_record()
            self._waits[number] = self._peers.start(fragment.talk(), in_peace=in_peace)
        else:
            self._peers.talk(fragment.sync())

    def _forget_after_decay(self, fragment: Fragment) -> None:
        share, before, now = self._telling.forget_below, float(self._rate), self._learning_rate()
        if share is not None and now < share * before:
            log.info(
                "the learning rate has fallen from %g to %g; memories are emptied", before, now
            )
            fragment.lanes.rescale(0.0)
        self._rate.fill_(now)

    def _learning_rate(self) -> float:
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _lanes(self) -> Sequence[Engine]:
        for number in range(len(self._fragments)):
            self._rest(number)
        return [fragment.lanes for fragment in self._fragments]

    def _tensors(self) -> dict[str, State]:
        kinds: dict[str, State] = {"anchor": {}, "momentum": {}, "rate": {"last": self._rate}}
        for fragment in self._fragments:
            kinds["anchor"] |= fragment.anchor
            kinds["momentum"] |= fragment.momentum
            if self.streaming.delay:
                kinds.setdefault("drift", {}).update(fragment.hold())
            if fragment.base:
                kinds.setdefault("base", {}).update(fragment.base)
        return kinds

    def _common(self) -> Mapping[str, Tensor]:
        return self._tensors()["anchor"]

    def _fragment(self, parameters: Mapping[str, nn.Parameter]) -> Fragment:
        telling, rank, size = self._telling, self._peers.rank, self._peers.size
        plan = drift_plan(
            type(self).__name__,
            telling.compressor,
            telling.memory,
            telling.exchange,
            parameters.values(),
            size,
        )
        lanes = Engine(plan, parameters, rank, size, self.seed, telling.nan_policy)
        when = self.streaming
        return Fragment(parameters, lanes, self.outer, when.alpha, when.ahead)
