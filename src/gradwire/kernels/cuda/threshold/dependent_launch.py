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

MIN_CAPABILITY = (9, 0)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Lets the next kernel start, then waits for the previous one; comes first in a kernel."""
    if PDL:
        _control("griddepcontrol.launch_dependents; // $0")
        _control("griddepcontrol.wait; // $0")


@triton.jit
def _control(INSTRUCTION: tl.constexpr):
    tl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def dependent_options(x: Tensor) -> dict[str, bool]:
    """Returns the options of a kernel that follows one which calls `wait_for_previous`."""
    supported = _supports_pdl(x.device)
    return {"PDL": supported, "launch_pdl": supported} if supported else {"PDL": supported}


def first_options(x: Tensor) -> dict[str, bool]:
    """Returns the options of the first kernel of a chain, which must not start early."""
    return {"PDL": _supports_pdl(x.device)}


@cache
def _supports_pdl(device: torch.device) -> bool:
    """Returns whether the GPU supports it, and Triton has the option."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return False
    return any(field.name == "launch_pdl" for field in fields(CUDAOptions))
