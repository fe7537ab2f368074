"""Hugging Face Trainer: a callback that compresses once the model is wrapped in DDP or FSDP2."""

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from gradwire.checks import check_flag
from gradwire.comm.consistency import digests
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
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtra(
        "gradwire.integrations.transformers", "transformers", "transformers"
    ) from error


class GradwireCallback(TrainerCallback):
    """Compresses a Trainer's gradients.

    Use `trainer.add_callback(GradwireCallback(trainer, "efsign"))`; it needs the trainer since no
    event passes the wrapped model. Options are those of `gradwire.attach`, whose result is `link`;
    or of `gradwire.attach_fsdp`, such as `weights="int8"`, where the trainer shards its model by
    FSDP2. Every checkpoint gets one file per rank. A resumed run loads those of the folder in
    `output_dir` that has the resumed step, or of `resume_from`. With `missing_ok` a checkpoint
    without such files is a new start. With `log_metrics` `link.metrics("gradwire/")` is logged
    after each of the Trainer's own logs, to the same places.
    """

    def __init__(
        self,
        trainer: Trainer,
        compressor: MethodSpec | Settings,
        *,
        resume_from: Path | str | None = None,
        missing_ok: bool = False,
        log_metrics: bool = False,
        **options: Any,
    ) -> None:
        check_version("transformers")
        check_flag("GradwireCallback", "log_metrics", log_metrics)
        self._log_metrics = log_metrics
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"GradwireCallback: expected a Trainer, got {type(trainer).__name__}")
        self._trainer = trainer
        self._request = attach_request("GradwireCallback", compressor, options)
        self._resume_from = resume_from
        self._missing_ok = missing_ok
        self.link: Link | Shards | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_hyper_param_search:
            raise ConfigError("GradwireCallback: a hyperparameter search is not supported")
        self._release()
        trainer = self._trainer
        self.link = self._request.attach_any(trainer.model_wrapped, trainer.accelerator.scaler)
        if state.global_step > 0:
            folder = Path(self._resume_from or _checkpoint(args, state)) / FOLDER
            # The trainer does not reveal where it resumed from, so the folder may be another run's.
            load_rank_file(self.link, folder, _fingerprint(self.link), missing_ok=self._missing_ok)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # The epoch is fractional if a run was resumed in the middle of one.
        if self.link is not None and state.epoch and float(state.epoch).is_integer():
            self.link.epoch_ended(given["optimizer"].param_groups[0]["lr"])

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # The Trainer logs the loss of training steps; our own log passes here once more.
        if self._log_metrics and self.link is not None and "loss" in (given.get("logs") or {}):
            self._trainer.log(self.link.metrics("gradwire/"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.link is not None and not args.save_only_model:
            save_rank_file(self.link, _checkpoint(args, state) / FOLDER, _fingerprint(self.link))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._release()

    def _release(self) -> None:
        if self.link is not None and self.link._is_attached():
            self.link._release()


def _checkpoint(args: Any, state: Any) -> Path:
    """Returns the folder in which the trainer saves at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _fingerprint(link: Handle) -> list[int]:
    """Returns digests of the parameters, or of this rank's shards, which identify a checkpoint."""
    own = {name: _local(parameter) for parameter, name in link._parameters.items()}
    found: list[int] = digests(own).tolist()
    return found


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
