"""Accelerate: saves and loads the state of every rank with the accelerator's own checkpoints.

`gradwire.attach(accelerator.prepare(model), ...)` compresses. Accelerate's own way to save an
object would load the state of rank 0 on all ranks.
"""

from pathlib import Path
from typing import Any
from weakref import WeakSet

from gradwire.errors import ConfigError, MissingExtra
from gradwire.integrations.handle import Handle
from gradwire.integrations.trainers import FOLDER, check_version, load_files, save_files

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise MissingExtra("gradwire.integrations.accelerate", "accelerate", "accelerate") from error

_keepers: WeakSet[Accelerator] = WeakSet()


def keep_state(accelerator: Accelerator, *handles: Handle, missing_ok: bool = False) -> None:
    """Lets `save_state` and `load_state` of an accelerator keep the handles' states, rank by rank.

    Called once, with all links, reducers or shards, in the same order when the run is resumed. One
    that is detached by then is left out. With `missing_ok` a checkpoint without any state of ours
    is a new start; otherwise that is a ConfigError.
    """
    check_version("accelerate")
    _check(accelerator, handles)

    def attached(folder: str) -> list[tuple[Handle, Path]]:
        own = Path(folder) / FOLDER
        numbered = [(handle, own / str(i)) for i, handle in enumerate(handles)]
        return [pair for pair in numbered if pair[0]._is_attached()]

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        for handle, folder in attached(output_dir):
            save_files(handle, folder)

    def load(models: list[Any], input_dir: str) -> None:
        for handle, folder in attached(input_dir):
            load_files(handle, folder, missing_ok=missing_ok)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    _keepers.add(accelerator)


def _check(accelerator: Accelerator, handles: tuple[Handle, ...]) -> None:
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"keep_state: expected an Accelerator, got {type(accelerator).__name__}")
    strange = [type(handle).__name__ for handle in handles if not isinstance(handle, Handle)]
    if strange or not handles:
        raise ConfigError(f"keep_state: expected what gradwire.attach returns, got {strange}")
    if accelerator in _keepers:
        raise ConfigError("keep_state: this accelerator keeps states already; name all at once")
