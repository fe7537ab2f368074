"""`gradwire simulate` without steps: predicts the step time for any number of workers."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gradwire.bench.machine import machine_facts
from gradwire.bench.predictions.forecast_records import Setting, prediction_table, scaling_table
from gradwire.bench.predictions.measured_model import MeasuredModel, measure_workload, plan_of
from gradwire.bench.predictions.neighbors import predict_neighbors
from gradwire.bench.records.files import append, check_writable
from gradwire.bench.records.schema import BASELINE, ForecastRecord
from gradwire.bench.workloads.base import Workload
from gradwire.checks import check_whole
from gradwire.comm.cost_model import LinkModel, Network, format_rate
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError
from gradwire.perfmodel.predict import Prediction, predict_measured
from gradwire.perfmodel.probe import cores_per_thread
from gradwire.testbed.links import NetworkPlan

CASES = (
    BASELINE,
    "torch-fp16",
    "efsign @ exchange=gather",
    "efsign @ exchange=sharded",
    "topk:ratio=0.01",
    "powersgd:rank=1",
)

MAX_WORKERS = 1_000_000
"""Predictions list the messages of all workers, which takes about a kilobyte each."""


@dataclass(frozen=True)
class Links:
    """The network given on the command line."""

    rate_bits: int
    latency_s: float
    inside_bits: int | None = None

    def network(self) -> Network:
        inside = self.inside_bits
        return Network(
            LinkModel(self.latency_s, self.rate_bits),
            None if inside is None else LinkModel(self.latency_s, inside),
        )


def links_of(plan: NetworkPlan) -> Links:
    """Returns the links that a simulation assumes for a described network.

    A collective waits for the slowest worker; the workers of an island share its link to others,
    and links inside an island are those of its workers.
    """
    if plan.changes or any(link.jitter_s or link.loss for link in (*plan.links, plan.between)):
        raise ConfigError("links: jitter, loss and changes are not simulated; use gradwire net")
    known = [link.slowest_bits for link in plan.links if link.slowest_bits is not None]
    if not known:
        raise ConfigError("links: a simulation needs the rate of the links")
    own_bits, delay_s = min(known), max(link.delay_s for link in plan.links)
    if not plan.islands:
        return Links(own_bits, delay_s)
    shared = plan.between.slowest_bits
    crowd = max(len(island) for island in plan.islands)
    rate_bits = own_bits if shared is None else min(own_bits, shared // crowd)
    return Links(rate_bits, delay_s + plan.between.delay_s, own_bits)


@dataclass(frozen=True)
class SimulateBench:
    """Predicts every case for every number of workers, with one worker per machine like this."""

    workload: Workload
    cases: tuple[str, ...]
    workers: tuple[int, ...]
    links: Links
    json_path: Path | None
    command: str
    topology: str | None = None
    """The graph over which neighbors exchange messages; None for the exchange of each case."""

    def __post_init__(self) -> None:
        for workers in self.workers:
            check_whole("simulate", "workers", workers, 1, MAX_WORKERS)

    def run(self, console: Console) -> None:
        self.check_writable()
        measured = measure_workload(self.workload)
        setting = self.setting(measured)
        records: list[ForecastRecord] = []
        for case in self.cases:
            for workers in self.workers:
                prediction = self.predict(measured, case, workers)
                exchange = self.exchange_of(measured, case, workers)
                records.append(setting.record(case, exchange, workers, prediction))
                if self.json_path is not None:
                    append(self.json_path, records[-1])
        links = self.links.network().link.describe()
        title = f"{measured.title}, {measured.parameters / 1e6:.3g} M parameters, links of {links}"
        console.print(title, markup=False, highlight=False)
        console.print(prediction_table(records))
        if len(self.workers) > 1:
            console.print(scaling_table(records))

    def check_writable(self) -> None:
        """Raises before minutes of work if the records could not be written."""
        if self.json_path is not None:
            check_writable(self.json_path)

    def predict(self, measured: MeasuredModel, case: str, workers: int) -> Prediction:
        if self.topology is not None:
            network = self.links.network()
            return predict_neighbors(measured, case, self.topology, workers, network)
        return self.predict_plan(measured, plan_of(case, measured.tensors, workers), workers)

    def exchange_of(self, measured: MeasuredModel, case: str, workers: int) -> str:
        """Returns the exchange of a case, or the topology in its place."""
        if self.topology is not None:
            return self.topology
        return str(plan_of(case, measured.tensors, workers).exchange)

    def predict_plan(self, measured: MeasuredModel, plan: Plan, workers: int) -> Prediction:
        exchange_cost = measured.exchange_cost(plan, workers)
        cores = cores_per_thread(1, measured.device)
        return predict_measured(measured.compute, exchange_cost, self.links.network(), cores)

    def setting(self, measured: MeasuredModel) -> Setting:
        return Setting(
            measured.title,
            measured.parameters,
            format_rate(self.links.rate_bits),
            self.links.latency_s * 1e3,
            str(measured.device),
            self.command,
            machine_facts(),
        )
