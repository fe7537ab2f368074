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

from gradwire.bench.worker.protocol import Failed, Job, Message, Started, read_job, say
from gradwire.bench.worker.run_case import Count, Tell, block, train
from gradwire.bench.worker.session import Session
from gradwire.testbed.counters import sent_bytes

# A rank that waits longer than this for another one waits in vain.
_PATIENCE = timedelta(minutes=5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="gradwire.bench.worker.__main__")
    parser.add_argument("--config", type=Path, required=True)
    # The loopback, which all workers share, is nobody's in particular: then there is none.
    parser.add_argument("--interface", help="what this host, and nobody else, sends through")
    told = parser.parse_args()
    job, count = read_job(told.config), _counter(told.interface)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_PATIENCE)
    tell = say if dist.get_rank() == 0 else _say_nothing
    sessions: dict[str, Session] = {}
    for case in job.turns:
        tell(Started(case=case))
        try:
            _take_turn(job, case, sessions, tell, count)
        except Exception as error:
            traceback.print_exc()
            say(Failed(case=case, error=f"{type(error).__name__}: {error}"))
            # A normal exit would wait for threads and groups that no longer answer.
            os._exit(1)
    for session in sessions.values():
        session.close()
    dist.barrier()
    dist.destroy_process_group()


def _take_turn(job: Job, case: str, sessions: dict[str, Session], tell: Tell, count: Count) -> None:
    dist.barrier()
    if job.evaluate_every is not None:
        train(job, case, tell, count)
        return
    if case not in sessions:
        sessions[case] = Session(job, case)
    block(job, sessions[case], case, tell, count)


def _counter(interface: str | None) -> Count:
    """Asks what has left this host."""
    return (lambda: None) if interface is None else partial(sent_bytes, interface)


def _say_nothing(message: Message) -> None:
    return


if __name__ == "__main__":
    main()
