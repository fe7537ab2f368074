"""Accordion: layers whose gradients change much are compressed little, and the others much.

Agarwal et al. 2021, arXiv:2010.16248.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.checks import check_fraction, check_whole
from laconic.contract import Compressor
from laconic.control.base import Controller, Pilot, with_setting
from laconic.control.regimes import Regimes
from laconic.errors import ConfigError

SHAPE = (1000, 1000)
"""The tensor on which both levels are compared."""


@dataclass(frozen=True)
class Accordion(Controller):
    """Sets `setting` to `low` in a layer's critical regimes, and to `high` elsewhere.

    `low` is little compression (a high ratio or rank), `high` is much. A layer is critical if the
    norm of its gradients' sum over an epoch differs by a share of `eta` at least from that
    `interval` epochs before; at the start all are, and after a decay of the learning rate until the
    next check. The sums are of each rank's own gradients, before compression and without residual,
    and the norms are averaged over ranks (the paper's code looks at one rank). Epochs are those
    that `epoch_ended` tells, or `epoch_steps` steps where that is set. With other values of
    `accumulate_low` and `accumulate_high`, `stats()["controller"]["accumulate"]` says how many
    backward passes to accumulate: those of `low` while any layer is critical. The training loop has
    to do that itself.
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
        check_fraction("accordion", "eta", self.eta)
        check_whole("accordion", "interval", self.interval, 1)
        check_whole("accordion", "epoch_steps", self.epoch_steps, 0)
        check_whole("accordion", "accumulate_low", self.accumulate_low, 1)
        check_whole("accordion", "accumulate_high", self.accumulate_high, self.accumulate_low)

    def pilot(
        self, compressor: Compressor, names: Sequence[str], size: int, old: Pilot | None = None
    ) -> Pilot:
        levels = {
            "low": with_setting(compressor, self.setting, self.low),
            "high": with_setting(compressor, self.setting, self.high),
        }
        if levels["low"].nbytes(SHAPE) <= levels["high"].nbytes(SHAPE):
            got = f"{self.low!r} and {self.high!r}"
            raise ConfigError(f"accordion: low must say more than high does, got {got}")
        return Regimes(self, levels, names, old)
