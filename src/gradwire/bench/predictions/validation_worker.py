"""The validation's worker: `python -m gradwire.bench.predictions.validation_worker --config FILE`.

In every round it probes the links. For every case it measures computation and the exchange's
encoding while the other workers do the same, predicts, and then times a few steps on the same
links. No prediction uses a measured step. `Others` counts the cores that other programs use.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.bench.predictions.measured_model import Subject, measure_workload, plan_of
from gradwire.bench.predictions.validation import Cell, say
from gradwire.bench.worker.protocol import Job, read_job
from gradwire.bench.worker.session import Session
from gradwire.bench.workloads.base import parse_workload
from gradwire.comm.cost_model import Network
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.perfmodel.exchange_cost import Rehearsed, rehearse
from gradwire.perfmodel.overlap import StepWork, predict_all
from gradwire.perfmodel.predict import Prediction, step_samples
from gradwire.perfmodel.probe import all_of_ranks, cores_each, mean_of_ranks, probe

_STAT = Path("/proc/stat")
_IDLE, _WAITING = 3, 4


class Others:
    """Cores that programs other than ours have used since this was made."""

    def __init__(self) -> None:
        self._start = _busy_s(), process_time(), perf_counter()

    def since(self) -> tuple[float, float, float]:
        """Seconds that all programs, this process, and the clock have spent."""
        busy_s, own_s, now_s = self._start
        return _busy_s() - busy_s, process_time() - own_s, perf_counter() - now_s


def others_cores(busy_s: float, ours_s: float, passed_s: float) -> float:
    """Of what all cores did, what was not ours."""
    return max(0.0, busy_s - ours_s) / passed_s


def _busy_s() -> float:
    """What all cores have done since the machine started; 0 where nobody counts it."""
    if not _STAT.exists():
        return 0.0
    # user nice system idle iowait irq softirq steal, and guest, which user includes
    ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")


_PATIENCE = timedelta(minutes=5)
_CPU = torch.device("cpu")
_LEAST_CORES = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire.bench.predictions.validation_worker")
    parser.add_argument("--config", type=Path, required=True)
    job = read_job(parser.parse_args().config)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    comm = ProcessGroupComm(dist.distributed_c10d._get_default_group())
    cases = tuple(dict.fromkeys(job.turns))
    sessions = {case: Session(job, case) for case in cases}
    seen: dict[str, list[Seen]] = {case: [] for case in cases}
    # Whatever makes this machine faster or slower from turn to turn does so to both sides.
    for start in range(0, len(job.turns), len(cases)):
        network = probe(comm, _CPU)
        for case in job.turns[start : start + len(cases)]:
            subject = measure_workload(parse_workload(job.workload), comm.rank, comm.size, job.seed)
            seen[case].append(_turn(comm, job, subject, network, sessions[case], case))
    for session in sessions.values():
        session.close()
    if comm.rank == 0:
        for case in cases:
            say(
                _cell(case, subject, plan_of(case, subject.tensors, comm.size).exchange, seen[case])
            )
    dist.barrier()
    dist.destroy_process_group()


class Seen(NamedTuple):
    """One turn of a case: what was predicted, and then what was measured."""

    alone: Prediction
    """Where this job has the machine for itself."""
    beside_s: float
    """The step predicted for the cores that others have left."""
    steps_s: list[float]
    others_cores: float


def _turn(
    comm: ProcessGroupComm,
    job: Job,
    subject: Subject,
    network: Network,
    session: Session,
    case: str,
) -> Seen:
    # All workers are on this machine, each in a namespace of its own.
    cores = cores_each(comm.size, _CPU)
    rehearsed = _rehearse(comm, subject, case)
    alone = _predict(comm, subject, rehearsed, network, cores)
    steps_s, others = _measure(comm, job, session)
    left = max(cores - others / comm.size, _LEAST_CORES)
    beside = _predict(comm, subject, rehearsed, network, left)
    return Seen(alone, beside.forecast.step_s, steps_s, others)


def _rehearse(comm: ProcessGroupComm, subject: Subject, case: str) -> Rehearsed:
    """One rank's exchange, while all other workers rehearse it as well."""
    dist.barrier()
    plan = plan_of(case, subject.tensors, comm.size)
    return rehearse(plan, subject.tensors, subject.compute.steps, comm.size)


def _predict(
    comm: ProcessGroupComm, subject: Subject, rehearsed: Rehearsed, network: Network, cores: float
) -> Prediction:
    """The step of ranks that wait for each other in every call, as their steps vary."""
    own = step_samples(subject.compute, rehearsed)
    told = all_of_ranks(comm, _CPU, [number for work in own for number in work.numbers()])
    length = len(own[0].numbers())
    ranks = [
        [StepWork.of(row[n * length : (n + 1) * length], like) for n, like in enumerate(own)]
        for row in told
    ]
    forecast = predict_all(ranks, network, cores)
    return Prediction(forecast, rehearsed.sent_bytes, rehearsed.calls)


def _measure(comm: ProcessGroupComm, job: Job, session: Session) -> tuple[list[float], float]:
    """A block of steps, and the cores that others used meanwhile."""
    dist.barrier()
    for _ in range(job.warmup):
        session.step()
    dist.barrier()
    watch = Others()
    steps_s = [session.step() for _ in range(job.steps)]
    busy_s, own_s, passed_s = mean_of_ranks(comm, _CPU, watch.since())
    return steps_s, others_cores(busy_s, own_s * comm.size, passed_s)


def _cell(case: str, subject: Subject, exchange: str, seen: list[Seen]) -> Cell:
    """Medians of all turns."""
    predicted = sorted((one.alone for one in seen), key=lambda p: p.forecast.step_s)
    alone = predicted[len(predicted) // 2]
    return Cell(
        spec=case,
        exchange=exchange,
        workload=subject.title,
        parameters=subject.parameters,
        forecast_s=tuple(alone.forecast),
        sent_bytes=alone.sent_bytes,
        calls=alone.calls,
        beside_s=median(one.beside_s for one in seen),
        measured_s=median(step_s for one in seen for step_s in one.steps_s),
        others_cores=median(one.others_cores for one in seen),
    )


if __name__ == "__main__":
    main()
