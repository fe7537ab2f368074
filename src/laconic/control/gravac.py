"""GraVAC: the compression factor rises while gradients keep their gain, and falls step by step.

Tyagi & Swany 2023, arXiv:2305.12201.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from laconic.checks import check_fraction, check_number, check_whole
from laconic.contract import Compressor
from laconic.control.base import Controller, Pilot
from laconic.control.explorer import Explorer
from laconic.control.gain import GainNorm, GainRef, Smoothing
from laconic.control.levels import check_factor
from laconic.errors import ConfigError

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
        self, compressor: Compressor, names: Sequence[str], size: int, old: Pilot | None = None
    ) -> Pilot:
        check_factor("gravac", compressor)
        # Gains of another method say nothing about this one, so exploring starts anew.
        return Explorer(self, compressor, names, size, None if old is None else old.log)
