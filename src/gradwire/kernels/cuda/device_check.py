"""Checks that Triton can compile for a device, and has a writable cache for compiled kernels."""

import logging
from hashlib import sha256
from pathlib import Path

import torch
import triton
from triton.runtime.cache import get_cache_manager

from gradwire.errors import ConfigError

MIN_CAPABILITY = (7, 0)
INSTEAD = "or call gradwire.kernels.use('reference')"

log = logging.getLogger("gradwire.kernels")


def check_device(device: torch.device) -> None:
    """Raises ConfigError if Triton cannot compile for this GPU, or has no writable cache.

    Logs on first use on a machine that compiling takes time: as a warning, since that is what users
    see without configuring logging.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"kernels: Triton needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, "
            f"but {device} ({name}) has {capability[0]}.{capability[1]}: use another GPU, {INSTEAD}"
        )
    if _is_new(capability):
        log.warning("gradwire: compiling kernels for this GPU on first use, about a second each")


def _is_new(capability: tuple[int, int]) -> bool:
    """Returns whether Triton's cache holds no kernels of this version yet, and marks it if so.

    Kernels of another version of this package or of Triton, or for another capability, do not
    count.
    """
    digest = sha256(f"gradwire kernels {triton.__version__} {capability}".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    try:
        cache = get_cache_manager(digest.hexdigest())
        if cache.get_file("gradwire.txt") is not None:
            return False
        cache.put("compiled here before\n", "gradwire.txt", binary=False)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            "kernels: Triton has no writable cache for compiled kernels: set TRITON_CACHE_DIR to "
            f"a writable directory, {INSTEAD} ({error})"
        ) from error
    return True
