"""The definition of a step's time."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gradwire.bench.worker import session
from gradwire.bench.worker.protocol import Job
from gradwire.bench.worker.session import Session

CASE = "topk:ratio=0.1"


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_waiting_at_the_end_of_an_epoch_is_part_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    job = Job(workload="mlp-tiny", case_order=(CASE,), steps=2, warmup=0)
    ours = Session(job, CASE)

    def wait(mounted: object, rate: float) -> None:
        now_s[0] += 5

    monkeypatch.setattr(type(ours.mounted), "epoch_ended", wait)
    ends = iter([None, 0.1])
    monkeypatch.setattr(ours.epochs, "ended", lambda step: next(ends))
    assert [ours.step(), ours.step()] == [0, 5]
    ours.close()
