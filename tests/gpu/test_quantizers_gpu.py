"""The dense quantizers' kernels on the GPU equal the reference on the CPU, and can be captured."""

import pytest
import torch

from gradwire.base import FusedOneRound, OneRound, encode_with_feedback
from gradwire.kernels.specs import RoundingSpec
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.types import EFInput, EncodeContext
from quantizer_checks import (
    KEY,
    ROUNDINGS,
    check_rounding,
    check_signs,
    check_trits,
    check_two_means,
    check_uniform,
    check_votes,
    normal,
    odd_numbers,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.usefixtures("poisoned_memory"),
]

SIZES = [1, 7, 8, 33, 4097, 1_000_003]

each_size = pytest.mark.parametrize("numel", SIZES)
each_kind = pytest.mark.parametrize("kind", odd_numbers(0))
each_rule = pytest.mark.parametrize(
    "rule", [*ROUNDINGS, RoundingSpec("nearest", 20_000, 4)], ids=str
)


@each_size
@each_rule
def test_rounding(numel: int, rule: RoundingSpec) -> None:
    from gradwire.kernels import cuda

    check_rounding(cuda, normal(numel), rule, device="cuda")


@each_kind
@each_rule
def test_rounding_of_odd_numbers(kind: str, rule: RoundingSpec) -> None:
    from gradwire.kernels import cuda

    check_rounding(cuda, odd_numbers(2500)[kind], rule, device="cuda")


@pytest.mark.parametrize("key", [0, KEY, (1 << 64) - 1])
@each_size
def test_uniform(numel: int, key: int) -> None:
    from gradwire.kernels import cuda

    check_uniform(cuda, numel, key, device="cuda")


@each_size
def test_signs_votes_and_trits(numel: int) -> None:
    from gradwire.kernels import cuda

    check_signs(cuda, normal(numel), device="cuda")
    for bucket in (100, 1024, 2_000_000):
        check_two_means(cuda, normal(numel), bucket, device="cuda")
    check_votes(cuda, normal(numel).round(), device="cuda")
    for clip in (0, 2.5):
        check_trits(cuda, normal(numel), clip, device="cuda")


@each_kind
def test_signs_votes_and_trits_of_odd_numbers(kind: str) -> None:
    from gradwire.kernels import cuda

    x = odd_numbers(2500)[kind]
    check_signs(cuda, x, device="cuda")
    for bucket in (100, 5000):
        check_two_means(cuda, x, bucket, device="cuda")
    check_votes(cuda, x, device="cuda")
    for clip in (0, 2.5):
        check_trits(cuda, x, clip, device="cuda")


def fixed(spec: str) -> bool:
    method = parse(spec)
    traits = method.traits()
    return isinstance(method, OneRound) and not traits.variable_length and not traits.syncs_host


SPECS = [
    spec
    for cls in compressor_classes().values()
    for spec in (format_spec(cls(**example)) for example in cls.examples)
    if cls.family == "quantisation" and fixed(spec)
]


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_is_captured_in_a_graph(spec: str) -> None:
    method, ctx = parse(spec), EncodeContext((100, 333), world_size=2)
    assert isinstance(method, OneRound)
    x, residual = normal(33_300).cuda(), normal(33_300, 1).cuda()
    residual_io = residual.clone() if isinstance(method, FusedOneRound) else None
    ef = EFInput(x, residual_io, residual_io)
    # Compiles, and creates tables that stay on the GPU.
    expected = encode_with_feedback(method, ef, ctx)
    residual_out = None if residual_io is None else residual_io.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = encode_with_feedback(method, ef, ctx)
    for _ in range(2):
        if residual_io is not None:
            residual_io.copy_(residual)
        for part in parts:
            part.view(torch.uint8).fill_(255)
        graph.replay()
        for ours, other in zip(parts, expected, strict=True):
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8))
        if residual_io is not None and residual_out is not None:
            assert torch.equal(residual_io, residual_out)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "rule", [RoundingSpec("stochastic", 128, 4), RoundingSpec("tree", 1024)], ids=str
)
def test_more_entries_than_32_bits_can_count(rule: RoundingSpec) -> None:
    """The last entries of 2^31 and more equal those of a small tensor with the same end."""
    from gradwire.kernels import cuda

    numel, tail = (1 << 31) + 5000, 5000
    start = (numel - tail) // rule.bucket * rule.bucket
    x = torch.zeros(numel, device="cuda")
    x[start:] = normal(numel - start).cuda()
    codes, scales = cuda.round_pack_sum(x, torch.zeros_like(x), 1.0, x, rule, KEY)
    decoded = torch.zeros(numel, device="cuda")
    cuda.round_add(decoded, codes.unsqueeze(0), scales.unsqueeze(0), 1.0, rule)
    # Decoded values and residual add up to the input, at the far end too.
    torch.testing.assert_close((decoded + x)[start:].cpu(), normal(numel - start))
    assert decoded[start:].count_nonzero() > tail // 2
    assert not decoded[:start].any()


@pytest.mark.timeout(120)
def test_signs_of_more_entries_than_32_bits_can_count() -> None:
    from gradwire.kernels import cuda

    numel, tail = (1 << 31) + 5000, 5000
    x = torch.ones(numel, device="cuda")
    x[-tail:] = -3.0
    bits, low, high = cuda.sign_means_pack_sum(x, torch.zeros_like(x), 1.0, x, numel)
    assert (float(low), float(high)) == (-3.0, 1.0)
    assert not x.any()
    cuda.sign_means_add(x, bits.unsqueeze(0), low.unsqueeze(0), high.unsqueeze(0), 1.0, numel)
    assert x[-tail:].eq(-3.0).all()
    assert x[:-tail].eq(1.0).all()
