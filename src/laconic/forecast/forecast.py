"""The predicted step of one method on one model, among any number of workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from torch import Tensor

from laconic.forecast.compute import Compute
from laconic.forecast.rehearsal import Rehearsed, rehearse
from laconic.forecast.timeline import Errand, Forecast, StepWork, predict
from laconic.network.model import Network
from laconic.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """What a step takes, and what one worker sends in it."""

    forecast: Forecast
    sent_bytes: float
    calls: float


def forecast(
    plan: Plan,
    compute: Compute,
    tensors: Mapping[str, Tensor],
    size: int,
    network: Network,
    cores: float = inf,
) -> Prediction:
    """Rehearses the exchange and puts it beside the computation."""
    return predicted(compute, rehearse(plan, tensors, compute.steps, size), network, cores)


def predicted(
    compute: Compute, rehearsed: Rehearsed, network: Network, cores: float = inf
) -> Prediction:
    """The same for an exchange that was rehearsed already, maybe for another network."""
    return Prediction(
        predict(step_work(compute, rehearsed), network, cores),
        rehearsed.sent_bytes,
        rehearsed.calls,
    )


def step_work(compute: Compute, rehearsed: Rehearsed) -> StepWork:
    pairs = zip(compute.ready_s, rehearsed.talks, strict=True)
    errands = (Errand(ready_s, talk.works_s, talk.calls) for ready_s, talk in pairs)
    return StepWork(tuple(errands), compute.rest_s)
