"""The kernels of the card against the reference on the CPU."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

SIZES = [1, 7, 8, 33, 4097, 1_000_003]


def pair(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    return x, residual


@pytest.mark.parametrize("numel", SIZES)
def test_signs(numel: int) -> None:
    from laconic.kernels import cuda, reference

    x, residual = pair(numel)
    left, expected = torch.full((2, numel), float("nan"))
    card = left.cuda()
    bits, scale = cuda.sign_pack_sum(x.cuda(), residual.cuda(), 0.5, card)
    other_bits, other_scale = reference.sign_pack_sum(x, residual, 0.5, expected)
    assert torch.equal(bits.cpu(), other_bits)
    torch.testing.assert_close(scale.cpu(), other_scale)
    torch.testing.assert_close(card.cpu(), expected)
    out, other_out = torch.zeros(numel).cuda(), torch.zeros(numel)
    rows = torch.stack([bits, cuda.sign_pack(x.cuda())[0]])
    cuda.sign_add(out, rows, torch.tensor([0.5, -0.25]).cuda())
    reference.sign_add(other_out, rows.cpu(), torch.tensor([0.5, -0.25]))
    torch.testing.assert_close(out.cpu(), other_out)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("bucket", [128, 30, 512])
def test_rounding(numel: int, width: int, bucket: int) -> None:
    from laconic.kernels import cuda, reference

    x, residual = pair(numel)
    key = 0x123456789ABCDEF
    codes, scales = cuda.round_pack(x.cuda(), width, bucket, False, key)
    other_codes, other_scales = reference.round_pack(x, width, bucket, False, key)
    assert torch.equal(codes.cpu(), other_codes)
    assert torch.equal(scales.cpu(), other_scales)
    left, expected = torch.full((2, numel), float("nan"))
    card = left.cuda()
    cuda.round_pack_sum(x.cuda(), residual.cuda(), 1.0, card, width, bucket, False, key)
    reference.round_pack_sum(x, residual, 1.0, expected, width, bucket, False, key)
    torch.testing.assert_close(card.cpu(), expected, rtol=1e-5, atol=1e-6)
    out, other_out = torch.zeros(numel).cuda(), torch.zeros(numel)
    cuda.round_add(out, torch.stack([codes] * 3), torch.stack([scales] * 3), width, bucket)
    reference.round_add(
        other_out, torch.stack([other_codes] * 3), torch.stack([other_scales] * 3), width, bucket
    )
    torch.testing.assert_close(out.cpu(), other_out)
