"""How kernels of many small steps are launched: Triton looks a kernel up once, not every time.

Triton finds out anew at each launch which of its compiled variants the arguments ask for, which
takes longer than a small kernel runs. What it decides by is little, and is the key here.
"""

from typing import Any

import torch
from torch import Tensor

_found: dict[tuple[object, ...], Any] = {}


def _kind(argument: object) -> object:
    """All that a compiled variant may depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return type(argument)


def launch(kernel: Any, programs: int, *args: Tensor | float, **constants: object) -> None:
    """Runs `programs` programs of a kernel, whose compile-time constants come last."""
    if not args[0].is_cuda:  # type: ignore[union-attr]
        # Triton's interpreter, in tests.
        kernel[(programs,)](*args, **constants)
        return
    device = torch.cuda.current_device()
    key = (id(kernel), device, *map(_kind, args), *constants.items())
    ready = _found.get(key)
    if ready is None:
        compiled = kernel[(programs,)](*args, **constants)
        names = kernel.arg_names[len(args) :]
        _found[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, rest = ready
    compiled[(programs, 1, 1)](*args, *rest)
