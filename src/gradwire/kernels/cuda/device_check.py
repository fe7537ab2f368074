"""Checks that Triton can compile for a device, and has a writable cache for compiled kernels."""

import logging
from hashlib import sha256
from pathlib import Path

import torch
import triton
from triton.runtime.cache import get_cache_manager

from gradwire.errors import ConfigError

OLDEST = (7, 0)
INSTEAD = "or call gradwire.kernels.use('reference')"

log = logging.getLogger("gradwire.kernels")


def open_for(device: torch.device) -> None:
    """Raises ConfigError if Triton cannot compile for this card, or cannot keep what it compiles.

    The first time on a machine the log says that compiling takes its time: as a warning, since
    that is what users see without setting up a log.
    """
    has = torch.cuda.get_device_capability(device)
    if has < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"kernels: Triton needs compute capability {OLDEST[0]}.{OLDEST[1]}, but {device} "
            f"({name}) has {has[0]}.{has[1]}: take another card, {INSTEAD}"
        )
    if _is_new(has):
        log.warning("gradwire: compiling kernels for this GPU on first use, about a second each")


def _is_new(capability: tuple[int, int]) -> bool:
    """Whether nothing of ours is in Triton's cache yet; leaves a note there that it was.

    What is there of other kernels, another Triton or for another card does not count.
    """
    made_of = sha256(f"gradwire kernels {triton.__version__} {capability}".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        made_of.update(file.read_bytes())
    try:
        notes = get_cache_manager(made_of.hexdigest())
        if notes.get_file("gradwire.txt") is not None:
            return False
        notes.put("compiled here before\n", "gradwire.txt", binary=False)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            "kernels: Triton has no folder to keep compiled kernels in: set TRITON_CACHE_DIR to "
            f"one that can be written, {INSTEAD} ({error})"
        ) from error
    return True
