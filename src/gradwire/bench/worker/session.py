"""A training session of one case on one worker: model, optimiser and mounted method."""

import time
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.bench.case import Traffic
from gradwire.bench.cases.baselines import dense_bytes
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.machine import wait_for
from gradwire.bench.worker.device_memory import DeviceMemory
from gradwire.bench.worker.protocol import Job
from gradwire.bench.workloads.base import (
    Epochs,
    Evaluation,
    parameter_count,
    parse_workload,
    update,
)
from gradwire.types import mix


class Cost(NamedTuple):
    """Means per step over some steps."""

    sent_bytes: float
    encode_ms: float | None
    wire_ms: float | None
    decode_ms: float | None
    received_bytes: float | None


class Session:
    """Takes the steps of one case; initial models are equal for all cases."""

    def __init__(self, job: Job, case: str) -> None:
        data = None if job.data is None else Path(job.data)
        self.workload = parse_workload(job.workload, data, job.device)
        self.rank, self.workers, self.seed = dist.get_rank(), dist.get_world_size(), job.seed
        torch.manual_seed(job.seed)
        self.device = torch.device(job.device)
        self.memory = DeviceMemory.on(self.device)
        with self.memory.counted():
            model = self.workload.build().to(job.device)
            # Dropout differs between ranks.
            torch.manual_seed(mix(job.seed, self.rank))
            self.parameters = parameter_count(model)
            parsed = parse_case(case)
            # An explicit cap also holds for the first bucket, which is 1 MB otherwise.
            cap_mb = 4 * self.parameters / 2**20 + 1 if parsed.one_bucket else None
            self.ddp = DDP(model, bucket_cap_mb=cap_mb, **_own_buffers())
            self.learns = parsed.learns
            self.mounted = parsed.mount(self.ddp, self.workload.optimiser(model), job.seed)
        self.losses: list[Tensor] = []
        self.dense_bytes = dense_bytes(self.ddp)
        self.steps, self.planned = 0, job.steps
        self.epochs = Epochs(self.workload, self.workers, job.steps)

    def step(self) -> float:
        """Takes one step and returns its seconds, until the device has finished.

        The exchange keeps the ranks together.
        """
        start_s = time.perf_counter()
        with self.memory.counted():
            loss = self._take_step()
            wait_for(self.device)
        taken_s = time.perf_counter() - start_s
        self.losses.append(loss)
        return taken_s

    def _take_step(self) -> Tensor:
        """Takes one step and returns its loss; the device may still be at work."""
        inputs, targets = self.workload.batch(self.steps, self.rank, self.workers, self.seed)
        optimizer = self.mounted.optimizer
        optimizer.zero_grad()
        loss = self.workload.loss(self.ddp(inputs), targets)
        loss.backward()
        # Blocks of steps continue with one model; each runs through the whole schedule.
        step = self.steps % self.planned
        clips = self.mounted.clips
        update(self.workload, self.ddp.module, optimizer, step, self.planned, clips=clips)
        self.steps += 1
        # Counted in the step: waiting for the controller is part of every training loop.
        if (rate := self.epochs.ended(self.steps)) is not None:
            self.mounted.epoch_ended(rate)
        return loss.detach()

    def take_losses(self) -> tuple[float, ...]:
        """Returns the losses of the steps since the last call."""
        # The digits of a float32; more would only make records longer.
        losses = tuple(float(f"{float(loss):.7g}") for loss in self.losses)
        self.losses = []
        return losses

    def traffic(self) -> Traffic:
        return self.mounted.traffic(self.steps)

    def exposed_share(self) -> float:
        """Returns the share of a step's bytes that cannot be sent during its backward pass.

        It is the last bucket's share of the gradient; all of it for a local method, which sends
        after the optimiser's step, and none if it applies means late.
        """
        if self.mounted.idle_offset:
            return 0.0
        return _last_bucket_share(self.ddp) if self.mounted.in_backward else 1.0

    def evaluate(self) -> Evaluation:
        return self.workload.evaluate(self.ddp.module)

    def close(self) -> None:
        self.mounted.close()


def _own_buffers() -> dict[str, Any]:
    """Returns the DDP argument that keeps the running means of batch norm local.

    They are not gradients, so no method compresses them; rank 0 evaluates with its own.
    """
    # torch renamed the argument; the old name warns in versions that have the new one.
    names = signature(DDP.__init__).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"
    return {new if new in names else old: False}


def _last_bucket_share(ddp: DDP) -> float:
    """Returns the share of the gradient in the bucket that DDP reduces last."""
    facts = ddp._get_ddp_logging_data()
    # Buckets are rebuilt after the first step, in the order in which gradients become known.
    text = facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]
    sizes = [int(size) for size in text.split(",")]
    return sizes[-1] / sum(sizes)


def cost(before: Traffic, after: Traffic, steps: int) -> Cost:
    return Cost(
        (after.sent_bytes - before.sent_bytes) / steps,
        _step_ms(before.encode_s, after.encode_s, steps),
        _step_ms(before.wire_s, after.wire_s, steps),
        _step_ms(before.decode_s, after.decode_s, steps),
        None
        if before.received_bytes is None or after.received_bytes is None
        else (after.received_bytes - before.received_bytes) / steps,
    )


def _step_ms(before_s: float | None, after_s: float | None, steps: int) -> float | None:
    return None if before_s is None or after_s is None else (after_s - before_s) * 1e3 / steps
