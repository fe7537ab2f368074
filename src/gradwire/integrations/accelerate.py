"""Accelerate: saves and loads the state of every rank with the accelerator's own checkpoints.

`gradwire.attach(accelerator.prepare(model), ...)` compresses. Accelerate's own registration of
objects for checkpoints would load the state of rank 0 on all ranks.
"""

from pathlib import Path
from typing import Any
from weakref import WeakSet

from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.handle import Handle
from gradwire.integrations.trainers import FOLDER, check_version, load_rank_file, save_rank_file

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise MissingExtra("gradwire.integrations.accelerate", "accelerate", "accelerate") from error

_registered: WeakSet[Accelerator] = WeakSet()


def keep_state(accelerator: Accelerator, *handles: Handle, missing_ok: bool = False) -> None:
    """Makes an accelerator's `save_state` and `load_state` include the handles' states, by rank.

    Called once, with all links, reducers or shards, in the same order when the run is resumed. One
    that is detached by then is left out. With `missing_ok` a checkpoint without any state of ours
    is a new start; otherwise it raises ConfigError.
    """
    check_version("accelerate")
    _check(accelerator, handles)

    def attached(folder: str) -> list[tuple[Handle, Path]]:
        own = Path(folder) / FOLDER
        numbered = [(handle, own / str(i)) for i, handle in enumerate(handles)]
        return [pair for pair in numbered if pair[0]._is_attached()]

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        for handle, folder in attached(output_dir):
            save_rank_file(handle, folder)

    def load(models: list[Any], input_dir: str) -> None:
        for handle, folder in attached(input_dir):
            load_rank_file(handle, folder, missing_ok=missing_ok)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    _registered.add(accelerator)


def _check(accelerator: Accelerator, handles: tuple[Handle, ...]) -> None:
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"keep_state: expected an Accelerator, got {type(accelerator).__name__}")
    unknown = [type(handle).__name__ for handle in handles if not isinstance(handle, Handle)]
    if unknown or not handles:
        raise ConfigError(f"keep_state: expected what gradwire.attach returns, got {unknown}")
    if accelerator in _registered:
        raise ConfigError(
            "keep_state: this accelerator keeps states already; pass all handles at once"
        )
