"""The worker process on every host: `python -m gradwire.bench.worker --config FILE`.

All cases run in one process, since starting torch takes longer than most of them. After a failure
the ranks may be out of step, so the worker exits and the launcher starts new ones.
"""

import argparse
import os
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.bench.worker.protocol import Failed, Job, Message, Started, read_job, send
from gradwire.bench.worker.run_case import ByteCounter, Send, time_block, train
from gradwire.bench.worker.session import Session
from gradwire.bench.worker.time_budget import TimeBudget
from gradwire.testbed.counters import sent_bytes

# A collective that takes longer has lost a rank.
_TIMEOUT = timedelta(minutes=5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire.bench.worker")
    parser.add_argument("--config", type=Path, required=True)
    # Not given on the loopback, which all workers share.
    parser.add_argument("--interface", help="the network interface of this host alone")
    args = parser.parse_args()
    job, count = read_job(args.config), _counter(args.interface)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    report = send if dist.get_rank() == 0 else _send_nothing
    sessions: dict[str, Session] = {}
    budget = TimeBudget(job)
    for case in job.case_order:
        report(Started(case=case))
        try:
            _run_case(job, case, sessions, budget, report, count)
        except Exception as error:
            traceback.print_exc()
            send(Failed(case=case, error=f"{type(error).__name__}: {error}"))
            # A normal exit would wait for threads and process groups that no longer respond.
            os._exit(1)
    for session in sessions.values():
        session.close()
    dist.barrier()
    dist.destroy_process_group()


def _run_case(
    job: Job,
    case: str,
    sessions: dict[str, Session],
    budget: TimeBudget,
    report: Send,
    count: ByteCounter,
) -> None:
    dist.barrier()
    if job.evaluate_every is not None:
        train(job, case, report, count)
        return
    budget.begin_block()
    if case not in sessions:
        sessions[case] = Session(job, case)
    time_block(budget, sessions[case], case, report, count)


def _counter(interface: str | None) -> ByteCounter:
    """Returns a counter of the bytes sent by this host."""
    return (lambda: None) if interface is None else partial(sent_bytes, interface)


def _send_nothing(message: Message) -> None:
    return


if __name__ == "__main__":
    main()
