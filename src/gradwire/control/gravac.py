"""GraVAC: raises the compression factor while the compression gain stays high.

The gain is the share of the gradient norm that survives compression. A gate on the gain selects at
every step whether the candidate factor, the floor factor or the dense gradient is sent.
Tyagi & Swany 2023, arXiv:2305.12201.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.checks import check_number, check_positive_fraction, check_whole
from gradwire.control.base import (
    Controller,
    ControllerState,
    DecisionLog,
    Setting,
    StateDict,
    StepReport,
)
from gradwire.control.two_level import GainMeter, SentLevel, check_has_ratio, two_level
from gradwire.errors import ConfigError

GainNorm: TypeAlias = Literal["l2sq", "l2", "layer_l2"]
"""l2sq: sums of squares. l2: norms of the whole gradient. layer_l2: sums of each tensor's norm."""
GainRef: TypeAlias = Literal["ef", "raw"]
"""The reference of the gain: gradient plus residual ("ef"), or the gradient alone ("raw")."""
Smoothing: TypeAlias = Literal["ewma", "median"]

MEDIAN_LENGTH = 101
"""A median is taken over at most this many of the latest values."""


def sum_tensors(squares: Sequence[Tensor], norm: GainNorm) -> list[Tensor]:
    """Sums squares or norms over the tensors of one message; `squares` has [4] per tensor."""
    table = torch.stack(list(squares))  # [tensors, 4]
    return list((table.sqrt() if norm == "layer_l2" else table).sum(0))


def gain(kept: float, reference: float, norm: GainNorm) -> float:
    """Returns the share of the reference that is kept; 1 if the reference is zero."""
    if reference == 0:
        return 1.0
    return math.sqrt(kept / reference) if norm == "l2" else kept / reference


def ewma(old: float | None, new: float, alpha: float) -> float:
    """Returns the exponentially weighted moving average, which starts at the first value."""
    return new if old is None else alpha * new + (1 - alpha) * old


def add_throughput(old: Sequence[float], new: float, alpha: float, how: Smoothing) -> list[float]:
    """Returns the values kept of a factor's throughput; their median is the smoothed one."""
    if how == "median":
        return [*old, new][-MEDIAN_LENGTH:]
    return [ewma(old[0] if old else None, new, alpha)]


def saturated_factor(throughput: dict[float, float], omega: float) -> float | None:
    """Returns the lower of the two factors with the highest throughput; None if these differ.

    Throughputs are equal if they differ by at most the fraction omega.

    The dense entry, factor 1, does not take part.
    """
    ranked = sorted((value, factor) for factor, value in throughput.items() if factor != 1)
    if len(ranked) < 2:
        return None
    (second, one), (first, other) = ranked[-2:]
    return min(one, other) if first - second <= omega * second else None


GATE = "gate on the gain"
"""The reason for a sent level when nothing else has changed."""


@dataclass
class Search:
    """The state of the search, saved in checkpoints."""

    floor: int = 0
    """Index of the floor in the list of factors; so is `candidate`."""
    candidate: int = 1
    floor_gain: float | None = None
    candidate_gain: float | None = None
    sends: SentLevel = "dense"
    frozen: bool = False
    measured_steps: int = 0
    """Steps that have updated the statistics."""
    last_factor: float | None = None
    """The factor of the last step, whose duration arrives with the next report."""
    last_gain: float = 1.0
    throughput: dict[float, list[float]] = field(default_factory=dict)


class GraVACState(ControllerState):
    """Runs GraVAC's search; equal on every rank, since all receive the same statistics."""

    def __init__(
        self,
        config: "GraVAC",
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        log: DecisionLog | None,
    ) -> None:
        self.log = log or DecisionLog()
        self.search = Search()
        self._config, self._compressor, self._world_size = config, compressor, world_size
        self._factors = config.factors()
        self._alpha = config.alpha or min(1.0, world_size / 100)
        self._gain_meters = {name: GainMeter(config.gain_ref == "raw") for name in names}
        self._log_decision(self.log.start_step, "no gain has been measured yet")

    @property
    def wants_statistics(self) -> bool:
        return True

    @property
    def needs_measurement(self) -> bool:
        # Both levels are part of every step, and so of a captured graph.
        return False

    def setting_for(self, name: str) -> Setting:
        search = self.search
        compressor = two_level(
            self._compressor,
            self._factors[search.floor],
            self._factors[search.candidate],
            search.sends,
            self._candidate_only(),
            self._gain_meters[name],
        )
        return Setting(compressor, dense=search.sends == "dense")

    def _candidate_only(self) -> bool:
        """Returns whether the floor need not be computed: it is the candidate, or unused."""
        search = self.search
        return search.floor == search.candidate or (search.frozen and search.sends == "candidate")

    def observe_gradient(self, name: str, grad: Tensor, scale: float) -> None:
        self._gain_meters[name].start()

    def local_statistics(self, names: Sequence[str]) -> list[Tensor] | None:
        meters = [self._gain_meters[name] for name in names]
        squares = [meter.squares for meter in meters if meter.squares is not None]
        if len(squares) < len(meters):
            return None
        for meter in meters:
            meter.recording = False
        return sum_tensors(squares, self._config.gain_norm)

    def end_step(self, report: StepReport) -> None:
        columns = zip(*(numbers for _, numbers in report.statistics), strict=True)
        sums = [sum(column) for column in columns]
        *levels, gradient = sums or [0.0]
        if gradient == 0 or not all(map(math.isfinite, sums)):
            # A zero or non-finite gradient carries no information about a factor, even if
            # residuals are sent.
            self.search.last_factor = None
            return
        self._update_throughput(report.previous_step_s)
        self._update_gains(*levels)
        self.search.measured_steps += 1
        reason = GATE
        if self.search.measured_steps % self._config.window == 0 and not self.search.frozen:
            reason = self._end_window()
        self._apply_gate(report.step, reason)

    def _update_throughput(self, step_s: float | None) -> None:
        """Adds the throughput of the previous step: ranks over step time, times gain."""
        search = self.search
        if step_s is None or search.last_factor is None:
            return
        old = search.throughput.get(search.last_factor, [])
        new = self._world_size / step_s * search.last_gain
        how = self._config.throughput
        search.throughput[search.last_factor] = add_throughput(old, new, self._alpha, how)

    def _update_gains(self, reference: float, floor: float, candidate: float) -> None:
        search, norm = self.search, self._config.gain_norm
        new = gain(candidate, reference, norm)
        search.candidate_gain = ewma(search.candidate_gain, new, self._alpha)
        if search.floor == search.candidate:
            search.floor_gain = search.candidate_gain
        elif not self._candidate_only():
            new = gain(floor, reference, norm)
            search.floor_gain = ewma(search.floor_gain, new, self._alpha)
        search.last_factor = self.factor()
        gains = {"candidate": search.candidate_gain, "floor": search.floor_gain, "dense": 1.0}
        search.last_gain = gains[search.sends] or 0.0

    def factor(self) -> float:
        """Returns the compression factor that is sent; 1 if the step is dense."""
        indices = {"candidate": self.search.candidate, "floor": self.search.floor}
        return self._factors[indices[self.search.sends]] if self.search.sends in indices else 1.0

    def _end_window(self) -> str:
        """Raises the floor, takes the next candidate, or ends the search; returns the reason."""
        search, omega = self.search, self._config.omega
        reasons = []
        measured = {search.floor: search.floor_gain, search.candidate: search.candidate_gain}
        floor, candidate = search.floor_gain or 0.0, search.candidate_gain or 0.0
        if search.candidate > search.floor and floor and abs(floor - candidate) <= omega * floor:
            search.floor, search.floor_gain = search.candidate, search.candidate_gain
            reasons.append(f"the floor rises to {self._factors[search.floor]:g}x")
        if search.candidate < len(self._factors) - 1:
            self._set_candidate(search.candidate + 1)
            reasons.append(f"next candidate {self._factors[search.candidate]:g}x")
        smoothed = {factor: median(values) for factor, values in search.throughput.items()}
        ideal = saturated_factor(smoothed, omega)
        if ideal is not None:
            search.frozen = True
            self._freeze_at(self._factors.index(ideal), measured)
            reasons.append(f"throughput saturates: settled on {ideal:g}x")
        return ", ".join(reasons) or GATE

    def _set_candidate(self, index: int) -> None:
        if index != self.search.candidate:
            self.search.candidate, self.search.candidate_gain = index, None

    def _freeze_at(self, index: int, measured: Mapping[int, float | None]) -> None:
        search = self.search
        if index > search.floor:
            self._set_candidate(index)
            return
        if measured.get(index) is None:
            # The floor is above this factor, which compresses less and so keeps at least as much.
            passes = (search.floor_gain or 0.0) >= self._config.epsilon
            search.sends = "candidate" if passes else "dense"
        search.floor = search.candidate = index
        search.floor_gain = search.candidate_gain = measured.get(index)

    def _apply_gate(self, step: int, reason: str) -> None:
        search, epsilon = self.search, self._config.epsilon
        before = search.sends
        if search.candidate_gain is None and search.floor_gain is None:
            pass  # `_freeze_at` has decided by the gain of the old floor.
        elif search.candidate_gain is not None and search.candidate_gain >= epsilon:
            search.sends = "candidate"
        elif search.floor_gain is not None and search.floor_gain >= epsilon:
            search.sends = "floor"
        else:
            search.sends = "dense"
        if search.sends != before or reason != GATE:
            self._log_decision(step, f"{reason}; {self._gains_text()}")

    def _gains_text(self) -> str:
        def text(value: float | None) -> str:
            return "unknown" if value is None else f"{value:.3g}"

        search, factors = self.search, self._factors
        floor = f"gain {text(search.floor_gain)} at {factors[search.floor]:g}x"
        candidate = f"{text(search.candidate_gain)} at {factors[search.candidate]:g}x"
        return f"{floor}, {candidate}, epsilon {self._config.epsilon:g}"

    def _log_decision(self, step: int, reason: str) -> None:
        factor = self.factor()
        self.log.add(step, "dense" if factor == 1 else f"{factor:g}x", reason)

    def skip_step(self) -> None:
        self.search.last_factor = None

    def epoch_ended(self, step: int, learning_rate: float | None) -> None:
        pass

    def learning_rate_changed(self, step: int, before: float, after: float) -> None:
        pass

    def world_size_changed(self) -> None:
        # Gains depend on gradients only, but the duration of a step changes.
        self.search.throughput, self.search.last_factor = {}, None

    def state_dict(self) -> StateDict:
        by_factor = {repr(f): list(v) for f, v in self.search.throughput.items()}
        return {**asdict(self.search), "throughput": by_factor}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.search = Search(**saved)
        self.search.throughput = {float(f): list(v) for f, v in saved["throughput"].items()}

    def explain(self) -> dict[str, object]:
        search = self.search
        return {
            "setting": "dense" if search.sends == "dense" else f"{self.factor():g}x",
            "floor": self._factors[search.floor],
            "candidate": self._factors[search.candidate],
            "floor_gain": search.floor_gain,
            "candidate_gain": search.candidate_gain,
            "frozen": search.frozen,
            "throughput": {factor: median(values) for factor, values in search.throughput.items()},
        }


Policy: TypeAlias = Literal["exponential", "geometric"]


@dataclass(frozen=True)
class GraVAC(Controller):
    """Sends at a candidate factor if its gain is at least epsilon, else at a floor, else dense.

    Factors rise from `low` to `high`: times 1, 2, 4, 16, 256 ... with policy "exponential", times
    1, 2, 4, 8 ... with "geometric". Every `window` of steps brings the next
    candidate; the floor rises to a candidate whose gain is equal within omega. When the two highest
    throughputs (steps per second times gain) differ by at most omega, the lower of their factors is
    kept and the search ends. The gate uses smoothed gains up to the last step, which all ranks
    already know; the first step has none, so it is dense. `alpha` 0 means N/100 for N ranks. The
    defaults are calibrated on training runs with error feedback: in them the top 0.1 % kept 0.28 of
    the norm of a gradient once the residual had grown. `gravac-paper` has the authors' gain.
    """

    low: float = 10.0
    high: float = 1000.0
    epsilon: float = 0.25
    omega: float = 0.01
    window: int = 500
    policy: Policy = "exponential"
    gain_norm: GainNorm = "l2"
    gain_ref: GainRef = "raw"
    throughput: Smoothing = "ewma"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        check_number("gravac", "low", self.low)
        check_number("gravac", "high", self.high)
        if not 1 < self.low < self.high:
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"gravac: factors must be 1 < low < high, got {got}")
        check_positive_fraction("gravac", "epsilon", self.epsilon)
        check_positive_fraction("gravac", "omega", self.omega)
        check_whole("gravac", "window", self.window, 1)
        check_number("gravac", "alpha", self.alpha)
        if self.alpha != 0:
            check_positive_fraction("gravac", "alpha", self.alpha)
        choices = {
            "policy": ("exponential", "geometric"),
            "gain_norm": ("l2sq", "l2", "layer_l2"),
            "gain_ref": ("ef", "raw"),
            "throughput": ("ewma", "median"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                got = getattr(self, key)
                raise ConfigError(f"gravac: {key} must be one of {[*allowed]}, got {got!r}")

    def factors(self) -> list[float]:
        """Returns the candidates, lowest first; they do not depend on the floor."""
        found, count = [self.low], 0
        while found[-1] < self.high:
            power = 2**count if self.policy == "exponential" else count + 1
            # A float is below 2**1024, and so is `high`.
            found.append(min(self.high, self.low * 2**power) if power < 1024 else self.high)
            count += 1
        return found

    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        check_has_ratio("gravac", compressor)
        # Gains of another method do not apply to this one, so the search starts again.
        log = None if previous is None else previous.log
        return GraVACState(self, compressor, names, world_size, log)
