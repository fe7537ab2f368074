"""What runs on every host of a validation: `python -m laconic.bench.validation_worker --config F`.

Probes the links, rehearses every case while the other workers do the same, and predicts; then
measures the same cases, in turns, on the same links. No prediction knows what was measured.
"""

import argparse
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from laconic.bench.forecasts import Subject, measure_workload, plan_of
from laconic.bench.job import Job, read_job
from laconic.bench.others import Others, others_cores
from laconic.bench.session import Session
from laconic.bench.validation import Cell, say
from laconic.bench.workload import parse_workload
from laconic.comm.torch import TorchComm
from laconic.forecast.forecast import Prediction, step_work
from laconic.forecast.host import cores_each, mean_of_ranks
from laconic.forecast.probe import probe
from laconic.forecast.rehearsal import Rehearsed, rehearse
from laconic.forecast.timeline import Forecast, predict
from laconic.network.model import Network

_PATIENCE = timedelta(minutes=5)
_CPU = torch.device("cpu")
_LEAST_CORES = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="laconic.bench.validation_worker")
    parser.add_argument("--config", type=Path, required=True)
    job = read_job(parser.parse_args().config)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    comm = TorchComm(dist.distributed_c10d._get_default_group())
    network = probe(comm, _CPU)
    subject = measure_workload(parse_workload(job.workload), comm.rank, comm.size, job.seed)
    cases = tuple(dict.fromkeys(job.turns))
    rehearsed = {case: _rehearse(comm, subject, case) for case in cases}
    # All workers are on this machine, each in a namespace of its own.
    cores = cores_each(comm.size, _CPU)
    alone = {case: _predict(comm, subject, rehearsed[case], network, cores) for case in cases}
    measured = _measure(comm, job, cases)
    for case in cases:
        left = max(cores - measured[case].others_cores / comm.size, _LEAST_CORES)
        beside = _predict(comm, subject, rehearsed[case], network, left)
        if comm.rank == 0:
            exchange = plan_of(case, subject.tensors, comm.size).exchange
            heard = alone[case], beside.forecast.step_s, measured[case]
            say(_cell(case, exchange, subject, *heard))
    dist.barrier()
    dist.destroy_process_group()


class Measured(NamedTuple):
    """The median step, and cores that others used meanwhile."""

    step_s: float
    others_cores: float


def _rehearse(comm: TorchComm, subject: Subject, case: str) -> Rehearsed:
    """One rank's exchange, while all other workers rehearse it as well."""
    dist.barrier()
    plan = plan_of(case, subject.tensors, comm.size)
    return rehearse(plan, subject.tensors, subject.compute.steps, comm.size)


def _predict(
    comm: TorchComm, subject: Subject, rehearsed: Rehearsed, network: Network, cores: float
) -> Prediction:
    """The mean of what all ranks predict."""
    own = predict(step_work(subject.compute, rehearsed), network, cores)
    forecast = Forecast(*mean_of_ranks(comm, _CPU, own))
    return Prediction(forecast, rehearsed.sent_bytes, rehearsed.calls)


def _measure(comm: TorchComm, job: Job, cases: tuple[str, ...]) -> dict[str, Measured]:
    """The steps of each case, in several blocks."""
    steps_s: dict[str, list[float]] = {case: [] for case in cases}
    others: dict[str, list[float]] = {case: [] for case in cases}
    sessions = {case: Session(job, case) for case in cases}
    for case in job.turns:
        dist.barrier()
        for _ in range(job.warmup):
            sessions[case].step()
        dist.barrier()
        watch = Others()
        steps_s[case] += [sessions[case].step() for _ in range(job.steps)]
        busy_s, own_s, passed_s = mean_of_ranks(comm, _CPU, watch.since())
        others[case].append(others_cores(busy_s, own_s * comm.size, passed_s))
    for session in sessions.values():
        session.close()
    return {case: Measured(median(steps_s[case]), median(others[case])) for case in cases}


def _cell(
    case: str,
    exchange: str,
    subject: Subject,
    predicted: Prediction,
    beside_s: float,
    measured: Measured,
) -> Cell:
    return Cell(
        spec=case,
        exchange=exchange,
        workload=subject.title,
        parameters=subject.parameters,
        forecast_s=tuple(predicted.forecast),
        sent_bytes=predicted.sent_bytes,
        calls=predicted.calls,
        beside_s=beside_s,
        measured_s=measured.step_s,
        others_cores=measured.others_cores,
    )


if __name__ == "__main__":
    main()
