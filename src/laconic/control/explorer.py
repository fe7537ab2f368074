"""GraVAC's pilot: what is known of the factors tried so far, and which one is sent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from laconic.contract import Compressor
from laconic.control.base import Heard, Log, Order, Pilot, Saved
from laconic.control.gain import (
    GainNorm,
    GainRef,
    Smoothing,
    folded,
    gain,
    level,
    noted,
    saturated,
    smoothed,
)
from laconic.control.levels import Gauge, Sends, levels

GATE = "the gate"
"""Why a factor is sent, where nothing else has happened."""


class Rule(Protocol):
    """What the pilot needs to know of its controller."""

    @property
    def epsilon(self) -> float: ...
    @property
    def omega(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def gain_norm(self) -> GainNorm: ...
    @property
    def gain_ref(self) -> GainRef: ...
    @property
    def throughput(self) -> Smoothing: ...
    def factors(self) -> list[float]: ...


@dataclass
class Known:
    """All that a checkpoint needs."""

    floor: int = 0
    """Its place in the list of factors; so is the candidate's."""
    candidate: int = 1
    floor_gain: float | None = None
    candidate_gain: float | None = None
    sends: Sends = "dense"
    frozen: bool = False
    seen: int = 0
    """Steps that have moved the statistics."""
    last_factor: float | None = None
    """What the last step sent, whose time the next one tells."""
    last_gain: float = 1.0
    throughput: dict[float, list[float]] = field(default_factory=dict)


class Explorer(Pilot):
    """The same on every rank, since it hears the same."""

    def __init__(
        self, rule: Rule, compressor: Compressor, names: Sequence[str], size: int, log: Log | None
    ) -> None:
        self.log = log or Log()
        self.known = Known()
        self._rule, self._compressor, self._size = rule, compressor, size
        self._factors = rule.factors()
        self._alpha = rule.alpha or min(1.0, size / 100)
        self._gauges = {name: Gauge(rule.gain_ref == "raw") for name in names}
        self._note(self.log.now, "nothing is known yet")

    @property
    def asks(self) -> bool:
        return True

    @property
    def measures(self) -> bool:
        # Both levels are part of every step, and so of one that is recorded.
        return False

    def order(self, name: str) -> Order:
        known = self.known
        floor, candidate = self._factors[known.floor], self._factors[known.candidate]
        gauge = self._gauges[name]
        made = levels(self._compressor, floor, candidate, known.sends, self._alone(), gauge)
        return Order(made, dense=known.sends == "dense")

    def _alone(self) -> bool:
        """Whether only the candidate has to be computed: it is the floor, or it is settled."""
        known = self.known
        return known.floor == known.candidate or (known.frozen and known.sends == "candidate")

    def listen(self, name: str, grad: Tensor, scale: float) -> None:
        self._gauges[name].start()

    def tell(self, names: Sequence[str]) -> list[Tensor] | None:
        gauges = [self._gauges[name] for name in names]
        squares = [gauge.squares for gauge in gauges if gauge.squares is not None]
        if len(squares) < len(gauges):
            return None
        for gauge in gauges:
            gauge.open = False
        return folded(squares, self._rule.gain_norm)

    def step(self, heard: Heard) -> None:
        columns = zip(*(numbers for _, numbers in heard.numbers), strict=True)
        sums = [sum(column) for column in columns]
        *levels, gradient = sums or [0.0]
        if gradient == 0 or not all(map(math.isfinite, sums)):
            # A gradient that is zero or not finite says nothing about any factor, whatever waits.
            self.known.last_factor = None
            return
        self._time(heard.last_s)
        self._measure(*levels)
        self.known.seen += 1
        why = GATE
        if self.known.seen % self._rule.window == 0 and not self.known.frozen:
            why = self._end_window()
        self._gate(heard.step, why)

    def _time(self, last_s: float | None) -> None:
        """Credits the step before with its throughput: ranks a second, times gain."""
        known = self.known
        if last_s is None or known.last_factor is None:
            return
        old = known.throughput.get(known.last_factor, [])
        new = self._size / last_s * known.last_gain
        how = self._rule.throughput
        known.throughput[known.last_factor] = noted(old, new, self._alpha, how)

    def _measure(self, reference: float, floor: float, candidate: float) -> None:
        known, norm = self.known, self._rule.gain_norm
        new = gain(candidate, reference, norm)
        known.candidate_gain = smoothed(known.candidate_gain, new, self._alpha)
        if known.floor == known.candidate:
            known.floor_gain = known.candidate_gain
        elif not self._alone():
            new = gain(floor, reference, norm)
            known.floor_gain = smoothed(known.floor_gain, new, self._alpha)
        known.last_factor = self.factor()
        gains = {"candidate": known.candidate_gain, "floor": known.floor_gain, "dense": 1.0}
        known.last_gain = gains[known.sends] or 0.0

    def factor(self) -> float:
        """The factor that is sent: 1 where all is."""
        places = {"candidate": self.known.candidate, "floor": self.known.floor}
        return self._factors[places[self.known.sends]] if self.known.sends in places else 1.0

    def _end_window(self) -> str:
        """Raises the floor, takes the next candidate, or settles; says what happened."""
        known, omega = self.known, self._rule.omega
        why = []
        measured = {known.floor: known.floor_gain, known.candidate: known.candidate_gain}
        floor, candidate = known.floor_gain or 0.0, known.candidate_gain or 0.0
        if known.candidate > known.floor and floor and abs(floor - candidate) <= omega * floor:
            known.floor, known.floor_gain = known.candidate, known.candidate_gain
            why.append(f"the floor rises to {self._factors[known.floor]:g}x")
        if known.candidate < len(self._factors) - 1:
            self._try(known.candidate + 1)
            why.append(f"next candidate {self._factors[known.candidate]:g}x")
        seen = {factor: level(values) for factor, values in known.throughput.items()}
        ideal = saturated(seen, omega)
        if ideal is not None:
            known.frozen = True
            self._settle_on(self._factors.index(ideal), measured)
            why.append(f"throughput saturates: settled on {ideal:g}x")
        return ", ".join(why) or GATE

    def _try(self, place: int) -> None:
        if place != self.known.candidate:
            self.known.candidate, self.known.candidate_gain = place, None

    def _settle_on(self, place: int, measured: Mapping[int, float | None]) -> None:
        known = self.known
        if place > known.floor:
            self._try(place)
            return
        if measured.get(place) is None:
            # The floor has risen beyond it: less is compressed, so at least as much is kept.
            passes = (known.floor_gain or 0.0) >= self._rule.epsilon
            known.sends = "candidate" if passes else "dense"
        known.floor = known.candidate = place
        known.floor_gain = known.candidate_gain = measured.get(place)

    def _gate(self, step: int, why: str) -> None:
        known, epsilon = self.known, self._rule.epsilon
        before = known.sends
        if known.candidate_gain is None and known.floor_gain is None:
            pass  # The gain of the floor that it fell back from has decided.
        elif known.candidate_gain is not None and known.candidate_gain >= epsilon:
            known.sends = "candidate"
        elif known.floor_gain is not None and known.floor_gain >= epsilon:
            known.sends = "floor"
        else:
            known.sends = "dense"
        if known.sends != before or why != GATE:
            self._note(step, f"{why}; {self._gains()}")

    def _gains(self) -> str:
        def text(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.3g}"

        known, factors = self.known, self._factors
        floor = f"gain {text(known.floor_gain)} at {factors[known.floor]:g}x"
        candidate = f"{text(known.candidate_gain)} at {factors[known.candidate]:g}x"
        return f"{floor}, {candidate}, epsilon {self._rule.epsilon:g}"

    def _note(self, step: int, reason: str) -> None:
        factor = self.factor()
        self.log.add(step, "dense" if factor == 1 else f"{factor:g}x", reason)

    def skip(self) -> None:
        self.known.last_factor = None

    def epoch(self, step: int, learning_rate: float | None) -> None:
        pass

    def rate_changed(self, step: int, before: float, after: float) -> None:
        pass

    def resize(self) -> None:
        # Gains are those of gradients, but a step takes another time now.
        self.known.throughput, self.known.last_factor = {}, None

    def save(self) -> Saved:
        by_factor = {repr(f): list(v) for f, v in self.known.throughput.items()}
        return {**asdict(self.known), "throughput": by_factor}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.known = Known(**saved)
        self.known.throughput = {float(f): list(v) for f, v in saved["throughput"].items()}

    def explain(self) -> dict[str, object]:
        known = self.known
        return {
            "setting": "dense" if known.sends == "dense" else f"{self.factor():g}x",
            "floor": self._factors[known.floor],
            "candidate": self._factors[known.candidate],
            "floor_gain": known.floor_gain,
            "candidate_gain": known.candidate_gain,
            "frozen": known.frozen,
            "throughput": {factor: level(values) for factor, values in known.throughput.items()},
        }
