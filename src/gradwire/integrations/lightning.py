"""Lightning: a callback for any DDP strategy, or a strategy; on CPU too.

Lightning itself registers communication hooks on CUDA only, and silently ignores them elsewhere.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradwire.base import Compressor
from gradwire.checkpoint.gather import gathered
from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.ddp import Link
from gradwire.integrations.trainers import FOLDER, ask, check_version, load_files, save_files

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise MissingExtra("gradwire.integrations.lightning", "lightning", "lightning") from error

log = logging.getLogger("gradwire")


class GradwireCallback(Callback):
    """Compresses the gradients of what a Trainer fits under any DDP strategy.

    Options are those of `gradwire.attach`; `link` is what that returned. Checkpoints get the states
    of all ranks, which rank 0 collects: they are as large as so many gradients. With `missing_ok`
    a checkpoint without them is a new start.
    """

    def __init__(
        self, compressor: Compressor | str, *, missing_ok: bool = False, **options: Any
    ) -> None:
        check_version("lightning")
        self._asked = ask("GradwireCallback", compressor, options)
        self._missing_ok = missing_ok
        self._loaded: Mapping[str, object] | None = None
        self.link: Link | None = None

    def state_dict(self) -> dict[str, Any]:
        """Makes Lightning warn when a checkpoint is resumed without this callback."""
        return {"compressor": str(self._asked.compressor)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(FOLDER)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # On CUDA the slot is taken by then, and that is seen; elsewhere it was never registered.
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:
            raise ConfigError("GradwireCallback: the model's only hook slot has a ddp_comm_hook")
        self.link = self._asked.attach(trainer.model, _scaler(trainer.precision_plugin))
        loaded, self._loaded = self._loaded, None
        if trainer.ckpt_path is None:
            return
        if loaded is not None:
            self.link.load_state_dict(loaded)
        elif self._missing_ok:
            log.warning("%s was saved without Gradwire: residuals begin at zero", trainer.ckpt_path)
        else:
            raise ConfigError(
                f"{trainer.ckpt_path} was saved without Gradwire; missing_ok=True starts with empty "
                "residuals"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        _tell_epoch(self.link, trainer, batch_idx)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.link is not None:
            checkpoint[FOLDER] = gathered(self.link.state_dict(), trainer.strategy.root_device)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _leave(self.link)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        _leave(self.link)


class GradwireStrategy(DDPStrategy):
    """DDP with compressed gradients: `Trainer(strategy=GradwireStrategy("topk:ratio=0.01"))`.

    `options` are those of `gradwire.attach`, all else is DDPStrategy's; `link` is what `attach`
    returned. Beside a checkpoint `x.ckpt` every rank has a file in the folder `gradwire/x.ckpt`.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        options: Mapping[str, Any] | None = None,
        missing_ok: bool = False,
        **ddp: Any,
    ) -> None:
        check_version("lightning")
        if ddp.get("ddp_comm_hook") is not None:
            raise ConfigError("GradwireStrategy: a ddp_comm_hook would need the same slot")
        DDPStrategy.__init__(self, **ddp)
        self._asked = ask("GradwireStrategy", compressor, dict(options or {}))
        self._missing_ok = missing_ok
        self.link: Link | None = None

    def setup(self, trainer: Trainer) -> None:
        DDPStrategy.setup(self, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.link = self._asked.attach(self.model, _scaler(self.precision_plugin))
            if trainer.ckpt_path is not None:
                self._load(trainer.ckpt_path)

    def _load(self, checkpoint: Any) -> None:
        assert self.link is not None
        folder = _beside(checkpoint)
        if Path(checkpoint).is_symlink():
            # Such as a "last" that leads to the checkpoint under the name it was saved by.
            folder = _beside(Path(checkpoint).resolve())
        load_files(self.link, folder, missing_ok=self._missing_ok)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        DDPStrategy.on_train_batch_start(self, batch, batch_idx)
        assert self.lightning_module is not None
        _tell_epoch(self.link, self.lightning_module.trainer, batch_idx)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **how: Any) -> None:
        folder = _beside(filepath)
        DDPStrategy.save_checkpoint(self, checkpoint, filepath, **how)
        # Without optimisers it is not made to be resumed.
        if self.link is not None and "optimizer_states" in checkpoint:
            save_files(self.link, folder)

    def remove_checkpoint(self, filepath: Any) -> None:
        DDPStrategy.remove_checkpoint(self, filepath)
        if self.local_rank == 0:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def teardown(self) -> None:
        _leave(self.link)
        DDPStrategy.teardown(self)


def _scaler(precision: Any) -> torch.amp.GradScaler | None:
    """That of mixed precision with 16 bits; other kinds have none."""
    scaler: torch.amp.GradScaler | None = getattr(precision, "scaler", None)
    return scaler


def _tell_epoch(link: Link | None, trainer: Trainer, batch_idx: int) -> None:
    """Tells of the epoch before, at a batch: at its end the next learning rate is not set yet."""
    if batch_idx == 0 and trainer.current_epoch > 0 and link is not None:
        link.epoch_ended(trainer.optimizers[0].param_groups[0]["lr"])


def _leave(link: Link | None) -> None:
    """Ends a link whose model is gone; what it remembers can still be saved."""
    if link is not None and link._is_attached():
        link._leave()


def _beside(checkpoint: Any) -> Path:
    """The folder of a checkpoint's rank files; not one that might be taken for a checkpoint."""
    if "://" in str(checkpoint):
        raise ConfigError(
            f"GradwireStrategy: rank files need a folder on disk, got {checkpoint}; GradwireCallback "
            "puts them into the checkpoint"
        )
    path = Path(checkpoint)
    return path.parent / FOLDER / path.name
