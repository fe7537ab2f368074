"""What a local method may say: a plan for drifts and updates instead of gradients."""

from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from laconic.contract import Compressor, Memory
from laconic.errors import ConfigError
from laconic.plan import Plan, make_plan
from laconic.spec import format_spec

LocalNanPolicy: TypeAlias = Literal["raise", "ignore"]
"""What becomes of a sync in which a parameter is not finite on any worker.

raise: the optimiser's step raises NonFiniteError on all workers, and nothing is remembered of the
sync. ignore: nobody looks, and residuals need half the memory.
"""


def check_nan_policy(method: str, policy: str) -> None:
    """Raises ConfigError unless the policy is one for parameters."""
    known = [*get_args(LocalNanPolicy)]
    if policy not in known:
        # NaN in a gradient has a loss scaler skip the step; in a parameter it would stay.
        raise ConfigError(f"{method}: nan_policy must be one of {known}, got {policy!r}")


def drift_plan(
    method: str,
    compressor: Compressor | str,
    memory: Memory | str | None,
    exchange: str,
    tensors: Iterable[Tensor],
    size: int,
) -> Plan:
    """A legal plan; error feedback on what is no contraction is refused, and so are votes."""
    plan = make_plan(compressor, memory, exchange, list(tensors), size)
    if plan.counts_votes():
        raise ConfigError(
            f"{method}: {format_spec(plan.compressor)} with exchange {plan.exchange!r} says which "
            "way to go and not how far, which moves no parameter to where workers are"
        )
    return plan
