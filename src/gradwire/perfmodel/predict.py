"""Predicts the step time of one method on one model for any number of workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor

from gradwire.comm.cost_model import Network
from gradwire.engine.plan import Plan
from gradwire.perfmodel.compute import Compute
from gradwire.perfmodel.exchange_cost import ExchangeCost, measure_exchange
from gradwire.perfmodel.mirrored_cluster import MessageCost
from gradwire.perfmodel.overlap import StepTimes, StepWork, Task, predict_step


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a step, and the bytes and collectives of one worker in it."""

    times: StepTimes
    sent_bytes: float
    calls: float
    samples_s: tuple[float, ...] = ()
    """Predicted steps from single measurements, in an order in which methods can be compared."""


def predict_plan(
    plan: Plan,
    compute: Compute,
    tensors: Mapping[str, Tensor],
    size: int,
    network: Network,
    cores: float = inf,
) -> Prediction:
    """Measures the exchange of a plan and predicts the step that overlaps it with `compute`."""
    cost = measure_exchange(plan, tensors, compute.steps, size)
    prediction = predict_measured(compute, cost, network, cores)
    return with_samples(prediction, compute, cost, network, cores)


def predict_measured(
    compute: Compute, cost: ExchangeCost, network: Network, cores: float = inf
) -> Prediction:
    """Predicts the step from a measured exchange, which is the same on every network."""
    return Prediction(
        predict_step(step_work(compute, cost), network, cores),
        cost.sent_bytes,
        cost.calls,
    )


def with_samples(
    prediction: Prediction, compute: Compute, cost: ExchangeCost, network: Network, cores: float
) -> Prediction:
    """Adds the steps that single measurements of computing and exchange predict."""
    works = step_samples(compute, cost)
    samples_s = tuple(predict_step(work, network, cores).step_s for work in works)
    return replace(prediction, samples_s=samples_s)


def step_work(compute: Compute, cost: ExchangeCost) -> StepWork:
    """Returns the work of the median step."""
    return _step_work((*compute.ready_s, compute.tail_s), cost.messages, cost.pipelined)


SAMPLES = 12
"""Three measured computations with four measured exchanges, in every combination."""


def step_samples(compute: Compute, cost: ExchangeCost) -> list[StepWork]:
    """Returns `SAMPLES` measured steps, repeated as needed; median steps if none was kept.

    All ranks return equally many, with the same collectives, however many each has measured.
    """
    computed = compute.samples_s or ((*compute.ready_s, compute.tail_s),)
    exchanged = cost.samples or (cost.messages,)
    return [
        _step_work(computed[n % len(computed)], exchanged[n % len(exchanged)], cost.pipelined)
        for n in range(SAMPLES)
    ]


def _step_work(
    computed_s: Sequence[float], messages: Sequence[MessageCost], pipelined: bool
) -> StepWork:
    *ready_s, tail_s = computed_s
    tasks = (Task(ready_s[one.bucket], one.codec_s, one.calls) for one in messages)
    return StepWork(tuple(tasks), tail_s, pipelined)
