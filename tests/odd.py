"""Special numbers as inputs of kernels, and exact comparisons."""

import torch
from torch import Tensor


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def odd_numbers(numel: int) -> dict[str, Tensor]:
    """Returns inputs with ties, zeros of both signs, NaN, infinities, one bin, and denormals."""
    place = torch.arange(numel)
    plain = normal(numel)
    return {
        "normal": plain,
        "ties": (place * 37 % 5 - 2).float(),
        "equal": torch.full((numel,), -1.5),
        "zeros": torch.where(place % 2 == 0, 0.0, -0.0),
        "mostly zeros": torch.where(place % 50 == 3, plain, 0.0),
        "nan": torch.where(place % 7 == 3, torch.nan, plain),
        "inf": torch.where(
            place % 7 == 3, torch.inf, torch.where(place % 7 == 5, -torch.inf, plain)
        ),
        "one bin": 1 + (place * 7919 % 1009).float() * 2.0**-23,
        "tiny": plain * 1e-41,
        "huge": plain.sign() * 3e38,
    }


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Compares bit for bit, so that NaN equals itself and -0.0 is not 0.0."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(*(t.contiguous().view(-1, 1).view(torch.uint8) for t in (one, two)))


def same_numbers(one: Tensor, two: Tensor) -> bool:
    """Compares numbers; any NaN equals any other."""
    return torch.equal(one.nan_to_num(nan=7.0), two.nan_to_num(nan=7.0))


def apart(one: Tensor, two: Tensor) -> int:
    """Returns the distance of two numbers in units of the last place."""
    return abs(int(one.view(torch.int32)) - int(two.view(torch.int32)))


def crowd_at_four_fifths() -> Tensor:
    """Returns 4097 numbers: 100 are 1, and 240 differ from 0.8 in their last bits at most."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4097, generator=generator) / 1000
    place = torch.randperm(4097, generator=generator)
    x[place[:100]] = 1.0
    offsets = torch.randint(-10, 100, (240,), generator=generator, dtype=torch.int32)
    x[place[100:340]] = (torch.tensor(0.8).view(torch.int32) + offsets).view(torch.float32)
    return x
