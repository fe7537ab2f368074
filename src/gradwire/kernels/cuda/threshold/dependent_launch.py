"""Programmatic dependent launch: overlap of consecutive kernels, from compute capability 9.0 on.

A small kernel takes about as long to launch as to run. Each kernel of a chain lets the next one
start at once, and waits until the results of the one before it are visible.
"""

from dataclasses import fields
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions

OLDEST = (9, 0)


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """Lets the next kernel begin, and waits for the one before; what comes first in a kernel."""
    if EARLY:
        _control("griddepcontrol.launch_dependents; // $0")
        _control("griddepcontrol.wait; // $0")


@triton.jit
def _control(ORDER: tl.constexpr):
    tl.inline_asm_elementwise(ORDER, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def follows(x: Tensor) -> dict[str, bool]:
    """Options of a kernel that follows another one of a chain, all of which call `in_turn`."""
    can = _can(x.device)
    return {"EARLY": can, "launch_pdl": can} if can else {"EARLY": can}


def leads(x: Tensor) -> dict[str, bool]:
    """Options of the first of a chain: what comes before it is not known to wait."""
    return {"EARLY": _can(x.device)}


@cache
def _can(device: torch.device) -> bool:
    """Whether the card does this, and Triton knows how to ask for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    return any(field.name == "launch_pdl" for field in fields(CUDAOptions))
