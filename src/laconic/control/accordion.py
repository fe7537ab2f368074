"""Accordion: layers whose gradients change much are compressed little, and the others much.

Agarwal et al. 2021, arXiv:2010.16248.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.checks import check_fraction, check_number, check_whole
from laconic.contract import Compressor
from laconic.control.base import Controller, Pilot, at_setting
from laconic.control.regimes import Regimes
from laconic.errors import ConfigError

SHAPE = (1000, 1000)
"""The tensor on which both levels are compared."""


BATCH = "batch"
"""The setting that is the training loop's own."""


@dataclass(frozen=True)
class Accordion(Controller):
    """Sets `setting` to `low` in a layer's critical regimes, and to `high` elsewhere.

    `low` is little compression (a high ratio or rank), `high` is much. A layer is critical if the
    norm of its gradients' sum over an epoch differs by a share of `eta` at least from that
    `interval` epochs before; at the start all are, and after a decay of the learning rate until the
    next check. The sums are of each rank's own gradients, before compression and without residual,
    and the norms are averaged over ranks (the paper's code looks at one rank). Epochs are those
    that `epoch_ended` tells, or `epoch_steps` steps where that is set.

    A setting of "batch" steers nothing but the batch, by any method: `low` and `high` are backward
    passes to accumulate, those of `low` while any layer is critical. `accumulate_low` and
    `accumulate_high` are the same beside another setting. The training loop has to do it: it asks
    `stats()["controller"]["accumulate"]`, and gives the mean of so many passes' gradients, which
    counts as that many in the sums and towards `epoch_steps`.
    """

    low: float
    high: float
    setting: str = "ratio"
    eta: float = 0.5
    interval: int = 10
    epoch_steps: int = 0
    accumulate_low: int = 1
    accumulate_high: int = 1

    def __post_init__(self) -> None:
        check_number("accordion", "low", self.low)
        check_number("accordion", "high", self.high)
        check_fraction("accordion", "eta", self.eta)
        check_whole("accordion", "interval", self.interval, 1)
        check_whole("accordion", "epoch_steps", self.epoch_steps, 0)
        check_whole("accordion", "accumulate_low", self.accumulate_low, 1)
        check_whole("accordion", "accumulate_high", self.accumulate_high, self.accumulate_low)
        if self.setting == BATCH:
            self._check_batch()

    def _check_batch(self) -> None:
        if not (1 <= self.low < self.high and self.low % 1 == self.high % 1 == 0):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: batch: passes must be whole, 1 <= low < high, got {got}")
        if (self.accumulate_low, self.accumulate_high) != (1, 1):
            got = f"{self.accumulate_low!r} and {self.accumulate_high!r}"
            raise ConfigError(
                "accordion: batch: low and high say it, leave accumulate_low and accumulate_high "
                f"at 1, got {got}"
            )

    def passes(self) -> dict[str, int]:
        """Backward passes to accumulate, by level."""
        if self.setting == BATCH:
            return {"low": int(self.low), "high": int(self.high)}
        return {"low": self.accumulate_low, "high": self.accumulate_high}

    def pilot(
        self, compressor: Compressor, names: Sequence[str], size: int, old: Pilot | None = None
    ) -> Pilot:
        if self.setting == BATCH:
            return Regimes(self, {"low": compressor, "high": compressor}, names, old)
        low, high = self.settings(compressor)
        if low.nbytes(SHAPE) <= high.nbytes(SHAPE):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: low must say more than high does, got {got}")
        return Regimes(self, {"low": low, "high": high}, names, old)

    def settings(self, compressor: Compressor) -> list[Compressor]:
        if self.setting == BATCH:
            return []
        return [at_setting(compressor, self.setting, value) for value in (self.low, self.high)]
