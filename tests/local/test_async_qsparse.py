"""Asynchronous Qsparse-local-SGD: compared with its definition, on ranks of unequal speed."""

import logging
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_workers import (
    SimulatedRun,
    batch,
    largest,
    momentum_sgd,
    plain_sgd,
    small_model,
    take_step,
    trained,
    weights,
)
from torch import Tensor, nn

from gradwire.compressors.none import NoCompression
from gradwire.engine.make_plan import open_lane
from gradwire.errors import ConfigError, NonFiniteError, WireError
from gradwire.local import AsyncQsparseLocalSGD, QsparseLocalSGD
from gradwire.local.server import MessageFormat, Server
from gradwire.local.server_protocol import RemoteServer
from gradwire.memory.none import NoMemory
from gradwire.types import EncodeContext
from processes import Ranks

SPEC = "topk:ratio=0.1,values=fp32"


def by_definition(order: list[int], gap: int, size: int) -> list[Tensor]:
    """Takes steps of workers in this order, with a sync after every `gap` of a worker's own."""
    models = [small_model() for _ in range(size)]
    optimizers = [plain_sgd(model) for model in models]
    server = [p.detach().clone() for p in models[0].parameters()]
    anchors = [[p.clone() for p in server] for _ in range(size)]
    residuals = [[torch.zeros_like(p) for p in server] for _ in range(size)]
    steps = [0] * size
    for rank in order:
        take_step(models[rank], optimizers[rank], steps[rank], rank)
        steps[rank] += 1
        if steps[rank] % gap == 0:
            for place, parameter in enumerate(models[rank].parameters()):
                drift = residuals[rank][place] + anchors[rank][place] - parameter.detach()
                sent = largest(drift, 0.1)
                residuals[rank][place] = drift - sent
                server[place] -= sent / size
                anchors[rank][place] = server[place].clone()
                parameter.data.copy_(server[place])
    return [weights(model) for model in models]


def run_in_order(run: SimulatedRun, order: list[int]) -> None:
    steps = [0] * len(run.models)
    for rank in order:
        take_step(run.models[rank], run.optimizers[rank], steps[rank], rank)
        steps[rank] += 1


def test_matches_its_definition() -> None:
    # Worker 0 is twice as fast as worker 1 and four times as fast as worker 2.
    order = [0, 1, 0, 0, 1, 2, 0] * 6
    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=2) as run:
        run_in_order(run, order)
    for ours, theirs in zip(run.weights(), by_definition(order, 2, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_worker_trains_as_without_a_server() -> None:
    settings = {"sync_every": 3, "size": 1, "steps": 10}
    alone = trained(AsyncQsparseLocalSGD, SPEC, **settings)[0]
    torch.testing.assert_close(alone, trained(QsparseLocalSGD, SPEC, **settings)[0])


@pytest.mark.parametrize("spec", ["topk:ratio=0.1 | qsgd:bits=4", "randomk:ratio=0.1", "efsign"])
def test_updates_bring_a_worker_to_the_servers_model(spec: str) -> None:
    with SimulatedRun(AsyncQsparseLocalSGD, spec, sync_every=2, gaps="random") as run:
        for step in range(40):
            rank = step * step % 3
            syncs = run.workers[rank].syncs
            take_step(run.models[rank], run.optimizers[rank], step, rank)
            if run.workers[rank].syncs > syncs:
                server = run.workers[0]._server_model
                known = run.workers[rank]._anchor
                assert all(torch.equal(known[name], server[name]) for name in server)
        assert all(worker.syncs > 3 for worker in run.workers[:2])


def test_the_server_sends_the_model_where_it_is_shorter_than_updates() -> None:
    with SimulatedRun(AsyncQsparseLocalSGD, "topk:ratio=0.3", sync_every=1, size=2) as run:
        run_in_order(run, [0] * 20)
        assert run.workers[1].stats()["received_bytes"] == 0
        take_step(run.models[1], run.optimizers[1], 0, 1)
        assert run.workers[1].stats()["received_bytes"] == 4 * weights(small_model()).numel()
        assert torch.equal(
            run.workers[1]._anchor["0.weight"], run.workers[0]._server_model["0.weight"]
        )


def test_random_gaps_are_at_most_sync_every() -> None:
    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=4, gaps="random", size=2) as run:
        syncs: list[list[int]] = [[], []]
        for step in range(80):
            for rank in range(2):
                before = run.workers[rank].syncs
                take_step(run.models[rank], run.optimizers[rank], step, rank)
                if run.workers[rank].syncs > before:
                    syncs[rank].append(step)
    for own in syncs:
        gaps = [b - a for a, b in pairwise(own)]
        assert set(gaps) == {1, 2, 3, 4}
    assert syncs[0] != syncs[1]


@pytest.mark.parametrize(("gaps", "tolerance"), [("fixed", 1e-9), ("random", 0.15)])
def test_messages_are_as_long_as_planned(gaps: str, tolerance: float) -> None:
    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=4, gaps=gaps, size=2) as run:
        run_in_order(run, [0, 1, 1] * 80)
        for worker in run.workers:
            stats = worker.stats()
            dense = worker.steps * weights(small_model()).nbytes
            ratio = dense / stats["sent_bytes"]  # type: ignore[operator]
            assert ratio == pytest.approx(stats["planned_ratio"], rel=tolerance)


def test_learns_with_workers_of_unequal_speed() -> None:
    spec = "topk:ratio=0.1 | qsgd:bits=4"
    with SimulatedRun(AsyncQsparseLocalSGD, spec, sync_every=4, optimizer=momentum_sgd) as run:
        run_in_order(run, ([0, 1] * 10 + [2]) * 20)
    inputs, targets = batch(0, 1)
    with torch.no_grad():
        loss = nn.functional.mse_loss(run.models[1](inputs), targets)
        before = nn.functional.mse_loss(small_model()(inputs), targets)
    assert float(loss) < 0.5 * float(before)


def test_resumes_from_the_servers_model() -> None:
    order = [0, 1, 0, 2] * 5
    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=2) as run:
        run_in_order(run, order)
        states = [worker.state_dict() for worker in run.workers]
        server = {n: t.clone() for n, t in run.workers[0]._server_model.items()}
    again = SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=2)
    for old, model, worker, state in zip(
        run.models, again.models, again.workers, states, strict=True
    ):
        model.load_state_dict(old.state_dict())
        worker.load_state_dict(state)
    with again:
        assert all(torch.equal(again.workers[0]._server_model[n], t) for n, t in server.items())
        run_in_order(again, order)
    assert again.workers[0].steps == 2 * run.workers[0].steps
    assert again.workers[2].syncs == 5


def test_methods_with_several_rounds_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="powersgd:rank=2 communicates with all workers in several"
    ):
        SimulatedRun(AsyncQsparseLocalSGD, "powersgd:rank=2", sync_every=2)
    with pytest.raises(ConfigError, match="needs a contraction"):
        SimulatedRun(AsyncQsparseLocalSGD, "qsgd:bits=2", sync_every=2)
    with pytest.raises(ConfigError, match="gaps must be"):
        SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=2, gaps="none")


def test_a_nonfinite_drift_is_not_sent() -> None:
    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=1, size=2) as run:
        run.models[1][0].weight.data[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=r"parameter '0\.weight' is not finite"):
            take_step(run.models[1], run.optimizers[1], 0, 1)
        take_step(run.models[0], run.optimizers[0], 0, 0)
        assert weights(run.models[0]).isfinite().all()


def at_unequal_speed(steps: int, pause_s: float) -> tuple[float, int, int, float]:
    """Returns time, syncs, bytes and loss of a rank; a step of rank 3 takes ten times as long."""
    rank = dist.get_rank()
    model = small_model()
    optimizer = plain_sgd(model)
    worker = AsyncQsparseLocalSGD(model, optimizer, "topk:ratio=0.1 | qsgd:bits=4", sync_every=4)
    with worker:
        for step in range(steps):
            if step == 8:
                # The first syncs compile kernels.
                start = time.perf_counter()
            time.sleep(10 * pause_s if rank == 3 else pause_s)
            loss = take_step(model, optimizer, step, rank)
        took = time.perf_counter() - start
    stats = worker.stats()
    return took, worker.syncs, int(stats["sent_bytes"]), loss  # type: ignore[call-overload]


def test_a_slow_worker_does_not_slow_the_others(four_ranks: Ranks) -> None:
    results = four_ranks.run(at_unequal_speed, 24, 0.01)
    times = [took for took, *_ in results]
    assert times[3] >= 16 * 0.1
    assert max(times[:3]) < times[3] / 2
    assert [syncs for _, syncs, *_ in results] == [6] * 4
    assert len({sent for _, _, sent, _ in results}) == 1
    assert all(loss < 1.3 for *_, loss in results)


def with_one_lost(steps: int) -> tuple[list[int], list[str], int]:
    """Breaks rank 3 off midway; returns what rank 0 knows and logs, and the last step."""
    rank = dist.get_rank()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    model = small_model()
    optimizer = plain_sgd(model)
    worker = AsyncQsparseLocalSGD(model, optimizer, SPEC, sync_every=2)
    worker.__enter__()
    alive: list[int] = []
    for step in range(steps):
        take_step(model, optimizer, step, rank)
        time.sleep(0.05)
        if rank == 3 and step == 4:
            assert isinstance(worker._endpoint, RemoteServer)
            worker._endpoint._disconnect()
            assert worker._follower is not None
            worker._follower.end()
            return [], [], step
    if rank == 0:
        alive = worker.workers()
    # Not a new group: its name depends on how many groups each rank has created before.
    store = dist.distributed_c10d._get_default_store()
    store.add("remaining workers", 1)
    while store.add("remaining workers", 0) < 3:
        time.sleep(0.05)
    worker.__exit__(None, None, None)
    logging.getLogger("gradwire").removeHandler(handler)
    return alive, lines, step


def test_the_server_continues_without_a_lost_worker(four_ranks: Ranks) -> None:
    results = four_ranks.run(with_one_lost, 30)
    alive, lines, _ = results[0]
    assert alive == [0, 1, 2]
    assert [line for line in lines if "worker 3 is lost" in line and "[0, 1, 2]" in line]
    assert [step for *_, step in results] == [29, 29, 29, 4]


def with_one_unconnected(steps: int) -> tuple[list[str], float]:
    """Keeps rank 3 from connecting; returns what rank 0 logs, and how long it stays."""
    rank = dist.get_rank()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    model = small_model()
    optimizer = plain_sgd(model)
    worker = AsyncQsparseLocalSGD(model, optimizer, SPEC, sync_every=2, timeout_s=1.0)
    if rank == 3:
        worker._join = _fail_to_connect  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        with worker:
            for step in range(steps):
                take_step(model, optimizer, step, rank)
    except InterruptedError:
        assert rank == 3
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    return lines, time.perf_counter() - start


def _fail_to_connect(*_: object) -> int:
    raise InterruptedError


def test_a_worker_that_never_connects_is_lost(four_ranks: Ranks) -> None:
    (lines, took), *_ = four_ranks.run(with_one_unconnected, 4)
    assert [line for line in lines if "worker 3 is lost (it has never connected)" in line]
    assert 0.9 < took < 30


def one_tensor_server(workers: int) -> tuple[Server, Tensor]:
    """Returns a server with eight dense entries and all workers, and a message of ones."""
    ctx = EncodeContext((8,))
    dense = open_lane("w", NoCompression(), NoMemory(), "gather", ctx, torch.device("cpu"))
    layout = MessageFormat({"w": dense})
    server = Server({"w": torch.zeros(8)}, layout, workers)
    for rank in range(workers):
        server.join(rank, 0)
    return server, layout.pack([(torch.ones(8),)])


def test_updates_are_divided_by_the_connected_workers() -> None:
    """A message of ones by one of four workers moves the model by 1/4, then by 1/3 and 1/2."""
    server, message = one_tensor_server(4)
    server.sync(0, 0, message)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 4))
    server.drop(3, "a test")
    server.drop(3, "a test")
    server.sync(1, 0, message)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 4 - 1 / 3))
    server.leave(2)
    server.sync(0, 1, message)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 4 - 1 / 3 - 1 / 2))
    assert (server.lost, server.rejoined, server.lost_ranks()) == (1, 0, [3])
    # A worker that comes back counts again, and continues with its next message.
    assert server.join(3, 7) == 0
    server.sync(3, 0, message)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 4 - 2 / 3 - 1 / 2))
    assert (server.lost, server.rejoined, server.lost_ranks()) == (1, 1, [])


def test_each_message_of_a_worker_counts_once() -> None:
    server, message = one_tensor_server(2)
    server.sync(0, 0, message)
    for step in (0, 2, -1, 1 << 70):
        with pytest.raises(WireError, match=f"message {step} of worker 0, expected 1"):
            server.sync(0, step, message)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 2))
    server.sync(0, 1, message)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_the_server_refuses_an_update_that_is_not_finite(value: float) -> None:
    """Two messages of 3e38 are finite each, and their sum is not."""
    server, message = one_tensor_server(1)
    before = [server.sync(0, 0, torch.full((8,), value).view(torch.uint8))] if value == 3e38 else []
    model = {name: tensor.clone() for name, tensor in server.model.items()}
    step = len(before)
    with pytest.raises(NonFiniteError, match=f"message {step} of worker 0 makes 'w' non-finite"):
        server.sync(0, step, torch.full((8,), value).view(torch.uint8))
    assert torch.equal(server.model["w"], model["w"])
    assert server.refused_updates == 1
    # A finite message of the same step counts.
    server.sync(0, step, message)
    torch.testing.assert_close(server.model["w"], model["w"] - 1)


def test_a_drift_that_overflows_its_format_leaves_the_residual_alone() -> None:
    """A drift of 3e38 is finite, and not with a residual of as much."""

    def lane_state(run: SimulatedRun) -> dict[str, Any]:
        state: Any = run.workers[1].state_dict()
        own: dict[str, Any] = state["rank1"]["engines"][0]["lanes"]["0.weight"]
        return own

    with SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=1, size=2) as run:
        run.models[1][0].weight.data.fill_(-3e38)  # type: ignore[index]
        run.workers[1]._sync()  # type: ignore[attr-defined]
        before = lane_state(run)
        run.models[1][0].weight.data.fill_(-3e38)  # type: ignore[index]
        with pytest.raises(NonFiniteError, match=r"drift of parameter '0\.weight' overflows"):
            run.workers[1]._sync()  # type: ignore[attr-defined]
        after = lane_state(run)
        assert before["step"] == after["step"] == 1
        assert torch.equal(before["memory"]["residual"], after["memory"]["residual"])


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), 1e9, "1", True])
def test_invalid_timeouts_are_refused(timeout_s: object) -> None:
    with pytest.raises(ConfigError, match="AsyncQsparseLocalSGD: timeout_s must be"):
        SimulatedRun(AsyncQsparseLocalSGD, SPEC, sync_every=2, timeout_s=timeout_s)
