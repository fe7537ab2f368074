"""Compares the kernels of dense quantizers of one backend with the reference, on any device.

Codes, residuals and decoded sums must be bitwise equal; only means over many entries are compared
with a tolerance. Outputs hold NaN before.
"""

from types import ModuleType

import torch
from torch import Tensor

from gradwire.kernels import reference
from gradwire.kernels.specs import RoundingSpec
from odd import normal, same_bits

KEY = 0x9E3779B97F4A7C15

ROUNDINGS = [
    RoundingSpec("stochastic", 128, 4),
    RoundingSpec("stochastic", 77, 3),
    RoundingSpec("stochastic", 100, 8),
    RoundingSpec("stochastic", 64, 2, scale_divisor=8.5),
    RoundingSpec("nearest", 128, 4),
    RoundingSpec("nearest", 33, 4, "max16"),
    RoundingSpec("e4m3", 1024),
    RoundingSpec("e5m2", 128),
    RoundingSpec("tree", 1024),
    RoundingSpec("tree", 7),
    RoundingSpec("power", 1024),
    RoundingSpec("power", 30),
]


def odd_numbers(numel: int) -> dict[str, Tensor]:
    """Returns inputs with ties, zeros of both signs, NaN, infinities, and the ends of the range."""
    place = torch.arange(numel)
    plain = normal(numel)
    return {
        "normal": plain,
        "wide": plain * torch.exp(20 * normal(numel, 1)),
        "ties": (place * 37 % 5 - 2).float(),
        "zeros": torch.where(place % 2 == 0, 0.0, -0.0),
        "nan": torch.where(place % 301 == 3, torch.nan, plain),
        "inf": torch.where(
            place % 301 == 3, torch.inf, torch.where(place % 401 == 5, -torch.inf, plain)
        ),
        "tiny": plain * 1e-41,
        "small": plain * 1e-25,
        "huge": plain.sign() * 3e38,
    }


def beside(x: Tensor) -> Tensor:
    """Returns a residual of about the magnitude of `x`."""
    sizes = x.abs().nan_to_num(0.0, 0.0, 0.0)
    return normal(x.numel(), 2) * (float(sizes.max()) / 8 if x.numel() else 1.0)


def same(ours: Tensor, expected: Tensor) -> None:
    """Asserts equality, up to the payload of NaN and the sign of zero."""
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def close(ours: Tensor, expected: Tensor, size: float = 0.0) -> None:
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


def nothing(x: Tensor, device: str) -> Tensor:
    return torch.full_like(x, torch.nan).to(device)


def check_rounding(
    backend: ModuleType, x: Tensor, spec: RoundingSpec, decay: float = 0.9, device: str = "cpu"
) -> None:
    expected = reference.round_pack(x, spec, KEY)
    ours = backend.round_pack(x.to(device), spec, KEY)
    for one, two in zip(ours, expected, strict=True):
        same(one, two)
    residual, residual_out, other = beside(x), nothing(x, device), nothing(x, "cpu")
    ours = backend.round_pack_sum(x.to(device), residual.to(device), decay, residual_out, spec, KEY)
    expected_sum = reference.round_pack_sum(x, residual, decay, other, spec, KEY)
    for one, two in zip((*ours, residual_out), (*expected_sum, other), strict=True):
        same(one, two)
    rows = [torch.stack([a, b, a]) for a, b in zip(expected, expected_sum, strict=True)]
    out, other = residual.to(device, copy=True), residual.clone()
    backend.round_add(out, *(row.to(device) for row in rows), 1 / 3, spec)
    reference.round_add(other, *rows, 1 / 3, spec)
    same(out, other)


def check_signs(backend: ModuleType, x: Tensor, decay: float = 0.9, device: str = "cpu") -> None:
    expected, ours = reference.sign_pack(x), backend.sign_pack(x.to(device))
    same(ours[0], expected[0])
    close(ours[1], expected[1])
    residual, residual_out, other = beside(x), nothing(x, device), nothing(x, "cpu")
    ours = backend.sign_pack_sum(x.to(device), residual.to(device), decay, residual_out)
    expected = reference.sign_pack_sum(x, residual, decay, other)
    same(ours[0], expected[0])
    close(ours[1], expected[1])
    close(residual_out, other, float(expected[1].nan_to_num(0.0)))
    rows = [torch.stack([part] * 3) for part in expected]
    out, other = residual.to(device, copy=True), residual.clone()
    backend.sign_add(out, *(row.to(device) for row in rows), 1 / 3)
    reference.sign_add(other, *rows, 1 / 3)
    same(out, other)


def check_two_means(
    backend: ModuleType, x: Tensor, bucket: int, decay: float = 0.9, device: str = "cpu"
) -> None:
    expected, ours = (
        reference.sign_means_pack(x, bucket),
        backend.sign_means_pack(x.to(device), bucket),
    )
    same(ours[0], expected[0])
    for one, two in zip(ours[1:], expected[1:], strict=True):
        close(one, two)
    residual, residual_out, other = beside(x), nothing(x, device), nothing(x, "cpu")
    ours = backend.sign_means_pack_sum(
        x.to(device), residual.to(device), decay, residual_out, bucket
    )
    expected = reference.sign_means_pack_sum(x, residual, decay, other, bucket)
    same(ours[0], expected[0])
    close(residual_out, other, float(residual.abs().max()) if x.numel() else 0.0)
    rows = [torch.stack([part] * 3) for part in expected]
    out, other = residual.to(device, copy=True), residual.clone()
    backend.sign_means_add(out, *(row.to(device) for row in rows), 1 / 3, bucket)
    reference.sign_means_add(other, *rows, 1 / 3, bucket)
    same(out, other)


def check_uniform(backend: ModuleType, count: int, key: int, device: str = "cpu") -> None:
    ours = backend.uniform(key, count, torch.device(device))
    assert ours.dtype == torch.float32
    assert same_bits(ours.cpu(), reference.uniform(key, count, torch.device("cpu")))


def check_votes(backend: ModuleType, x: Tensor, device: str = "cpu") -> None:
    ours, expected = backend.sign_votes_pack(x.to(device), KEY), reference.sign_votes_pack(x, KEY)
    for one, two in zip(ours, expected, strict=True):
        same(one, two)


def check_trits(backend: ModuleType, x: Tensor, clip: float, device: str = "cpu") -> None:
    ours, expected = backend.trits_pack(x.to(device), clip, KEY), reference.trits_pack(x, clip, KEY)
    close(ours[1], expected[1])
    # A root mean square may differ in its last bit, and so may a random decision near it.
    differ = (ours[0].cpu() != expected[0]).sum()
    assert differ <= (1 + x.numel() // 100_000 if clip else 0)
    rows = [torch.stack([part] * 3) for part in expected]
    out, other = beside(x).to(device), beside(x)
    backend.trits_add(out, *(row.to(device) for row in rows), 1 / 3)
    reference.trits_add(other, *rows, 1 / 3)
    same(out, other)
