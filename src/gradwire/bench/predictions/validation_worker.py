"""The validation's worker: `python -m gradwire.bench.predictions.validation_worker --config FILE`.

In every round it probes the links. For every case it measures computation and the exchange's
encoding while the other workers do the same, predicts, and then times a few steps on the same
links. No prediction uses a measured step. `OtherLoad` counts the cores that other programs use.
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

from gradwire.bench.predictions.measured_model import MeasuredModel, measure_workload, plan_of
from gradwire.bench.predictions.validation import Cell, print_cell
from gradwire.bench.worker.protocol import Job, read_job
from gradwire.bench.worker.session import Session
from gradwire.bench.workloads.base import parse_workload
from gradwire.comm.cost_model import Network
from gradwire.comm.process_group import ProcessGroupComm
from gradwire.perfmodel.exchange_cost import ExchangeCost, measure_exchange
from gradwire.perfmodel.overlap import StepWork, predict_ranks
from gradwire.perfmodel.predict import Prediction, step_samples
from gradwire.perfmodel.probe import cores_per_thread, gather_numbers, mean_over_ranks, probe

_STAT = Path("/proc/stat")
_IDLE, _WAITING = 3, 4


class OtherLoad:
    """Measures the cores that other programs have used since its construction."""

    def __init__(self) -> None:
        self._start = _busy_s(), process_time(), perf_counter()

    def since(self) -> tuple[float, float, float]:
        """Returns the seconds of all programs, of this process, and of the clock."""
        busy_s, own_s, now_s = self._start
        return _busy_s() - busy_s, process_time() - own_s, perf_counter() - now_s


def others_cores(busy_s: float, ours_s: float, passed_s: float) -> float:
    """Returns the cores that other programs have used on average."""
    return max(0.0, busy_s - ours_s) / passed_s


def _busy_s() -> float:
    """Returns the busy time of all cores since boot; 0 if the system does not count it."""
    if not _STAT.exists():
        return 0.0
    # Columns: user nice system idle iowait irq softirq steal; user includes guest.
    ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")


_TIMEOUT = timedelta(minutes=5)
_CPU = torch.device("cpu")
_MIN_CORES = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire.bench.predictions.validation_worker")
    parser.add_argument("--config", type=Path, required=True)
    job = read_job(parser.parse_args().config)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    comm = ProcessGroupComm(dist.distributed_c10d._get_default_group())
    cases = tuple(dict.fromkeys(job.case_order))
    sessions = {case: Session(job, case) for case in cases}
    trials: dict[str, list[Trial]] = {case: [] for case in cases}
    # Predictions and measurements alternate, so that changes of speed affect both.
    for start in range(0, len(job.case_order), len(cases)):
        network = probe(comm, _CPU)
        for case in job.case_order[start : start + len(cases)]:
            measured = measure_workload(
                parse_workload(job.workload), comm.rank, comm.size, job.seed
            )
            trials[case].append(_run_trial(comm, job, measured, network, sessions[case], case))
    for session in sessions.values():
        session.close()
    if comm.rank == 0:
        for case in cases:
            print_cell(
                _cell(
                    case,
                    measured,
                    str(plan_of(case, measured.tensors, comm.size).exchange),
                    trials[case],
                )
            )
    dist.barrier()
    dist.destroy_process_group()


class Trial(NamedTuple):
    """One trial of a case: the predictions, and then the measured steps."""

    unloaded: Prediction
    """The prediction for a machine without other load."""
    beside_others_s: float
    """The predicted step with the cores that other programs left."""
    steps_s: list[float]
    others_cores: float


def _run_trial(
    comm: ProcessGroupComm,
    job: Job,
    measured: MeasuredModel,
    network: Network,
    session: Session,
    case: str,
) -> Trial:
    # All workers run on this machine, each in its own namespace.
    cores = cores_per_thread(comm.size, _CPU)
    exchange_cost = _measure_exchange(comm, measured, case)
    unloaded = _predict(comm, measured, exchange_cost, network, cores)
    steps_s, others = _measure_steps(comm, job, session)
    left = max(cores - others / comm.size, _MIN_CORES)
    beside = _predict(comm, measured, exchange_cost, network, left)
    return Trial(unloaded, beside.times.step_s, steps_s, others)


def _measure_exchange(comm: ProcessGroupComm, measured: MeasuredModel, case: str) -> ExchangeCost:
    """Measures one rank's exchange, while all other workers do the same."""
    dist.barrier()
    plan = plan_of(case, measured.tensors, comm.size)
    return measure_exchange(plan, measured.tensors, measured.compute.steps, comm.size)


def _predict(
    comm: ProcessGroupComm,
    measured: MeasuredModel,
    exchange_cost: ExchangeCost,
    network: Network,
    cores: float,
) -> Prediction:
    """Predicts the step of ranks that wait for each other in every call and whose steps vary."""
    own = step_samples(measured.compute, exchange_cost)
    gathered = gather_numbers(comm, _CPU, [number for work in own for number in work.to_list()])
    length = len(own[0].to_list())
    ranks = [
        [
            StepWork.from_list(row[n * length : (n + 1) * length], template)
            for n, template in enumerate(own)
        ]
        for row in gathered
    ]
    times = predict_ranks(ranks, network, cores)
    return Prediction(times, exchange_cost.sent_bytes, exchange_cost.calls)


def _measure_steps(comm: ProcessGroupComm, job: Job, session: Session) -> tuple[list[float], float]:
    """Measures a block of steps, and the cores that other programs used meanwhile."""
    dist.barrier()
    for _ in range(job.warmup):
        session.step()
    dist.barrier()
    other_load = OtherLoad()
    steps_s = [session.step() for _ in range(job.steps)]
    busy_s, own_s, passed_s = mean_over_ranks(comm, _CPU, other_load.since())
    return steps_s, others_cores(busy_s, own_s * comm.size, passed_s)


def _cell(case: str, measured: MeasuredModel, exchange: str, trials: list[Trial]) -> Cell:
    """Returns the medians of all trials."""
    predicted = sorted((one.unloaded for one in trials), key=lambda p: p.times.step_s)
    unloaded = predicted[len(predicted) // 2]
    return Cell(
        spec=case,
        exchange=exchange,
        workload=measured.title,
        parameters=measured.parameters,
        step_times_s=tuple(unloaded.times),
        sent_bytes=unloaded.sent_bytes,
        calls=unloaded.calls,
        beside_others_s=median(one.beside_others_s for one in trials),
        measured_s=median(step_s for one in trials for step_s in one.steps_s),
        others_cores=median(one.others_cores for one in trials),
    )


if __name__ == "__main__":
    main()
