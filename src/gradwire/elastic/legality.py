"""Checks which exchanges work among replicas that come and go."""

from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.spec import exchange_of


def check_one_level(method: str, exchange: str) -> None:
    """Raises ConfigError for an exchange among nodes, of which single replicas could be lost."""
    if exchange != "auto" and exchange_of(exchange).node is not None:
        raise ConfigError(
            f"{method}: exchange must have one level, got {exchange!r}: replicas come and go one "
            "by one, so they form no nodes"
        )


def check_means(method: str, plan: Plan, advice: str) -> None:
    """Raises ConfigError unless the plan takes means, in which silent replicas do not count."""
    aggregates = sorted({str(used.exchange.aggregate) for used in plan.methods})
    if aggregates != ["mean"]:
        raise ConfigError(
            f"{method}: aggregate must be mean, got {aggregates}: any other would count a replica "
            f"that has just joined and has nothing to send; {advice}"
        )
