"""Hugging Face Trainer: a callback that compresses gradients once the model is wrapped in DDP."""

from pathlib import Path
from typing import Any

from gradwire.base import Compressor
from gradwire.comm.consistency import digests
from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.ddp import Link
from gradwire.integrations.trainers import FOLDER, ask, check_version, load_files, save_files

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtra(
        "gradwire.integrations.transformers", "transformers", "transformers"
    ) from error


class GradwireCallback(TrainerCallback):
    """Compresses what a Trainer trains: `trainer.add_callback(GradwireCallback(trainer, "efsign"))`.

    It needs the trainer since no event tells of the wrapped model. Options are those of
    `gradwire.attach`. `link` is what that returned. Every checkpoint gets a file a rank, from which
    a resumed run goes on: those of `resume_from`, if it is not the folder in `output_dir` that has
    the resumed step. With `missing_ok` a checkpoint without such files is a new start.
    """

    def __init__(
        self,
        trainer: Trainer,
        compressor: Compressor | str,
        *,
        resume_from: Path | str | None = None,
        missing_ok: bool = False,
        **options: Any,
    ) -> None:
        check_version("transformers")
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"GradwireCallback: expected a Trainer, got {type(trainer).__name__}")
        self._trainer = trainer
        self._asked = ask("GradwireCallback", compressor, options)
        self._resume_from = resume_from
        self._missing_ok = missing_ok
        self.link: Link | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_hyper_param_search:
            raise ConfigError("GradwireCallback: it does not go with a hyperparameter search")
        self._leave()
        trainer = self._trainer
        self.link = self._asked.attach(trainer.model_wrapped, trainer.accelerator.scaler)
        if state.global_step > 0:
            folder = Path(self._resume_from or _checkpoint(args, state)) / FOLDER
            # The trainer does not say where it resumed from, so that the folder may be another's.
            load_files(self.link, folder, _mark(self.link), missing_ok=self._missing_ok)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # A fraction of an epoch is behind us where a run was resumed in the midst of one.
        if self.link is not None and state.epoch and float(state.epoch).is_integer():
            self.link.epoch_ended(given["optimizer"].param_groups[0]["lr"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.link is not None and not args.save_only_model:
            save_files(self.link, _checkpoint(args, state) / FOLDER, _mark(self.link))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.link is not None and self.link._is_attached():
            self.link._leave()


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder in which the trainer saves at this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _mark(link: Link) -> list[int]:
    """By which a checkpoint is known again: what its parameters are."""
    found: list[int] = digests(link._lanes.tensors).tolist()
    return found
