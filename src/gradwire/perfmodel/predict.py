"""Predicts the step time of one method on one model for any number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor

from gradwire.comm.cost_model import Network
from gradwire.engine.plan import Plan
from gradwire.perfmodel.compute import Compute
from gradwire.perfmodel.exchange_cost import Rehearsed, Talk, rehearse
from gradwire.perfmodel.overlap import Forecast, StepWork, Task, predict


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
    """The usual step."""
    return _step_work((*compute.ready_s, compute.rest_s), rehearsed.talks)


SAMPLES = 12
"""Three steps that were computed beside four that were rehearsed, in every combination."""


def step_samples(compute: Compute, rehearsed: Rehearsed) -> list[StepWork]:
    """So many steps as they were measured, some of which may be alike; of usual ones if none was.

    All ranks have as many, with the same calls, however many each had the time to measure.
    """
    computed = compute.samples_s or ((*compute.ready_s, compute.rest_s),)
    talks = rehearsed.samples or (rehearsed.talks,)
    return [_step_work(computed[n % len(computed)], talks[n % len(talks)]) for n in range(SAMPLES)]


def _step_work(computed_s: Sequence[float], talks: Sequence[Talk]) -> StepWork:
    *ready_s, rest_s = computed_s
    pairs = zip(ready_s, talks, strict=True)
    errands = (Task(full_s, talk.works_s, talk.calls) for full_s, talk in pairs)
    return StepWork(tuple(errands), rest_s)
