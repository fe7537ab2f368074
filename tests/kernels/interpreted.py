"""Compares the Triton kernels, interpreted on the CPU, with the reference."""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from laconic.kernels import cuda, reference

SIZES = (1, 7, 8, 33, 1000, 1025, 5000)
KEY = 0x123456789ABCDEF


def pair(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    return x, residual


def compare_signs(numel: int) -> None:
    x, residual = pair(numel)
    assert torch.equal(cuda.sign_pack(x)[0], reference.sign_pack(x)[0])
    left, expected = torch.full((2, numel), float("nan"))
    bits, scale = cuda.sign_pack_sum(x, residual, 0.5, left)
    other_bits, other_scale = reference.sign_pack_sum(x, residual, 0.5, expected)
    assert torch.equal(bits, other_bits)
    torch.testing.assert_close(scale, other_scale)
    torch.testing.assert_close(left, expected)
    rows, scales = torch.stack([bits, reference.sign_pack(x)[0]]), torch.tensor([0.5, -0.25])
    out, other = x.clone(), x.clone()
    cuda.sign_add(out, rows, scales)
    reference.sign_add(other, rows, scales)
    torch.testing.assert_close(out, other)


def compare_rounding(numel: int, width: int, bucket: int) -> None:
    x, residual = pair(numel)
    codes, scales = cuda.round_pack(x, width, bucket, False, KEY)
    other_codes, other_scales = reference.round_pack(x, width, bucket, False, KEY)
    assert torch.equal(codes, other_codes)
    assert torch.equal(scales, other_scales)
    l2_scales = cuda.round_pack(x, width, bucket, True, KEY)[1]
    torch.testing.assert_close(l2_scales, reference.round_pack(x, width, bucket, True, KEY)[1])
    left, expected = torch.full((2, numel), float("nan"))
    cuda.round_pack_sum(x, residual, 1.0, left, width, bucket, False, KEY)
    reference.round_pack_sum(x, residual, 1.0, expected, width, bucket, False, KEY)
    torch.testing.assert_close(left, expected)
    said = torch.stack([codes] * 3), torch.stack([scales] * 3)
    out, other = x.clone(), x.clone()
    cuda.round_add(out, *said, width, bucket)
    reference.round_add(other, *said, width, bucket)
    torch.testing.assert_close(out, other)


if __name__ == "__main__":
    done = {"signs": 0, "roundings": 0}
    for size in SIZES:
        compare_signs(size)
        done["signs"] += 1
        for width in (2, 3, 4, 8):
            for bucket in (128, 30, 7, 512):
                compare_rounding(size, width, bucket)
                done["roundings"] += 1
    print(json.dumps(done))
