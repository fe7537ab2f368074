"""Autopilot: selects the settings with the most progress per second on the current link, untuned.

A method of this library; the objective, progress times speed, comes from GraVAC (arXiv:2305.12201).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.comm.cost_model import format_rate
from gradwire.control._autopilot.budget import Horizon, Rest
from gradwire.control._autopilot.candidates import Rung, check_factor, factor_of, is_whole, ladder
from gradwire.control._autopilot.cost_model import Chart, Link, Spot
from gradwire.control._autopilot.error_model import Kind
from gradwire.control.base import Controller, ControllerState, Log, Saved, Setting, StepReport
from gradwire.control.timing import StepTiming
from gradwire.errors import ConfigError


def mixture(places: Mapping[str, int], rungs: Sequence[Rung]) -> str:
    """The setting of all layers, or each one with how many have it."""
    counts = sorted(Counter(places.values()).items())
    if len(counts) == 1:
        return rungs[counts[0][0]].words()
    return ", ".join(f"{rungs[place].words()} ({count})" for place, count in counts) or "nothing"


def moves(old: Mapping[str, int], new: Mapping[str, int]) -> str:
    """How many layers say less now, and how many more."""
    less = sum(new[name] > place for name, place in old.items())
    more = sum(new[name] < place for name, place in old.items())
    said = [f"{n} say {what}" for n, what in ((less, "less"), (more, "more")) if n]
    return f"of {len(old)} layers {' and '.join(said)}"


def reason(old: Spot, new: Spot, safe: bool, link: Link) -> str:
    """What is gained; where too little of the old arrives, that first."""
    rate_bits = round(float(f"{8 / max(link.byte_s, 1e-12):.3g}"))
    now, then = (f"{s.step_s * 1e3:.3g} ms a step worth {s.worth:.2g}" for s in (old, new))
    why = f"{then} instead of {now}; the link carries {format_rate(max(rate_bits, 1))}"
    return why if safe else f"too little arrives: {why}"


By: TypeAlias = Literal["layer", "all"]

BETTER = 0.95
"""A setting takes another's place if it needs at most this share of its time. A link that is taken
for a tenth faster or slower than it is moves the times of two settings apart by half of that, if
half of a step is the wire. What is entered must be worth more than the least by as much."""
WORTH = 0.6
"""No step may be worth less of a dense one: a run falls behind by no more than two thirds of the
steps that are taken to follow, whatever the link. Measured with a narrow ResNet-9 whose learning
rate falls evenly, on a slow link: 75.9 % at the end, 74.3 % with 0.5, 76.5 % with 1 % of top-k."""


class Navigator(ControllerState):
    """The same on every rank, since it hears the same."""

    samples_every: ClassVar[int] = 16
    """A sample is two norms and a sum: one in 16 was measured to add about 1 % to an exchange."""

    def __init__(
        self,
        rungs: Sequence[Rung],
        own: Compressor,
        key: str,
        by: By,
        names: Sequence[str],
        size: int,
        old: ControllerState | None,
    ) -> None:
        self.log = Log() if old is None else old.log
        unbiased = own.traits().unbiased
        kind: Kind = "choice" if key != "bits" else "noise" if unbiased else "rounding"
        self.chart, self._by = Chart(rungs, kind, size), by
        self._own = [rung.compressor for rung in rungs].index(own)
        self.places = dict.fromkeys(names, self._own)
        self._last: dict[str, int] | None = None
        """Where the last step was, whose lap and losses the next one tells."""
        self._judged: tuple[float, float] | None = None
        """The pace when the last decision was made."""
        self._horizon = Horizon()
        self._shapes: dict[str, list[int]] = {}
        self._lost: dict[str, Tensor] = {}
        self._lost_at: dict[str, int] | None = None
        """Where layers were when that was sampled."""
        self._on_gpu = False
        self._rest = Rest()
        self._orders = [Setting(r.compressor, is_whole(p)) for p, r in enumerate(rungs)]
        if isinstance(old, Navigator):
            # Another method changes neither the link nor the computation.
            self.chart.costs.recent = list(old.chart.costs.recent)
            self.chart.costs.idle_s = old.chart.costs.idle_s
            self.chart.ahead = old.chart.ahead
            self._horizon, self._rest = old._horizon, old._rest
        self._note(self.log.now, "as the method is set")

    @property
    def asks(self) -> bool:
        return self._rest.left == 0

    @property
    def measures(self) -> bool:
        return self.asks and bool(self._lost)

    def order(self, name: str) -> Setting:
        layer, place = self.chart.layers.get(name), self.places[name]
        # Small ones are shorter as they are, at a high rank for example.
        place = place if layer is None else layer.effective(place)
        return self._orders[place]

    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        self._on_gpu = grad.is_cuda
        if name not in self.chart.layers:
            self._shapes[name] = list(grad.shape)

    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        """What this rank lost of each layer in the step before, and of how much, if it looked."""
        if not self._lost:
            return []
        zeros = torch.zeros_like(next(iter(self._lost.values())))
        return list(torch.cat([self._lost.get(name, zeros) for name in names]))

    def step(self, heard: StepReport) -> None:
        self.chart.meet(self._shapes)
        self.chart.ahead = self._horizon.ahead(heard.step)
        self._shapes = {}
        if not self.asks:
            self._rest.go_on()
            self._remember(heard.lost or self._lost)
            return
        sampled = self._lost_at is not None and self._sample(self._lost_at, heard)
        if heard.lap is not None and all(map(math.isfinite, heard.lap)):
            self._time(heard.lap)
        arrived = self._last == self.places
        self._remember(heard.lost)
        # The lap of the first step at a new setting is not told before the second.
        if arrived and self.chart.ready and (sampled or self._has_changed()):
            self._decide(heard.step)

    def _time(self, lap: StepTiming) -> None:
        if self._last is not None:
            self.chart.costs.add(self.chart.said(self._last), lap)
        # A GPU replays steps that ask, so it is cheaper there to go on asking.
        self._rest.hear(lap, may_rest=not self._on_gpu)

    def _remember(self, lost: Mapping[str, Tensor]) -> None:
        """Where the step was that has ended, and what of it is still to be told."""
        self._last = dict(self.places)
        if lost is not self._lost:
            self._lost, self._lost_at = dict(lost), self._last if lost else None

    def _sample(self, last: Mapping[str, int], heard: StepReport) -> bool:
        """Whether samples came that say something."""
        found = False
        for names, told in heard.numbers:
            for name, left, total in zip(names, told[::2], told[1::2], strict=False):
                # A gradient that is zero or not finite says nothing about any setting.
                if math.isfinite(left) and math.isfinite(total) and total > 0:
                    layer = self.chart.layers[name]
                    place = layer.effective(last[name])
                    layer.losses.sample(place, left, total, self.chart.kind)
                    found = True
        return found

    def _has_changed(self) -> bool:
        """Whether the link or the computation is not what it was at the last decision.

        Where it is, a decision waits for samples, and costs nothing in most steps.
        """
        if self._judged is None:
            return True
        pairs = zip(self._pace(), self._judged, strict=True)
        return any(min(pair) < BETTER * max(pair) for pair in pairs)

    def _pace(self) -> tuple[float, float]:
        link = self.chart.costs.link()
        return link.compute_s, link.byte_s

    def _decide(self, step: int) -> None:
        """Goes where a step's time over its worth is least, if that is clearly better."""
        here = self.chart.spot(self.places)
        other = self.chart.other(here, self._own)
        if other is not None:
            self._go(step, other, "to see what of the time is due to bytes")
            return
        self._judged = self._pace()
        find = self.chart.best_by_layer if self._by == "layer" else self.chart.best_of_all
        safe = here.worth >= WORTH
        best = find(self.places, WORTH / BETTER)
        if not safe or best.cost_s <= BETTER * here.cost_s:
            self._go(step, best, reason(here, best, safe, self.chart.costs.link()))

    def _go(self, step: int, spot: Spot, why: str) -> None:
        old, self.places = self.places, {**self.places, **spot.places}
        if old != self.places:
            moved = "" if self._by == "all" else f"{moves(old, self.places)}: "
            self._note(step, moved + why)

    def _note(self, step: int, why: str) -> None:
        self.log.add(step, mixture(self.places, self.chart.rungs), why)

    def skip(self) -> None:
        # The losses of the step before are still to be told, its lap is void.
        self._shapes = {}

    def epoch(self, step: int, learning_rate: float | None) -> None:
        if learning_rate is not None:
            self._horizon.hear(step, learning_rate)

    def rate_changed(self, step: int, before: float, after: float) -> None:
        self._horizon.hear(step, after, before)

    def resize(self) -> None:
        # What layers lose holds as it is; laps, and what a byte of a message makes, do not.
        self.chart.forget_costs()
        self._last = self._judged = None
        self._rest = Rest()

    def save(self) -> Saved:
        return {
            "places": dict(self.places),
            "last": None if self._last is None else dict(self._last),
            "judged": None if self._judged is None else list(self._judged),
            "horizon": vars(self._horizon).copy(),
            "lost": {name: tensor.clone() for name, tensor in self._lost.items()},
            "lost_at": None if self._lost_at is None else dict(self._lost_at),
            "rest": vars(self._rest).copy(),
            **self.chart.save(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        last, judged = saved["last"], saved["judged"]
        self.places, self._last = dict(saved["places"]), None if last is None else dict(last)
        self._judged = None if judged is None else (judged[0], judged[1])
        self._horizon = Horizon(**saved["horizon"])
        self._lost = {name: tensor.clone() for name, tensor in saved["lost"].items()}
        self._lost_at = None if saved["lost_at"] is None else dict(saved["lost_at"])
        self._rest = Rest(**saved["rest"])
        self.chart.load(saved)
        self._shapes = {}

    def explain(self) -> dict[str, object]:
        words = [rung.words() for rung in self.chart.rungs]
        found: dict[str, object] = {"setting": mixture(self.places, self.chart.rungs)}
        if self._by == "layer":
            found["layers"] = {name: words[place] for name, place in self.places.items()}
        return {**found, "overhead": self._rest.share(), **self.chart.explain()}


@dataclass(frozen=True)
class Autopilot(Controller):
    """Minimises the predicted time of a step over what the step is worth.

    What a step is worth follows from the share of the gradients' norm that arrives, residual
    counted, and from how long the run may last: what waits arrives in the end, so a run falls
    behind once (for unbiased rounding without a residual, it is what its variance leaves of every
    step). A step's time follows from the agreed laps of past steps: computation, encoding and
    decoding at each setting, and a link model kept current. A setting with which the run would fall
    behind by most of the steps that are to follow is never chosen, whatever it would save. Dense
    and 16 bits are settings too, so nothing is compressed where that does not pay.

    By "layer", bytes go to the layers where they make most of the norm arrive; by "all", all layers
    have one setting. It steers the first of ratio, rank, bits and k that the method has, or
    `setting`, and starts at the method's own.
    """

    setting: str = "auto"
    by: By = "layer"

    def __post_init__(self) -> None:
        check_factor(self.setting)
        if self.by not in get_args(By):
            raise ConfigError(f"autopilot: by must be one of {[*get_args(By)]}, got {self.by!r}")

    def pilot(
        self,
        compressor: Compressor,
        names: Sequence[str],
        size: int,
        old: ControllerState | None = None,
    ) -> ControllerState:
        key = factor_of(compressor, self.setting)
        return Navigator(ladder(compressor, key), compressor, key, self.by, names, size, old)
