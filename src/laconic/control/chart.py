"""All that Autopilot knows of its settings: what a step takes at each, and what it is worth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from laconic.comm.meter import ring_bytes
from laconic.control.clock import Lap
from laconic.control.costs import Costs
from laconic.control.ladder import Rung
from laconic.control.losses import Kind, Losses, progress


class Spot(NamedTuple):
    """A setting as it looks from here."""

    place: int
    """On the ladder."""
    sent_bytes: float
    step_s: float
    worth: float
    """What a step is worth beside a dense one."""
    tried: bool

    @property
    def cost_s(self) -> float:
        """Seconds for what a dense step is worth."""
        return self.step_s / max(self.worth, 1e-9)


class Chart:
    """Costs by the laps of steps, losses by samples; between them what is likely."""

    def __init__(self, rungs: Sequence[Rung], kind: Kind, size: int) -> None:
        self.rungs, self.kind, self.size = list(rungs), kind, size
        self.costs, self.losses = Costs(), Losses()
        self.shapes: dict[str, list[int]] = {}
        self._lengths: list[int] = []

    def meet(self, shapes: Mapping[str, list[int]]) -> None:
        """Learns which tensors there are."""
        if not shapes.keys() <= self.shapes.keys():
            self.shapes |= shapes
            self._lengths = []

    @property
    def ready(self) -> bool:
        """Whether there is enough to decide by."""
        return self.costs.enough and bool(self.losses.error)

    def spots(self) -> list[Spot]:
        """All settings, by place."""
        link = self.costs.link()
        return [
            Spot(
                place,
                self._sent_bytes(place),
                link.step_s(self._work_s(place), self._sent_bytes(place)),
                self._worth(place),
                place in self.costs.sent_bytes,
            )
            for place in range(len(self.rungs))
        ]

    def reachable(self, here: int) -> list[Spot]:
        """Where one may go from here: no more than one place beyond all whose losses are known.

        Left out is what loses more than another that is no longer.
        """
        useful: list[Spot] = []
        for spot in self.spots():
            least = min((other.sent_bytes for other in useful), default=math.inf)
            if spot.place == here or spot.sent_bytes < least:
                useful.append(spot)
        known = self.rungs[here].whole or here in self.losses.error
        limit = max(here, *self.losses.error)
        beyond = [spot for spot in useful if spot.place > limit]
        return [spot for spot in useful if spot.place <= limit] + beyond[: 1 if known else 0]

    def other(self, here: Spot, spots: Sequence[Spot]) -> Spot | None:
        """The nearest that says clearly more, to learn from what of the time bytes are to blame."""
        more = [s for s in spots if s.place < here.place and s.sent_bytes > 1.5 * here.sent_bytes]
        return more[-1] if more and self.costs.idle_s is None else None

    def _worth(self, place: int) -> float:
        if self.rungs[place].whole:
            return 1.0
        values = [rung.value for rung in self.rungs]
        return progress(self.losses.at(place, values, self.kind), self.kind)

    def _work_s(self, place: int) -> float:
        """Encoding and decoding: as it was here, or where it was most like here."""
        near = self._nearest(place, self.costs.work_s)
        return 0.0 if near is None else median(self.costs.work_s[near])

    def _sent_bytes(self, place: int) -> float:
        """What a rank sends: as it was, or as the lengths of messages say."""
        near = self._nearest(place, self.costs.sent_bytes)
        if near is not None:
            scale = self._length(place) / max(self._length(near), 1)
            return self.costs.sent_bytes[near] * scale
        if self.rungs[place].whole:
            return float(ring_bytes(self._length(place), self.size))
        return self._length(place) * (self.size - 1.0)

    def _nearest(self, place: int, tried: Mapping[int, object]) -> int | None:
        alike = [p for p in tried if self.rungs[p].whole == self.rungs[place].whole]
        return min(alike, key=lambda p: (abs(p - place), p), default=None)

    def _length(self, place: int) -> int:
        """Bytes that one rank has to say of all steered parameters."""
        if not self._lengths:
            dense, shapes = self.rungs[0].compressor, self.shapes.values()
            self._lengths = [
                sum(min(rung.compressor.nbytes(s), dense.nbytes(s)) for s in shapes)
                for rung in self.rungs
            ]
        return self._lengths[place]

    def save(self) -> dict[str, object]:
        costs = asdict(self.costs) | {
            "recent": [list(lap) for lap in self.costs.recent],
            "before": None if self.costs.before is None else list(self.costs.before),
            "work_s": _named(self.costs.work_s),
            "sent_bytes": _named(self.costs.sent_bytes),
        }
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        losses = {"error": _named(self.losses.error), "latest": self.losses.latest}
        return {"costs": costs, "losses": losses, "shapes": shapes}

    def load(self, saved: Mapping[str, Any]) -> None:
        costs, before = saved["costs"], saved["costs"]["before"]
        self.costs = Costs(
            **{
                **costs,
                "recent": [Lap(*lap) for lap in costs["recent"]],
                "before": None if before is None else Lap(*before),
                "work_s": _placed(costs["work_s"]),
                "sent_bytes": _placed(costs["sent_bytes"]),
            }
        )
        losses = saved["losses"]
        self.losses = Losses(_placed(losses["error"]), losses["latest"])
        self.shapes = {name: list(shape) for name, shape in saved["shapes"].items()}
        self._lengths = []


def _named(by_place: Mapping[int, object]) -> dict[str, object]:
    return {str(place): value for place, value in by_place.items()}


def _placed(by_name: Mapping[str, Any]) -> dict[int, Any]:
    return {
        int(place): list(value) if isinstance(value, list) else value
        for place, value in by_name.items()
    }
