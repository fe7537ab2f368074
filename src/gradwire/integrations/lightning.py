"""Lightning: a callback for DDP strategies and FSDP2, or a DDP strategy; both work on CPU too.

Lightning itself registers communication hooks on CUDA only, and silently ignores them elsewhere.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.checkpoint.gather import gather_states
from gradwire.checks import check_flag
from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.ddp import Link
from gradwire.integrations.fsdp import Shards
from gradwire.integrations.handle import Handle
from gradwire.integrations.settings import Settings
from gradwire.integrations.trainers import (
    FOLDER,
    attach_request,
    check_version,
    load_rank_file,
    save_rank_file,
)
from gradwire.policies import MethodSpec

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise MissingExtra("gradwire.integrations.lightning", "lightning", "lightning") from error

log = logging.getLogger("gradwire")


class GradwireCallback(Callback):
    """Compresses the gradients of a Trainer with any DDP strategy, or `ModelParallelStrategy`.

    Options are those of `gradwire.attach`, whose result is `link`; or of `gradwire.attach_fsdp`,
    such as `weights="int8"`, for a model that `configure_model` sharded by FSDP2. Checkpoints hold
    the states of all ranks, which rank 0 collects: each is as large as the gradients. With
    `missing_ok` a checkpoint without them is a new start. With `log_metrics` the Trainer's loggers
    receive `link.metrics("gradwire/")` of rank 0, as often as its own metrics.
    """

    def __init__(
        self,
        compressor: MethodSpec | Settings,
        *,
        missing_ok: bool = False,
        log_metrics: bool = False,
        **options: Any,
    ) -> None:
        check_version("lightning")
        check_flag("GradwireCallback", "log_metrics", log_metrics)
        self._log_metrics = log_metrics
        self._request = attach_request("GradwireCallback", compressor, options)
        self._missing_ok = missing_ok
        self._loaded: Mapping[str, object] | None = None
        self.link: Link | Shards | None = None

    def state_dict(self) -> dict[str, Any]:
        """Makes Lightning warn when a checkpoint is resumed without this callback."""
        return {"compressor": str(self._request.compressor)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(FOLDER)
        # Strategies of sharded models load after `on_fit_start`, others before it.
        if trainer.strategy.restore_checkpoint_after_setup and self.link is not None:
            self._load(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # On CUDA attach would find the slot taken; elsewhere the hook was never registered.
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:
            raise ConfigError("GradwireCallback: the model's only hook slot has a ddp_comm_hook")
        self.link = self._request.attach_any(trainer.model, _scaler(trainer.precision_plugin))
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._load(trainer)

    def _load(self, trainer: Trainer) -> None:
        """Restores what the checkpoint of a resumed run has of ours."""
        loaded, self._loaded = self._loaded, None
        if trainer.ckpt_path is None:
            return
        assert self.link is not None
        if loaded is not None:
            self.link.load_state_dict(loaded)
        elif self._missing_ok:
            log.warning("%s was saved without Gradwire: residuals begin at zero", trainer.ckpt_path)
        else:
            raise ConfigError(
                f"{trainer.ckpt_path} was saved without Gradwire; missing_ok=True starts with "
                "empty residuals"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        _report_epoch(self.link, trainer, batch_idx)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._log_metrics:
            _log_metrics(self.link, trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.link is not None:
            checkpoint[FOLDER] = gather_states(self.link.state_dict(), trainer.strategy.root_device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _release(self.link)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        _release(self.link)


class LogMetrics(Callback):
    """Sends `link.metrics("gradwire/")` of a `GradwireStrategy` to the Trainer's loggers."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, GradwireStrategy):
            raise ConfigError(
                "LogMetrics: expected a GradwireStrategy, got "
                f"{type(trainer.strategy).__name__}; GradwireCallback takes log_metrics=True"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        _log_metrics(trainer.strategy.link, trainer)


class GradwireStrategy(DDPStrategy):
    """DDP with compressed gradients: `Trainer(strategy=GradwireStrategy("topk:ratio=0.01"))`.

    `options` are those of `gradwire.attach`, whose result is `link`; all else is DDPStrategy's. Its
    metrics are logged by the callback `LogMetrics`. For a checkpoint `x.ckpt` every rank has a file
    in the folder `gradwire/x.ckpt` beside it.
    """

    def __init__(
        self,
        compressor: MethodSpec | Settings,
        *,
        options: Mapping[str, Any] | None = None,
        missing_ok: bool = False,
        **ddp: Any,
    ) -> None:
        check_version("lightning")
        if ddp.get("ddp_comm_hook") is not None:
            raise ConfigError("GradwireStrategy: a ddp_comm_hook would need the same slot")
        DDPStrategy.__init__(self, **ddp)
        self._request = attach_request("GradwireStrategy", compressor, dict(options or {}))
        self._missing_ok = missing_ok
        self.link: Link | None = None

    def setup(self, trainer: Trainer) -> None:
        DDPStrategy.setup(self, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.link = self._request.attach(self.model, _scaler(self.precision_plugin))
            if trainer.ckpt_path is not None:
                self._load(trainer.ckpt_path)

    def _load(self, checkpoint: Any) -> None:
        assert self.link is not None
        folder = _rank_folder(checkpoint)
        if Path(checkpoint).is_symlink():
            # Such as "last", a link to the checkpoint's original name.
            folder = _rank_folder(Path(checkpoint).resolve())
        load_rank_file(self.link, folder, missing_ok=self._missing_ok)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DDPStrategy.on_train_batch_start(self, batch, batch_idx)
        assert self.lightning_module is not None
        _report_epoch(self.link, self.lightning_module.trainer, batch_idx)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **how: Any) -> None:
        folder = _rank_folder(filepath)
        DDPStrategy.save_checkpoint(self, checkpoint, filepath, **how)
        # A checkpoint without optimisers is not meant to be resumed.
        if self.link is not None and "optimizer_states" in checkpoint:
            save_rank_file(self.link, folder)

    def remove_checkpoint(self, filepath: Any) -> None:
        DDPStrategy.remove_checkpoint(self, filepath)
        if self.local_rank == 0:
            shutil.rmtree(_rank_folder(filepath), ignore_errors=True)

    def teardown(self) -> None:
        _release(self.link)
        DDPStrategy.teardown(self)


def _scaler(precision: Any) -> torch.amp.GradScaler | None:
    """Returns the GradScaler of 16-bit mixed precision; other precisions have none."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler


def _report_epoch(link: Handle | None, trainer: Trainer, batch_idx: int) -> None:
    """Reports the last epoch at the first batch of the next, when its learning rate is set."""
    if batch_idx == 0 and trainer.current_epoch > 0 and link is not None:
        link.epoch_ended(trainer.optimizers[0].param_groups[0]["lr"])


def _log_metrics(link: Handle | None, trainer: Trainer) -> None:
    """Sends the numbers of the last step to all loggers, which drop those of other ranks than 0."""
    if link is None or not trainer.loggers or trainer.global_step % trainer.log_every_n_steps:
        return
    numbers = link.metrics("gradwire/")
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=trainer.global_step)


def _release(link: Handle | None) -> None:
    """Closes the link of a model that is no longer trained; its state can still be saved."""
    if link is not None and link._is_attached():
        link._release()


def _rank_folder(checkpoint: Any) -> Path:
    """Returns the folder of a checkpoint's rank files, outside the checkpoints' own folder."""
    if "://" in str(checkpoint):
        raise ConfigError(
            f"GradwireStrategy: rank files need a folder on disk, got {checkpoint}; "
            "GradwireCallback puts them into the checkpoint"
        )
    path = Path(checkpoint)
    return path.parent / FOLDER / path.name
