"""A replica of the bench: a training script with torchft, as a user would write it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from gradwire import elastic
from gradwire.bench.faults.jobs import mlp

SYNC_EVERY, RATE = 10, 0.005
LOCAL = {"diloco": elastic.DiLoCo, "sparseloco": elastic.SparseLoCo}
"""Cases that are local methods; all others are methods of gradients."""

BASELINES = ("torchft", "torchft-ddp")
"""Cases without us: all gradients in one `Manager.allreduce`, or torchft's own wrapper of DDP."""


@dataclass(frozen=True)
class Replica:
    """Settings of one replica."""

    case: str
    number: int
    lighthouse: str
    width: int = 256
    timeout_s: float = 10.0
    steps: int | None = None
    """Committed steps after which it ends by itself; None means that it is killed."""


@dataclass(frozen=True)
class Step:
    """A step of a replica, as it reports it."""

    replica: int
    step: int
    """The steps that were committed so far."""
    committed: bool
    digest: str
    """A digest of the parameters after the step."""
    started_s: float
    ended_s: float
    replicas: int
    """Replicas that took part."""
    loss: float | None
    """None if the replica had no gradient of its own yet."""
    sent_bytes: int


Report: TypeAlias = Callable[[Step], None]


def run(replica: Replica, report: Report) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    model = mlp(replica.width)
    if replica.number:
        # It must begin with the parameters of another, which are handed over.
        torch.manual_seed(replica.number)
        nn.init.normal_(next(model.parameters()))
    train = local_steps if replica.case in LOCAL else gradient_steps
    # The Manager needs it as long as it lives, and keeps no reference.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for step in train(replica, model, store.port):
        report(step)
        if replica.steps is not None and step.step >= replica.steps:
            return


class Task:
    """Labels of a fixed random network, which take thousands of steps to learn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._first = torch.randn(64, 128, generator=generator)
        self._second = torch.randn(128, 10, generator=generator)

    def batch(self, step: int, replica: int) -> tuple[Tensor, Tensor]:
        """Returns examples and their labels, other ones in every step of every replica."""
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + replica))
        return inputs, (inputs.mm(self._first).relu().mm(self._second)).argmax(1)


def gradient_steps(replica: Replica, model: nn.Module, port: int) -> Iterator[Step]:
    """Yields every step of a loop with gradients."""
    from torchft import DistributedDataParallel, Optimizer

    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = make_manager(replica, port, load, save, is_async=True)
    forward: nn.Module = model
    reducer: elastic.ElasticReducer | None = None
    if replica.case == "torchft-ddp":
        forward = DistributedDataParallel(manager, model)
    elif replica.case not in BASELINES:
        reducer = elastic.attach(manager, model, replica.case, nan_policy="raise")
    optimizer, task = Optimizer(manager, inner), Task()
    while True:
        before, started_s = manager.current_step(), time.monotonic()
        optimizer.zero_grad()
        inputs, labels = task.batch(before, replica.number)
        loss = nn.functional.cross_entropy(forward(inputs), labels)
        loss.backward()
        if replica.case == "torchft":
            all_reduce(manager, model)
        optimizer.step()
        after = manager.current_step()
        yield Step(
            replica=replica.number,
            step=after,
            committed=after > before,
            digest=digest(model),
            started_s=started_s,
            ended_s=time.monotonic(),
            replicas=manager.num_participants(),
            # A replica that joined in this step had parameters of its own.
            loss=float(loss.detach()) if manager.is_participating() else None,
            sent_bytes=0 if reducer is None else count_of(reducer.stats(), "sent_bytes"),
        )


def all_reduce(manager: Any, model: nn.Module) -> None:
    """Averages all gradients in one message, as torchft does it."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def local_steps(replica: Replica, model: nn.Module, port: int) -> Iterator[Step]:
    """Yields every sync of a loop with local steps, and that in which the replica joins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    manager = make_manager(replica, port, None, None, is_async=False)
    started_s = time.monotonic()
    method: AbstractContextManager[Any] = LOCAL[replica.case](
        manager, model, optimizer, sync_every=SYNC_EVERY
    )
    with method as workers:
        loss: float | None = None
        task, rollbacks = Task(), 0
        while True:
            stats = workers.stats()
            synced = Step(
                replica=replica.number,
                step=manager.current_step(),
                committed=True,
                digest=digest(model),
                started_s=started_s,
                ended_s=time.monotonic(),
                replicas=manager.num_participants(),
                loss=loss,
                sent_bytes=count_of(stats, "sent_bytes"),
            )
            # The method has tried again by itself.
            for _ in range(count_of(stats, "rollbacks") - rollbacks):
                yield replace(synced, committed=False)
            rollbacks = count_of(stats, "rollbacks")
            yield synced
            for number in range(SYNC_EVERY):
                if number == SYNC_EVERY - 1:
                    started_s = time.monotonic()
                optimizer.zero_grad()
                step = manager.current_step() * SYNC_EVERY + number
                inputs, labels = task.batch(step, replica.number)
                value = nn.functional.cross_entropy(model(inputs), labels)
                value.backward()
                optimizer.step()
                loss = float(value.detach())


def make_manager(
    replica: Replica,
    port: int,
    load: Callable[[Any], None] | None,
    save: Callable[[], Any] | None,
    *,
    is_async: bool,
) -> Any:
    from torchft import Manager, ProcessGroupGloo

    limit = timedelta(seconds=replica.timeout_s)
    return Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=is_async,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=replica.lighthouse,
        replica_id=f"replica_{replica.number}",
    )


def digest(model: nn.Module) -> str:
    content = sha256()
    for parameter in model.parameters():
        content.update(parameter.detach().numpy().tobytes())
    return content.hexdigest()[:16]


def count_of(stats: dict[str, object], name: str) -> int:
    found = stats[name]
    assert isinstance(found, int)
    return found
