"""Tensors of more than 2^31 entries are compressed correctly up to the far end."""

import pytest
import torch

from gradwire.base import MultiRound, OneRound, encode_with_feedback
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(180),
]

INT32_RANGE = 1 << 31
NUMEL = INT32_RANGE + (1 << 28) + 4097
EVERY = 65_537
DEVICE = "cuda"
SPECS = [
    "none",
    "fp16",
    "efsign",
    "onebit",
    "natural",
    "qsgd:bits=4",
    "threshold:value=0.5",
    "redsync:ratio=0.00001",
    "sidco:ratio=0.00001",
    # The count must cover all large entries: of equal entries the first are selected.
    "dgc:ratio=0.00002",
    "topk:ratio=0.00002",
    "randomk:ratio=0.001",
    "grbs:ratio=0.001",
]


def peaks(numel: int) -> torch.Tensor:
    """Returns small entries of one size, and large ones at equal distances up to the end."""
    x = torch.full((numel,), 2.0**-10, device=DEVICE)
    x[::EVERY] = 1.0
    return x


@pytest.mark.parametrize("spec", SPECS)
def test_message_and_residual_add_up_to_the_input(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((NUMEL,), step=1)
    assert isinstance(codec, OneRound)
    x = peaks(NUMEL)
    residual_out = torch.zeros_like(x)
    message = encode_with_feedback(codec, EFInput(x, residual_out, residual_out), ctx)
    decoded = torch.zeros_like(x)
    codec.decode_add(decoded, [message], 1.0, ctx)
    assert decoded[:INT32_RANGE].any()
    assert decoded[INT32_RANGE:].any()
    # In place: each of these takes ten gigabytes.
    assert float(decoded.add_(residual_out).sub_(x).abs_().max()) < 1e-5


@pytest.mark.parametrize("spec", ["signsgd", "terngrad"])
def test_signs_and_trits_are_at_their_positions(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((NUMEL,), step=1)
    assert isinstance(codec, OneRound)
    # Without the small entries, whose trits are random.
    x = peaks(NUMEL).sub_(2.0**-10).sign_()
    if spec == "signsgd":
        x.mul_(2).sub_(1)
    decoded = torch.zeros_like(x)
    codec.decode_add(decoded, [encode_with_feedback(codec, EFInput(x), ctx)], 1.0, ctx)
    assert torch.equal(decoded, x)


def test_low_rank_factors_of_a_huge_matrix() -> None:
    """A matrix of rank one is encoded exactly, up to rounding."""
    rows = 1 << 16
    ctx = EncodeContext((rows, NUMEL // rows))
    codec = parse("powersgd:rank=1")
    assert isinstance(codec, MultiRound)
    x = torch.ones(ctx.numel, device=DEVICE)
    residual_out = torch.zeros_like(x)
    rounds = codec.rounds(EFInput(x, residual_out, residual_out), codec.state(ctx, x.device), ctx)
    request = next(rounds)
    mean = None
    while mean is None:
        try:
            request = rounds.send([request.parts])
        except StopIteration as end:
            mean = end.value
    assert float(residual_out.abs_().max()) < 1e-2
    assert float(mean.sub_(1).abs_().max()) < 1e-2
