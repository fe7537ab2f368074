"""Baselines: plain DDP, torch's own communication hooks, and no communication at all.

Baselines do not count their bytes. Their traffic is that of a ring all-reduce of their messages,
which is what gloo does and what the interface counters confirm.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradwire.bench.case import Case, Mounted, Traffic
from gradwire.bench.records.schema import BASELINE, COMPUTE
from gradwire.comm.meter import ring_bytes
from gradwire.errors import ConfigError

_POWERSGD_START = 2  # the smallest that torch allows


@dataclass(frozen=True)
class _MountedAllReduce(Mounted):
    """A baseline that all-reduces the same number of bytes in every step."""

    step_bytes: float

    def traffic(self, steps: int) -> Traffic:
        return Traffic(steps * self.step_bytes)

    def epoch_ended(self, learning_rate: float) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class DdpFp32(Case):
    """DDP without a hook."""

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        return _MountedAllReduce(optimizer, dense_bytes(ddp))


@dataclass(frozen=True)
class TorchFp16(Case):
    """DDP with torch's half-precision hook."""

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        ddp.register_comm_hook(ddp.process_group, fp16_compress_hook)
        return _MountedAllReduce(optimizer, dense_bytes(ddp) / 2)


# DDP compares these annotations by identity, so this file has no postponed annotations.
def _bf16(state: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return bf16_compress_hook(state, bucket)


@dataclass(frozen=True)
class TorchBf16(Case):
    """DDP with torch's bfloat16 hook, renamed: DDP refuses it by name on gloo, where it works."""

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        ddp.register_comm_hook(ddp.process_group, _bf16)
        return _MountedAllReduce(optimizer, dense_bytes(ddp) / 2)


@dataclass(frozen=True)
class TorchPowerSgd(Case):
    """DDP with torch's PowerSGD hook, whose first steps are dense.

    The hook starts collectives inside callbacks of others. With several buckets gloo then aborts or
    hangs, so it runs in its best case: all gradients in one bucket.
    """

    rank: int
    one_bucket: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"torch-powersgd: rank must be at least 1, got {self.rank}")

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        state = PowerSGDState(
            process_group=ddp.process_group,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=_POWERSGD_START,
            random_seed=seed,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        return _MountedPowerSgd(optimizer, state, ddp.process_group.size(), dense_bytes(ddp))


@dataclass(frozen=True)
class _MountedPowerSgd(Mounted):
    state: PowerSGDState
    workers: int
    dense_bytes: float

    def traffic(self, steps: int) -> Traffic:
        payload_bytes = 4 * int(self.state.total_numel_after_compression)
        dense_steps = min(steps, _POWERSGD_START)
        return Traffic(ring_bytes(payload_bytes, self.workers) + dense_steps * self.dense_bytes)

    def epoch_ended(self, learning_rate: float) -> None:
        return

    def close(self) -> None:
        return


@dataclass(frozen=True)
class ComputeOnly(Case):
    """No communication: every worker steps with its own gradient.

    Its step time is a lower bound for any method; its models diverge and are not evaluated.
    """

    learns: ClassVar[bool] = False

    def mount(self, ddp: DDP, optimizer: Optimizer, seed: int) -> Mounted:
        contexts = ExitStack()
        contexts.enter_context(ddp.no_sync())
        return _MountedNothing(optimizer, contexts)


@dataclass(frozen=True)
class _MountedNothing(Mounted):
    contexts: ExitStack

    def traffic(self, steps: int) -> Traffic:
        return Traffic(0.0)

    def epoch_ended(self, learning_rate: float) -> None:
        return

    def close(self) -> None:
        self.contexts.close()


BASELINES: Mapping[str, type[Case]] = {
    BASELINE: DdpFp32,
    "torch-fp16": TorchFp16,
    "torch-bf16": TorchBf16,
    "torch-powersgd": TorchPowerSgd,
    COMPUTE: ComputeOnly,
}


def dense_bytes(ddp: DDP) -> float:
    """Returns the bytes that one worker sends for an all-reduce of uncompressed gradients."""
    grad_bytes = sum(p.nbytes for p in ddp.parameters() if p.requires_grad)
    return ring_bytes(grad_bytes, ddp.process_group.size())
