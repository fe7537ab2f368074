"""Validation of kernel arguments, before anything is written.

Kernels write through raw pointers, so a tensor of the wrong dtype, device, shape or layout would
corrupt memory. The checks take a few microseconds, once per gradient and not once per kernel.
"""

from typing import NoReturn

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.types import EFInput


def check_ef_input(ef: EFInput) -> None:
    """Raises ConfigError unless all tensors are flat float32 on one device, without overlap.

    `residual_out` may be the residual itself, but otherwise shares no memory with the inputs.
    """
    grad, residual, residual_out, _ = ef
    device, numel = grad.device, grad.numel()
    for name, tensor in zip(ef._fields[:3], ef[:3], strict=True):
        if tensor is not None and not (
            tensor.dtype == torch.float32
            and tensor.device == device
            and tensor.dim() == 1
            and tensor.is_contiguous()
            and tensor.numel() == numel
        ):
            _reject(name, tensor, grad)
    if residual_out is None:
        return
    start, nbytes = residual_out.data_ptr(), residual_out.nbytes
    # All have the same length, so two of them overlap if they begin less than that apart.
    if abs(start - grad.data_ptr()) < nbytes:
        raise ConfigError(
            "kernels: residual_out must not share memory with grad, which is still to be read"
        )
    if residual is not None and 0 < abs(start - residual.data_ptr()) < nbytes:
        raise ConfigError(
            "kernels: residual_out must be the residual itself or share no memory with it"
        )


def _reject(name: str, tensor: Tensor, grad: Tensor) -> NoReturn:
    """Raises ConfigError with the reason why `check_ef_input` refuses a tensor."""
    if tensor.dtype != torch.float32:
        raise ConfigError(f"kernels: {name} must be float32, got {tensor.dtype}")
    if tensor.device != grad.device:
        raise ConfigError(f"kernels: {name} must be on {grad.device} as grad, got {tensor.device}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        form = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ConfigError(f"kernels: {name} must be flat and contiguous, got {form}")
    raise ConfigError(
        f"kernels: {name} must have {grad.numel()} elements as grad has, got {tensor.numel()}"
    )


def check_floating(x: Tensor) -> None:
    """Raises ConfigError unless `x` is a dense tensor of floating-point numbers."""
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
    """Raises ConfigError unless `out`, to which messages are added, is contiguous float32."""
    if out.dtype != torch.float32:
        raise ConfigError(f"kernels: out must be float32, got {out.dtype}")
    if not out.is_contiguous():
        form = f"shape {tuple(out.shape)} with strides {out.stride()}"
        raise ConfigError(f"kernels: out must be contiguous, got {form}")
