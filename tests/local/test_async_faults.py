"""Stopped, killed and restarted processes of asynchronous Qsparse-local-SGD."""

from signal import SIGCONT, SIGKILL, SIGSTOP, Signals

import pytest
from async_processes import AsyncProcesses

from deadlines import scaled

TIMEOUT_S = 2.5
"""Scaled once at the start of a test: a worker that waits for a core is not lost."""
MARGIN_S = 3.0
"""Two busy cores run the processes."""

TRAINED = 0.5
"""A loss that an untrained model does not have: it begins at about 1.2."""


def test_lost_workers_come_back_and_a_stopped_one_does_not_hold_worker_0() -> None:
    timeout_s = scaled(TIMEOUT_S)
    with AsyncProcesses(4, timeout_s) as workers:
        # Killed: noticed at once. A new process continues from the server's model.
        before = workers.stats(0)
        assert before["alive"] == [0, 1, 2, 3]
        workers.signal(3, SIGKILL)
        assert workers.wait_for(lambda stats: stats["alive"] == [0, 1, 2]) < scaled(MARGIN_S)
        workers.wait_for(lambda stats: stats["loss"] < TRAINED)
        workers.rejoin(3)
        workers.wait_for(lambda stats: stats["syncs"] >= 3, rank=3)
        after = workers.stats(0)
        assert after["alive"] == [0, 1, 2, 3]
        assert after["lost_workers"] == before["lost_workers"] + 1
        assert after["rejoined_workers"] == before["rejoined_workers"] + 1
        # Its first loss would be that of an untrained model.
        assert workers.stats(3)["loss"] < TRAINED

        # Stopped for longer than the timeout: lost by then, and back by itself.
        reconnects = workers.stats(2)["reconnects"]
        workers.signal(2, SIGSTOP)
        took = workers.wait_for(lambda stats: stats["alive"] == [0, 1, 3])
        assert took < timeout_s + scaled(MARGIN_S)
        workers.signal(2, SIGCONT)
        workers.wait_for(lambda stats: stats["alive"] == [0, 1, 2, 3])
        workers.wait_for(lambda stats: stats["reconnects"] == reconnects + 1, rank=2)

        # Stopped at the end: worker 0 leaves without it.
        workers.signal(2, SIGSTOP)
        workers.ask_to_end(0, 1, 3)
        ends = [workers.end_of(rank) for rank in (0, 1, 3)]
        assert [end.error for end in ends] == [None] * 3
        assert ends[0].took_s < timeout_s + scaled(MARGIN_S)
        assert ends[0].stats["refused_updates"] == ends[0].stats["refused_connections"] == 0
        assert ends[0].log[-1] == "worker 0 has left; workers [2] were lost and have not rejoined"
        assert [line for line in ends[0].log if "worker 2 is lost (no complete message" in line]
        assert not [line for end in ends for line in end.log if "token" in line]

        # Its server is gone when it continues.
        workers.signal(2, SIGCONT)
        end = workers.end_of(2)
        assert end.error is not None
        assert "the server on worker 0 is gone: nobody answers" in end.error


@pytest.mark.parametrize("number", [SIGSTOP, SIGKILL])
def test_workers_notice_a_lost_server_by_the_deadline(number: Signals) -> None:
    timeout_s = scaled(TIMEOUT_S)
    with AsyncProcesses(2, timeout_s) as workers:
        workers.signal(0, number)
        end = workers.end_of(1)
        assert end.error is not None
        assert "the server on worker 0 is gone" in end.error
        assert end.took_s < timeout_s + scaled(MARGIN_S)
