"""Jobs of the Accelerate tests. Each runs on every rank."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from ddp_jobs import failure_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_jobs import SPEC, ResumeResult, dataset, flat_state, mlp, weights

import gradwire
from gradwire.integrations.accelerate import keep_state
from processes import as_torchrun

EPOCHS = 4


class Run:
    """A training loop as Accelerate's users write it, with one line for Gradwire."""

    def __init__(self) -> None:
        as_torchrun()
        self.accelerator = Accelerator(cpu=True)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=8))
        self.model, self.optimizer, self.loader = prepared
        self.link: Any = gradwire.attach(self.model, SPEC)

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()


def resume_job(folder: str) -> ResumeResult:
    """Runs four epochs with a checkpoint after the second, and two more from there."""
    first = Run()
    keep_state(first.accelerator, first.link)
    first.train(EPOCHS // 2)
    first.accelerator.save_state(folder)
    saved = flat_state(first.link)
    first.train(EPOCHS // 2)
    second = Run()
    keep_state(second.accelerator, second.link)
    second.accelerator.load_state(folder)
    restored = flat_state(second.link)
    second.train(EPOCHS // 2)
    ends = (weights(run.model) for run in (first, second))
    return ResumeResult(*ends, saved, restored, second.link.stats())


class ShardedRun(Run):
    """The loop under Accelerate's FSDP2, which it offers on accelerators only: the test asks for it
    on CPUs."""

    def __init__(self) -> None:
        as_torchrun()
        self.accelerator = Accelerator(cpu=True)
        self.claim_fsdp()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=8))
        self.model, self.optimizer, self.loader = prepared
        self.link = gradwire.attach_fsdp(self.model, SPEC, weights="qsgd:bits=8")
        keep_state(self.accelerator, self.link)

    def claim_fsdp(self) -> None:
        """Sets what `accelerate config` would; preparing a loader resets it without a GPU."""
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )

    def weights(self) -> Tensor:
        parameters: list[Any] = [*self.model.parameters()]
        return torch.cat([p.full_tensor().detach().flatten() for p in parameters])


def sharded_resume_job(folder: str) -> ResumeResult:
    """Runs four epochs with a checkpoint after the second, and two more from there."""
    first = ShardedRun()
    first.train(EPOCHS // 2)
    first.claim_fsdp()
    first.accelerator.save_state(folder)
    saved = flat_state(first.link)
    first.train(EPOCHS // 2)
    second = ShardedRun()
    second.claim_fsdp()
    second.accelerator.load_state(folder)
    restored = flat_state(second.link)
    second.train(EPOCHS // 2)
    first.accelerator.state._reset_state(reset_partial_state=True)
    return ResumeResult(first.weights(), second.weights(), saved, restored, second.link.stats())


def without_us_job(folder: str) -> str:
    """Returns the error of Accelerate's own checkpointing, which loads one state on all ranks."""
    first = Run()
    first.train(1)
    first.accelerator.register_for_checkpointing(Plain(first.link))
    first.accelerator.save_state(folder)
    second = Run()
    kept = Plain(second.link)
    second.accelerator.register_for_checkpointing(kept)
    second.accelerator.load_state(folder)
    return kept.error


class Plain:
    """A link registered as a plain object, which records why it cannot be loaded."""

    def __init__(self, link: gradwire.Link) -> None:
        self.link = link
        self.error = "not loaded"

    def state_dict(self) -> dict[str, object]:
        return self.link.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.error = ""
        try:
            self.link.load_state_dict(state)
        except gradwire.ConfigError as error:
            self.error = str(error)


def refusals_job(folder: str) -> dict[str, str]:
    run = Run()
    run.accelerator.save_state(folder)
    found = {
        "accelerator": failure_of(lambda: keep_state(run.model, run.link)),
        "handle": failure_of(lambda: keep_state(run.accelerator, run.model)),
        "nothing": failure_of(lambda: keep_state(run.accelerator)),
    }
    keep_state(run.accelerator, run.link)
    found["twice"] = failure_of(lambda: keep_state(run.accelerator, run.link))
    found["dense"] = failure_of(lambda: run.accelerator.load_state(folder))
    torch.distributed.barrier()
    run.accelerator.save_state(folder)
    files = sorted(Path(folder).rglob("*rank1of2*.pt"))
    if torch.distributed.get_rank() == 1:
        files[0].write_bytes(files[0].read_bytes()[:-1])
    found["corrupted"] = failure_of(lambda: run.accelerator.load_state(folder))
    run.link.detach()
    found["detached"] = failure_of(lambda: run.accelerator.load_state(folder))
    other = Run()
    keep_state(other.accelerator, other.link, missing_ok=True)
    torch.distributed.barrier()
    found["half"] = failure_of(lambda: other.accelerator.load_state(folder))
    return found
