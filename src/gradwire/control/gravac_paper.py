"""GraVAC with the gain and the threshold that its authors print."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.base import Compressor
from gradwire.control.base import Controller, ControllerState
from gradwire.control.gravac import GraVAC, Policy


@dataclass(frozen=True)
class GraVACPaper(Controller):
    """Runs GraVAC with squared norms of gradient plus residual, and an epsilon of 0.7 or 0.9.

    With error feedback such a gain falls as the residual grows, so the search stops at low factors;
    `gravac` measures against the gradient alone and has a threshold calibrated for it. The other
    settings are those of `gravac`. Tyagi & Swany 2023, arXiv:2305.12201.
    """

    low: float = 10.0
    high: float = 1000.0
    epsilon: float = 0.7
    omega: float = 0.01
    window: int = 500
    policy: Policy = "exponential"

    def __post_init__(self) -> None:
        self.controller()

    def controller(self) -> GraVAC:
        """Returns the equal setting of `gravac`; raises ConfigError for an invalid one."""
        return GraVAC(
            low=self.low,
            high=self.high,
            epsilon=self.epsilon,
            omega=self.omega,
            window=self.window,
            policy=self.policy,
            gain_norm="l2sq",
            gain_ref="ef",
        )

    def create_state(
        self,
        compressor: Compressor,
        names: Sequence[str],
        world_size: int,
        previous: ControllerState | None = None,
    ) -> ControllerState:
        return self.controller().create_state(compressor, names, world_size, previous)
