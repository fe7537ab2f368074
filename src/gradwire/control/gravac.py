"""GraVAC: raises the compression factor while the compression gain stays high.

The gain is the share of the gradient norm that survives compression. A gate on the gain selects at
every step whether the candidate factor, the floor factor or the dense gradient is sent.
Tyagi & Swany 2023, arXiv:2305.12201.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_fraction, check_number, check_whole
from gradwire.control.base import Controller, ControllerState, Log, Saved, Setting, StepReport
from gradwire.control.two_level import Gauge, Sends, check_factor, levels
from gradwire.errors import ConfigError

GainNorm: TypeAlias = Literal["l2sq", "l2", "layer_l2"]
"""l2sq: sums of squares. l2: norms of the whole gradient. layer_l2: sums of each tensor's norm."""
GainRef: TypeAlias = Literal["ef", "raw"]
"""What is compared with: the gradient with the residual added, or as it came."""
Smoothing: TypeAlias = Literal["ewma", "median"]

LATEST = 101
"""A median is that of so many values at most."""


def folded(squares: Sequence[Tensor], norm: GainNorm) -> list[Tensor]:
    """One message's sums over tensors, of squares or of norms; `squares` is [4] a tensor."""
    table = torch.stack(list(squares))  # [tensors, 4]
    return list((table.sqrt() if norm == "layer_l2" else table).sum(0))


def gain(kept: float, reference: float, norm: GainNorm) -> float:
    """What is kept of the reference, from agreed sums; 1 where there is nothing to keep."""
    if reference == 0:
        return 1.0
    return math.sqrt(kept / reference) if norm == "l2" else kept / reference


def smoothed(old: float | None, new: float, alpha: float) -> float:
    """The exponentially weighted moving average, which starts at the first value."""
    return new if old is None else alpha * new + (1 - alpha) * old


def noted(old: Sequence[float], new: float, alpha: float, how: Smoothing) -> list[float]:
    """What is remembered of a factor's throughput; `level` reads it."""
    if how == "median":
        return [*old, new][-LATEST:]
    return [smoothed(old[0] if old else None, new, alpha)]


def level(values: Sequence[float]) -> float:
    return median(values)


def saturated(throughput: dict[float, float], omega: float) -> float | None:
    """The lower of the two factors of greatest throughput, where that differs by omega at most.

    The dense entry, factor 1, does not take part.
    """
    ranked = sorted((value, factor) for factor, value in throughput.items() if factor != 1)
    if len(ranked) < 2:
        return None
    (second, one), (first, other) = ranked[-2:]
    return min(one, other) if first - second <= omega * second else None


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


class Explorer(ControllerState):
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

    def order(self, name: str) -> Setting:
        known = self.known
        floor, candidate = self._factors[known.floor], self._factors[known.candidate]
        gauge = self._gauges[name]
        made = levels(self._compressor, floor, candidate, known.sends, self._alone(), gauge)
        return Setting(made, dense=known.sends == "dense")

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

    def step(self, heard: StepReport) -> None:
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


Policy: TypeAlias = Literal["exponential", "geometric"]


@dataclass(frozen=True)
class GraVAC(Controller):
    """Sends at a candidate factor where its gain is at least epsilon, else at a floor, else dense.

    Factors go from `low` to `high`, by the policy. Each `window` of steps the next candidate's turn
    comes; the floor rises to a candidate that keeps as much, within omega. Where the two best
    throughputs (steps a second times gain) differ by omega at most, the lower of their factors is
    kept and nothing more is tried. The gate looks at smoothed gains up to the last step, which all
    ranks know already; at the first step nothing is known, so all is sent. `alpha` 0 means N/100.
    """

    low: float = 10.0
    high: float = 1000.0
    epsilon: float = 0.7
    omega: float = 0.01
    window: int = 500
    policy: Policy = "exponential"
    gain_norm: GainNorm = "l2"
    gain_ref: GainRef = "ef"
    throughput: Smoothing = "ewma"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_number("gravac", "low", self.low)
        check_number("gravac", "high", self.high)
        if not 1 < self.low < self.high:
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"gravac: factors must be 1 < low < high, got {got}")
        check_fraction("gravac", "epsilon", self.epsilon)
        check_fraction("gravac", "omega", self.omega)
        check_whole("gravac", "window", self.window, 1)
        check_number("gravac", "alpha", self.alpha)
        if self.alpha != 0:
            check_fraction("gravac", "alpha", self.alpha)
        choices = {
            "policy": ("exponential", "geometric"),
            "gain_norm": ("l2sq", "l2", "layer_l2"),
            "gain_ref": ("ef", "raw"),
            "throughput": ("ewma", "median"),
        }
        for key, known in choices.items():
            if getattr(self, key) not in known:
                got = getattr(self, key)
                raise ConfigError(f"gravac: {key} must be one of {[*known]}, got {got!r}")

    def factors(self) -> list[float]:
        """The candidates, lowest first: absolute, so that a floor that rises moves none of them."""
        found, turn = [self.low], 0
        while found[-1] < self.high:
            power = 2**turn if self.policy == "exponential" else turn + 1
            # No float reaches 2**1024, so neither does `high`.
            found.append(min(self.high, self.low * 2**power) if power < 1024 else self.high)
            turn += 1
        return found

    def pilot(
        self,
        compressor: Compressor,
        names: Sequence[str],
        size: int,
        old: ControllerState | None = None,
    ) -> ControllerState:
        check_factor("gravac", compressor)
        # Gains of another method say nothing about this one, so exploring starts anew.
        return Explorer(self, compressor, names, size, None if old is None else old.log)
