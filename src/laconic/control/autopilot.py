"""Autopilot: the setting that gets furthest in a second on the link as it is, with nothing to tune.

Ours; GraVAC (arXiv:2305.12201) is where worth times speed comes from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from laconic.contract import Compressor
from laconic.control.base import Controller, Pilot
from laconic.control.ladder import check_factor, factor_of, ladder
from laconic.control.navigator import By, Navigator
from laconic.errors import ConfigError


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
        self, compressor: Compressor, names: Sequence[str], size: int, old: Pilot | None = None
    ) -> Pilot:
        key = factor_of(compressor, self.setting)
        return Navigator(ladder(compressor, key), compressor, key, self.by, names, size, old)
