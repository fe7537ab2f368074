"""Jobs of the tests of Hugging Face's Trainer. Each runs on every rank."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from ddp_jobs import failure_of
from torch import Tensor, nn
from trainer_jobs import SPEC, ResumeResult, dataset, flat_state, mlp, record_rates, weights
from transformers import Trainer, TrainerCallback, TrainingArguments

from gradwire.integrations.transformers import GradwireCallback
from processes import as_torchrun

STEPS = 8
HALF = STEPS // 2


class Classifier(nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Probe(TrainerCallback):
    """Records the link's state when training begins, and after every save."""

    def __init__(self, ours: GradwireCallback) -> None:
        self.ours = ours
        self.seen: list[dict[str, Tensor]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append(flat_state(self.ours.link))

    def on_save(self, *_: Any, **__: Any) -> None:
        self.seen.append(flat_state(self.ours.link))


def trainer_of(folder: Path, **given: Any) -> Trainer:
    as_torchrun()
    settings = {"max_steps": STEPS, "save_steps": HALF, **given}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    examples = [{"x": x, "labels": y} for x, y in dataset()]
    return Trainer(Classifier(), args, train_dataset=examples)


def resume_job(folder: str) -> ResumeResult:
    """Runs eight steps, and four more after the checkpoint at the fourth."""
    runs = []
    for resume in (None, str(Path(folder) / f"checkpoint-{HALF}")):
        trainer = trainer_of(Path(folder))
        ours = GradwireCallback(trainer, SPEC)
        trainer.add_callback(ours)
        probe = Probe(ours)
        trainer.add_callback(probe)
        trainer.train(resume_from_checkpoint=resume)
        runs.append((weights(trainer.model), probe))
    (whole, first), (resumed, second) = runs
    assert second.ours.link is not None
    return ResumeResult(whole, resumed, first.seen[1], second.seen[0], second.ours.link.stats())


def sharded_resume_job(folder: str) -> ResumeResult:
    """Does the same under FSDP2, which the Trainer offers on accelerators only.

    The test asks for it on CPUs, so that both legs and a resumed run are seen.
    """
    as_fsdp = property(lambda _: DistributedType.FSDP, lambda *_: None)
    runs = []
    with patch.object(AcceleratorState, "distributed_type", as_fsdp, create=True):
        for resume in (None, str(Path(folder) / f"checkpoint-{HALF}")):
            trainer = trainer_of(Path(folder))
            trainer.is_fsdp_enabled = True
            trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="no_wrap",
                cpu_ram_efficient_loading=False,
                state_dict_type="SHARDED_STATE_DICT",
            )
            ours = GradwireCallback(trainer, SPEC, weights="qsgd:bits=8")
            trainer.add_callback(ours)
            probe = Probe(ours)
            trainer.add_callback(probe)
            trainer.train(resume_from_checkpoint=resume)
            parameters: list[Any] = [*trainer.model.parameters()]
            whole = torch.cat([p.full_tensor().detach().flatten() for p in parameters])
            runs.append((whole, probe))
        trainer.accelerator.state._reset_state(reset_partial_state=True)
    (whole, first), (resumed, second) = runs
    assert second.ours.link is not None
    return ResumeResult(whole, resumed, first.seen[1], second.seen[0], second.ours.link.stats())


class RateRecorder(TrainerCallback):
    """Records the learning rates that the link receives at the end of epochs."""

    def __init__(self, ours: GradwireCallback) -> None:
        self.ours = ours

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.rates = record_rates(self.ours.link)


def epochs_job(folder: str) -> list[list[float | None]]:
    """Returns the rates reported in two and a half epochs, and after a resume within the second."""
    reported = []
    for resume in (None, str(Path(folder) / "checkpoint-6")):
        trainer = trainer_of(Path(folder), max_steps=10, save_steps=6)
        ours = GradwireCallback(trainer, SPEC)
        recorder = RateRecorder(ours)
        trainer.add_callback(ours)
        trainer.add_callback(recorder)
        trainer.train(resume_from_checkpoint=resume)
        reported.append(recorder.rates)
    return reported


def again_job(folder: str) -> list[object]:
    """Trains twice with one trainer, which wraps its model once; every run has its own link."""
    trainer = trainer_of(Path(folder), save_strategy="no", max_steps=2)
    trainer.add_callback(ours := GradwireCallback(trainer, SPEC))
    steps = []
    for _ in range(2):
        trainer.train()
        assert ours.link is not None
        steps.append(ours.link.stats()["steps"])
    return steps


def resumed(folder: Path, checkpoint: Path, **given: Any) -> str:
    trainer = trainer_of(folder)
    trainer.add_callback(GradwireCallback(trainer, SPEC, **given))
    return failure_of(lambda: trainer.train(resume_from_checkpoint=str(checkpoint)))


def refusals_job(folder: str) -> dict[str, str]:
    dense, other, moved = (Path(folder) / name for name in ("dense", "other", "moved"))
    trainer_of(dense).train()
    mine = trainer_of(other)
    mine.add_callback(GradwireCallback(mine, SPEC))
    mine.train()
    if dist.get_rank() == 0:
        shutil.copytree(other / f"checkpoint-{HALF}", moved / "elsewhere")
    dist.barrier()
    single = trainer_of(dense)
    single.model_wrapped = single.model
    ours = GradwireCallback(single, SPEC)
    begin = failure_of(lambda: ours.on_train_begin(single.args, single.state, single.control))
    return {
        "trainer": failure_of(lambda: GradwireCallback(single.model, SPEC)),
        "spec": failure_of(lambda: GradwireCallback(single, "topk")),
        "option": failure_of(lambda: GradwireCallback(single, SPEC, sed=1)),
        "single": begin,
        "dense": resumed(dense, dense / f"checkpoint-{HALF}"),
        "another run": resumed(other, dense / f"checkpoint-{HALF}"),
        "elsewhere": resumed(moved, moved / "elsewhere"),
        "given": resumed(moved, moved / "elsewhere", resume_from=moved / "elsewhere"),
        "allowed": resumed(dense, dense / f"checkpoint-{HALF}", missing_ok=True),
    }
