"""Signs, one bit each, with the mean magnitude (the meaning: kernels/reference/sign.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.kernels.cpu.jit import compiled


@compiled
def _pack(x: NDArray[np.float32], out: NDArray[np.uint8]) -> float:
    total = 0.0
    for byte in range(x.size // 8):
        value = np.uint8(0)
        part = np.float32(0)
        for bit in range(8):
            entry = x[byte * 8 + bit]
            value |= np.uint8(np.uint8(entry < 0) << np.uint8(bit))
            part += abs(entry)
        out[byte] = value
        total += part
    if x.size % 8:
        value = np.uint8(0)
        for i in range(x.size // 8 * 8, x.size):
            value |= np.uint8(np.uint8(x[i] < 0) << np.uint8(i & 7))
            total += abs(x[i])
        out[x.size // 8] = value
    return total


@compiled
def _add(
    out: NDArray[np.float32],
    bits: NDArray[np.uint8],
    scales: NDArray[np.float32],
    signs: NDArray[np.float32],
) -> None:
    # A block of the output stays in the cache while all messages are added to it, and a whole byte
    # of signs is looked up at once.
    whole, block = out.size // 8, 8192
    table = np.empty((256, 8), dtype=np.float32)
    for start in range(0, whole, block):
        for row in range(bits.shape[0]):
            for code in range(256):
                for bit in range(8):
                    table[code, bit] = signs[code, bit] * scales[row]
            for byte in range(start, min(whole, start + block)):
                code = bits[row, byte]
                for bit in range(8):
                    out[byte * 8 + bit] += table[code, bit]
    for row in range(bits.shape[0]):
        for i in range(whole * 8, out.size):
            out[i] += signs[bits[row, whole], i & 7] * scales[row]


@compiled
def _add_up(
    x: NDArray[np.float32],
    residual: NDArray[np.float32],
    decay: np.float32,
    left: NDArray[np.float32],
    out: NDArray[np.uint8],
) -> float:
    sum_ = 0.0
    whole = x.size // 8
    for byte in range(whole):
        value = np.uint8(0)
        part = np.float32(0)
        for bit in range(8):
            i = byte * 8 + bit
            total = x[i] + decay * residual[i]
            left[i] = total
            value |= np.uint8(np.uint8(total < 0) << np.uint8(bit))
            part += abs(total)
        out[byte] = value
        sum_ += part
    for i in range(whole * 8, x.size):
        left[i] = x[i] + decay * residual[i]
        sum_ += abs(left[i])
        if i % 8 == 0:
            out[whole] = 0
        out[whole] |= np.uint8(np.uint8(left[i] < 0) << np.uint8(i & 7))
    return sum_


# The eight signs that a byte says, least significant bit first.
_SIGNS = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.float32)


def sign_pack(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
    total = _pack(x.numpy(), out.numpy())
    return out, torch.tensor([total / max(1, x.numel())], dtype=torch.float32)


def sign_pack_sum(x: Tensor, residual: Tensor, decay: float, left: Tensor) -> tuple[Tensor, Tensor]:
    bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
    sum_ = _add_up(x.numpy(), residual.numpy(), np.float32(decay), left.numpy(), bits.numpy())
    scale = torch.tensor([sum_ / max(1, x.numel())], dtype=torch.float32)
    sign_add(left, bits.unsqueeze(0), -scale)
    return bits, scale


def sign_add(out: Tensor, bits: Tensor, scales: Tensor) -> None:
    _add(out.numpy(), bits.numpy(), scales.numpy(), _SIGNS)
