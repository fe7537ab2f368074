"""Validation of kernel arguments, before anything is written.

Kernels write through raw pointers, so a tensor of the wrong dtype, device, shape or layout would
corrupt memory. The checks take a few microseconds, once per gradient and not once per kernel.
"""

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.types import EFInput


def check_given(ef: EFInput) -> None:
    """Raises ConfigError unless all is flat float32 on one device, and `residual_out` is free to write."""
    x, residual, residual_out = ef.grad, ef.residual, ef.residual_out
    _check("x", x, x)
    if residual is not None:
        _check("residual", residual, x)
    if residual_out is None:
        return
    _check("left", residual_out, x)
    if _overlap(residual_out, x):
        raise ConfigError("kernels: left must not share memory with x, which is still to be read")
    if residual is None or residual_out.data_ptr() == residual.data_ptr():
        return
    if _overlap(residual_out, residual):
        raise ConfigError("kernels: left must be the residual itself or share no memory with it")


def check_floating(x: Tensor) -> None:
    """Raises ConfigError unless all entries are there, and are real numbers with a fraction."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise ConfigError(f"kernels: a tensor is needed, got {kind}: torch.as_tensor makes one")
    if x.layout != torch.strided:
        raise ConfigError(
            f"kernels: a dense tensor is needed, got the layout {x.layout}: call to_dense() first, "
            "or sparse=False of an embedding"
        )
    if not x.is_floating_point():
        raise ConfigError(f"kernels: a floating-point tensor is needed, got {x.dtype}")


def check_out(out: Tensor) -> None:
    """Raises ConfigError unless what messages are added to is float32 without gaps."""
    if out.dtype != torch.float32:
        raise ConfigError(f"kernels: out must be float32, got {out.dtype}")
    if not out.is_contiguous():
        form = f"shape {tuple(out.shape)} with strides {out.stride()}"
        raise ConfigError(f"kernels: out must be contiguous, got {form}")


def _check(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise ConfigError(f"kernels: {name} must be float32, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ConfigError(f"kernels: {name} must be on {x.device} as x is, got {tensor.device}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        form = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ConfigError(f"kernels: {name} must be flat and contiguous, got {form}")
    if tensor.numel() != x.numel():
        raise ConfigError(
            f"kernels: {name} must have {x.numel()} elements as x has, got {tensor.numel()}"
        )


def _overlap(one: Tensor, two: Tensor) -> bool:
    a, b = one.data_ptr(), two.data_ptr()
    return a < b + two.nbytes and b < a + one.nbytes
