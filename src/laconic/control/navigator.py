"""Autopilot's pilot: listens, keeps its chart, and goes where a second is worth most."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.contract import Compressor
from laconic.control.base import Heard, Log, Order, Pilot, Saved
from laconic.control.chart import Chart, Spot
from laconic.control.ladder import Rung
from laconic.control.losses import Kind
from laconic.network.rate import format_rate

BETTER = 0.9
"""A setting takes another's place if it needs at most this share of its time: less is noise."""
WORTH = 0.5
"""No step may be worth less of a dense one: more would wait than arrives."""
SURE = 1.05
"""By so much more a setting has to promise before it is tried."""


class Navigator(Pilot):
    """The same on every rank, since it hears the same."""

    samples_every: ClassVar[int] = 16

    def __init__(
        self, rungs: Sequence[Rung], own: Compressor, key: str, size: int, old: Pilot | None
    ) -> None:
        self.log = Log() if old is None else old.log
        unbiased = own.traits().unbiased
        kind: Kind = "choice" if key != "bits" else "noise" if unbiased else "rounding"
        self.chart = Chart(rungs, kind, size)
        if isinstance(old, Navigator):
            # Another method changes neither the link nor the computation.
            self.chart.costs.recent = list(old.chart.costs.recent)
            self.chart.costs.idle_s = old.chart.costs.idle_s
        self.place = [rung.compressor for rung in rungs].index(own)
        self._last: int | None = None
        """Where the last step was, whose lap and losses the next one tells."""
        self._shapes: dict[str, list[int]] = {}
        self._lost: dict[str, Tensor] = {}
        self._zeros = torch.zeros(2)
        self._note(self.log.decisions[-1].step if self.log.decisions else 0, "as the method is set")

    @property
    def asks(self) -> bool:
        return True

    def order(self, name: str) -> Order:
        rung, dense = self.chart.rungs[self.place], self.chart.rungs[0]
        shape = self.chart.shapes.get(name)
        if shape is not None and not rung.whole:
            # Small ones are shorter as they are, at a high rank for example.
            longer = rung.compressor.nbytes(shape) >= dense.compressor.nbytes(shape)
            rung = dense if longer else rung
        return Order(rung.compressor, dense=rung.whole)

    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        self._shapes[name] = list(grad.shape)
        self._zeros = self._zeros.to(grad.device)

    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        """What this rank lost in the step before, and of how much; zeros where nobody looked."""
        lost = [self._lost[name] for name in names if name in self._lost]
        return list(torch.stack(lost).sum(0) if lost else self._zeros)

    def step(self, heard: Heard) -> None:
        self.chart.meet(self._shapes)
        self._sample([values for _, values in heard.numbers])
        if heard.lap is not None and self._last is not None and all(map(math.isfinite, heard.lap)):
            self.chart.costs.add(self._last, heard.lap)
        self._lost, self._shapes, self._last = dict(heard.lost), {}, self.place
        if self.chart.ready:
            self._decide(heard.step)

    def _sample(self, told: Sequence[Sequence[float]]) -> None:
        left, total = (sum(values[i] for values in told) for i in range(2))
        # A gradient that is zero or not finite says nothing about any setting.
        sound = math.isfinite(left) and math.isfinite(total) and total > 0
        if not sound or self._last is None:
            return
        if self.chart.rungs[self._last].whole:
            self.chart.losses.forget(self._last)
        else:
            self.chart.losses.add(self._last, left / total, self.chart.kind)

    def _decide(self, step: int) -> None:
        """Goes where a step's time over its worth is least, if that is clearly better."""
        spots = {spot.place: spot for spot in self.chart.reachable(self.place)}
        here = spots[self.place]
        safe = [s for s in spots.values() if s.worth >= WORTH * (1 if s is here else SURE)]
        best = min(safe or [max(spots.values(), key=lambda s: s.worth)], key=lambda s: s.cost_s)
        other = self.chart.other(here, list(spots.values()))
        if other is not None:
            self._go(step, other, "to see what of the time is due to bytes")
        elif best is not here and (here not in safe or best.cost_s <= BETTER * here.cost_s):
            self._go(step, best, self._why(here, best, here in safe))

    def _go(self, step: int, spot: Spot, why: str) -> None:
        self.place = spot.place
        self._note(step, why)
        self.chart.costs.change()

    def _why(self, old: Spot, new: Spot, safe: bool) -> str:
        rate_bits = round(float(f"{8 / max(self.chart.costs.link().byte_s, 1e-12):.3g}"))
        now, then = (f"{s.step_s * 1e3:.3g} ms a step worth {s.worth:.2g}" for s in (old, new))
        why = f"{then} instead of {now}; the link carries {format_rate(max(rate_bits, 1))}"
        return why if safe else f"too little arrives: {why}"

    def _note(self, step: int, reason: str) -> None:
        self.log.add(step, self.chart.rungs[self.place].words(), reason)

    def skip(self) -> None:
        # The losses of the step before are still to be told, its lap is void.
        self._shapes = {}

    def epoch(self, step: int, learning_rate: float | None) -> None:
        pass

    def rate_changed(self, step: int, before: float, after: float) -> None:
        pass

    def save(self) -> Saved:
        lost = {name: tensor.clone() for name, tensor in self._lost.items()}
        return {"place": self.place, "last": self._last, "lost": lost, **self.chart.save()}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.place, self._last = saved["place"], saved["last"]
        self._lost = {name: tensor.clone() for name, tensor in saved["lost"].items()}
        self.chart.load(saved)
        self._shapes = {}

    def explain(self) -> dict[str, object]:
        found: dict[str, object] = {"setting": self.chart.rungs[self.place].words()}
        if not (self.chart.costs.recent and self.chart.losses.error):
            return found
        link = self.chart.costs.link()
        return {
            **found,
            "compute_ms": link.compute_s * 1e3,
            "rate_bits": 8 / max(link.byte_s, 1e-12),
            "idle_ms": link.idle_s * 1e3,
            "settings": {
                self.chart.rungs[spot.place].words(): {
                    "step_ms": spot.step_s * 1e3,
                    "worth": spot.worth,
                    "sent_bytes": spot.sent_bytes,
                    "tried": spot.tried,
                }
                for spot in self.chart.spots()
            },
        }
