"""Tensors of more than 2^31 entries through whole methods: nothing is lost at the far end."""

import pytest
import torch

from gradwire.base import MultiRound, OneRound, encode_with_feedback
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.timeout(180),
]

FAR = 1 << 31
NUMEL = FAR + (1 << 28) + 4097
EVERY = 65_537
DEVICE = "cuda"
KEPT = [
    "none",
    "fp16",
    "efsign",
    "onebit",
    "natural",
    "qsgd:bits=4",
    "threshold:value=0.5",
    "redsync:ratio=0.00001",
    "sidco:ratio=0.00001",
    # Who counts needs room for all the large ones: of equal entries the first are chosen.
    "dgc:ratio=0.00002",
    "topk:ratio=0.00002",
    "randomk:ratio=0.001",
    "grbs:ratio=0.001",
]


def peaks(numel: int) -> torch.Tensor:
    """Small entries of one size, and large ones at equal distances up to the end."""
    x = torch.full((numel,), 2.0**-10, device=DEVICE)
    x[::EVERY] = 1.0
    return x


@pytest.mark.parametrize("spec", KEPT)
def test_what_is_said_and_what_is_left_is_what_there_was(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((NUMEL,), step=1)
    assert isinstance(codec, OneRound)
    x = peaks(NUMEL)
    residual_out = torch.zeros_like(x)
    message = encode_with_feedback(codec, EFInput(x, residual_out, residual_out), ctx)
    said = torch.zeros_like(x)
    codec.decode_add(said, [message], 1.0, ctx)
    assert said[:FAR].any()
    assert said[FAR:].any()
    # In place: each of these takes ten gigabytes.
    assert float(said.add_(residual_out).sub_(x).abs_().max()) < 1e-5


@pytest.mark.parametrize("spec", ["signsgd", "terngrad"])
def test_signs_and_trits_are_those_of_their_places(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((NUMEL,), step=1)
    assert isinstance(codec, OneRound)
    # Without the small ones, which are drawn by chance.
    x = peaks(NUMEL).sub_(2.0**-10).sign_()
    if spec == "signsgd":
        x.mul_(2).sub_(1)
    said = torch.zeros_like(x)
    codec.decode_add(said, [encode_with_feedback(codec, EFInput(x), ctx)], 1.0, ctx)
    assert torch.equal(said, x)


def test_thin_factors_of_a_huge_matrix() -> None:
    """A matrix of rank one is told exactly, up to rounding."""
    rows = 1 << 16
    ctx = EncodeContext((rows, NUMEL // rows))
    codec = parse("powersgd:rank=1")
    assert isinstance(codec, MultiRound)
    x = torch.ones(ctx.numel, device=DEVICE)
    residual_out = torch.zeros_like(x)
    talk = codec.rounds(EFInput(x, residual_out, residual_out), codec.state(ctx, x.device), ctx)
    request = next(talk)
    mean = None
    while mean is None:
        try:
            request = talk.send([request.parts])
        except StopIteration as end:
            mean = end.value
    assert float(residual_out.abs_().max()) < 1e-2
    assert float(mean.sub_(1).abs_().max()) < 1e-2
