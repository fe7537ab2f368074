"""Small unsigned numbers, packed: value i takes bits i*width .. (i+1)*width of the byte stream."""

import torch
from torch import Tensor


def pack_bits(values: Tensor, width: int) -> Tensor:
    """Integers below 2^width as uint8; within a byte the first value has the lowest bits."""
    if width == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    # Eight values fill `width` whole bytes, so groups of eight are independent.
    groups = -(-values.numel() // 8)
    filled = torch.zeros(groups * 8, dtype=torch.int64, device=values.device)
    filled[: values.numel()] = values
    bits = (filled.view(-1, 1) >> torch.arange(width, device=values.device)) & 1
    weights = 1 << torch.arange(8, device=values.device)
    packed = (bits.view(groups * width, 8) * weights).sum(-1).to(torch.uint8)
    return packed[: -(-values.numel() * width // 8)]


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """The first `count` values again, as int64."""
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    groups = -(-count // 8)
    filled = packed.new_zeros(groups * width)
    filled[: packed.numel()] = packed[: groups * width]
    bits = (filled.long().view(-1, 1) >> torch.arange(8, device=packed.device)) & 1
    weights = 1 << torch.arange(width, device=packed.device)
    return (bits.view(groups * 8, width) * weights).sum(-1)[:count]
