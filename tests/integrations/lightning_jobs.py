"""Jobs of the Lightning tests. Each runs on every rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ddp_jobs import failure_of
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from trainer_jobs import SPEC, ResumeResult, dataset, flat_state, mlp, record_rates, weights

import gradwire
from gradwire.integrations.lightning import GradwireCallback, GradwireStrategy
from processes import as_torchrun


class Classifier(LightningModule):
    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.layers = mlp()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ShardedClassifier(Classifier):
    """A model under FSDP2, which compresses its gradients itself if it has a spec."""

    shards: gradwire.Shards | None = None

    def __init__(self, spec: str | None) -> None:
        Classifier.__init__(self)
        self.spec = spec

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        if self.spec is not None:
            self.shards = gradwire.attach_fsdp(self, self.spec)


class Probe(Callback):
    """Records the link's state when training starts, and when an epoch has ended."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(flat_state(link_of(trainer)))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(flat_state(link_of(trainer)))


def link_of(trainer: Trainer) -> gradwire.Link | gradwire.Shards | None:
    if isinstance(trainer.strategy, GradwireStrategy):
        return trainer.strategy.link
    [ours] = [c for c in trainer.callbacks if isinstance(c, GradwireCallback)]
    return ours.link


def trainer_of(folder: Path, kind: str, *callbacks: Callback, **given: Any) -> Trainer:
    ours = [GradwireCallback(SPEC)] if kind == "callback" else []
    strategy: Any = "ddp" if kind == "callback" else GradwireStrategy(SPEC)
    options: dict[str, Any] = {"max_epochs": 4, "devices": 2, "strategy": strategy, **given}
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*ours, *callbacks],
        **options,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=8)


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1)


def resume_job(folder: str, kind: str) -> ResumeResult:
    """Runs four epochs, and two more after the checkpoint of the second."""
    as_torchrun()
    place = Path(folder)
    probe, model = Probe(), Classifier()
    first = trainer_of(place, kind, probe, checkpoints(place / "first"))
    first.fit(model, loader())
    again, fresh = Probe(), Classifier()
    second = trainer_of(place, kind, again, checkpoints(place / "second"))
    second.fit(fresh, loader(), ckpt_path=place / "first" / "epoch=1.ckpt")
    link = link_of(second)
    assert link is not None
    return ResumeResult(weights(model), weights(fresh), probe.seen[2], again.seen[0], link.stats())


def after_fit_job(folder: str, kind: str) -> tuple[bool, list[str]]:
    """Resumes from a checkpoint that is saved after fit; old ones must be removed."""
    as_torchrun()
    place = Path(folder) / "run"
    newest = ModelCheckpoint(place, "{epoch}", save_last="link")
    first = trainer_of(place, kind, newest, max_epochs=2)
    first.fit(Classifier(), loader())
    first.save_checkpoint(place / "over.ckpt")
    before = flat_state(link_of(first))
    left = sorted(p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_dir())
    same = True
    for name in ("over.ckpt", "last.ckpt"):
        second = trainer_of(place, kind, max_epochs=2, enable_checkpointing=False)
        second.fit(Classifier(), loader(), ckpt_path=place / name)
        after = flat_state(link_of(second))
        same = same and all(torch.equal(after[key], value) for key, value in before.items())
    return same, left


def counted_job(folder: str) -> tuple[object, Tensor, Tensor]:
    """Returns the compressed steps on CPU, and weights with and without compression."""
    as_torchrun()
    quiet = {"enable_checkpointing": False, "max_epochs": 1}
    model, plain = Classifier(), Classifier()
    trainer = trainer_of(Path(folder), "callback", **quiet)
    trainer.fit(model, loader())
    trainer_of(Path(folder), "none", strategy="ddp", **quiet).fit(plain, loader())
    link = link_of(trainer)
    assert link is not None
    return link.stats()["steps"], weights(model), weights(plain)


class Decaying(Classifier):
    """Halves its learning rate after every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class RateRecorder(Callback):
    """Records the learning rates that the link receives at the end of epochs."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rates = record_rates(link_of(trainer))


def epochs_job(folder: str, kind: str) -> list[list[float | None]]:
    """Returns the rates reported in three epochs, and in a third one after a resume."""
    as_torchrun()
    place, reported = Path(folder), []
    for resume in (None, place / "epoch=1.ckpt"):
        recorder = RateRecorder()
        trainer = trainer_of(place, kind, recorder, checkpoints(place), max_epochs=3)
        trainer.fit(Decaying(), loader(), ckpt_path=resume)
        reported.append(recorder.rates)
    return reported


def scaler_job(folder: str) -> object:
    """Returns the loss scale of residuals after steps in mixed precision."""
    as_torchrun()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "max_epochs": 1}
    mixed = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_of(Path(folder), "strategy", plugins=[mixed], **quiet)
    trainer.fit(Classifier(), loader())
    link = link_of(trainer)
    assert link is not None
    [own] = link.state_dict().values()
    assert isinstance(own, dict)
    return own["loss_scale"]


def sharded_trainer(folder: Path, *callbacks: Callback, **given: Any) -> Trainer:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return trainer_of(folder, "none", *callbacks, **{"strategy": strategy, **given})


def sharded_resume_job(folder: str, weights_spec: str | None) -> ResumeResult:
    """Runs four epochs under FSDP2, and two more after the checkpoint of the second."""
    as_torchrun()
    place = Path(folder)
    runs = []
    for name, resume in (("first", None), ("second", place / "first" / "epoch=1.ckpt")):
        probe, model = Probe(), ShardedClassifier(None)
        ours = GradwireCallback(SPEC, **({"weights": weights_spec} if weights_spec else {}))
        trainer = sharded_trainer(place, ours, probe, checkpoints(place / name))
        trainer.fit(model, loader(), ckpt_path=resume)
        parameters: list[Any] = [*model.parameters()]
        runs.append((torch.cat([p.full_tensor().detach().flatten() for p in parameters]), probe))
    link = link_of(trainer)
    assert link is not None
    (whole, first), (resumed, second) = runs
    return ResumeResult(whole, resumed, first.seen[2], second.seen[0], link.stats())


class FabricRun:
    """A loop as Fabric's users write it, under FSDP2 with both legs compressed."""

    def __init__(self) -> None:
        strategy = FabricModelParallel(_parallelize, data_parallel_size=2, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup(mlp())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.loader: Any = self.fabric.setup_dataloaders(loader())
        self.link = gradwire.attach_fsdp(self.model.module, SPEC, weights="qsgd:bits=8")

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.fabric.backward(nn.functional.cross_entropy(self.model(x), y))
                self.optimizer.step()

    def weights(self) -> Tensor:
        parameters: list[Any] = [*self.model.parameters()]
        return torch.cat([p.full_tensor().detach().flatten() for p in parameters])


def _parallelize(model: Any, mesh: Any) -> Any:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def fabric_job(folder: str) -> tuple[ResumeResult, str]:
    """Trains on after a checkpoint, and from it; returns also what Fabric's own would do."""
    as_torchrun()
    first = FabricRun()
    first.train(2)
    state = {"model": first.model, "optimizer": first.optimizer}
    first.fabric.save(Path(folder) / "fabric", {**state, "shards": first.link.state_dict()})
    dcp.save(first.link.state_dict(), checkpoint_id=Path(folder) / "gradwire")
    saved = flat_state(first.link)
    first.train(2)
    second = FabricRun()
    state = {"model": second.model, "optimizer": second.optimizer}
    rest = second.fabric.load(Path(folder) / "fabric", state)
    own = second.link.state_dict()
    dcp.load(own, checkpoint_id=Path(folder) / "gradwire")
    second.link.load_state_dict(own)
    restored = flat_state(second.link)
    second.train(2)
    result = ResumeResult(first.weights(), second.weights(), saved, restored, second.link.stats())
    return result, failure_of(lambda: second.link.load_state_dict(rest["shards"]))


def sharded_job(folder: str) -> tuple[object, dict[str, str]]:
    """Returns the steps of a model that attaches by itself, and refusals."""
    as_torchrun()
    quiet = {"enable_checkpointing": False, "max_epochs": 1}
    model = ShardedClassifier(SPEC)
    sharded_trainer(Path(folder), **quiet).fit(model, loader())
    assert model.shards is not None

    def fit(*callbacks: Callback, checkpoint: Path | None = None, **given: Any) -> str:
        trainer = sharded_trainer(Path(folder), *callbacks, **{**quiet, **given})
        return failure_of(
            lambda: trainer.fit(ShardedClassifier(None), loader(), ckpt_path=checkpoint)
        )

    plain = sharded_trainer(Path(folder), **quiet)
    plain.fit(ShardedClassifier(None), loader())
    plain.save_checkpoint(dense := Path(folder) / "dense.ckpt")
    ddp = trainer_of(Path(folder), "none", GradwireCallback(SPEC, weights="int8"), strategy="ddp")
    return model.shards.stats()["steps"], {
        "dense": fit(GradwireCallback(SPEC), checkpoint=dense),
        "votes": fit(GradwireCallback("signsgd")),
        "option": fit(GradwireCallback(SPEC, optimizer=None)),
        "weights": failure_of(lambda: ddp.fit(Classifier(), loader())),
    }


def refusals_job(folder: str) -> dict[str, str]:
    as_torchrun()
    place = Path(folder)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "max_epochs": 1}

    def fit(callbacks: list[Callback], ckpt: Path | None = None, **given: Any) -> str:
        trainer = trainer_of(place, "none", *callbacks, **{**quiet, "strategy": "ddp", **given})
        return failure_of(lambda: trainer.fit(Classifier(), loader(), ckpt_path=ckpt))

    plain = trainer_of(place, "none", strategy="ddp", **quiet)
    plain.fit(Classifier(), loader())
    plain.save_checkpoint(dense := place / "dense.ckpt")
    hooked = DDPStrategy(ddp_comm_state=None, ddp_comm_hook=print)
    return {
        "spec": failure_of(lambda: GradwireCallback("top_k:ratio=0.1")),
        "option": failure_of(lambda: GradwireStrategy(SPEC, options={"memroy": "none"})),
        "controller": failure_of(lambda: GradwireStrategy(SPEC, options={"controller": "gravak"})),
        "two hooks": failure_of(lambda: GradwireStrategy(SPEC, ddp_comm_hook=print)),
        "hook": fit([GradwireCallback(SPEC)], strategy=hooked),
        "both": fit([GradwireCallback(SPEC)], strategy=GradwireStrategy(SPEC)),
        "single": fit([GradwireCallback(SPEC)], strategy="auto", devices=1),
        "dense": fit([GradwireCallback(SPEC)], dense),
        "dense files": fit([], dense, strategy=GradwireStrategy(SPEC)),
        "allowed": fit([GradwireCallback(SPEC, missing_ok=True)], dense, max_epochs=2),
        "allowed files": fit([], dense, strategy=GradwireStrategy(SPEC, missing_ok=True)),
    }
