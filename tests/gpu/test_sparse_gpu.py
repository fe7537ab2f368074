"""The sparsifiers' kernels on the GPU: equal to the reference, without synchronisation."""

import math

import pytest
import torch

from gradwire.base import encode_with_feedback
from gradwire.compressors._sparsifier import ThresholdSparsifier, trim_message
from gradwire.control.two_level import (
    GainMeter,
    TwoLevelSparsifier,
    sparsifier_of,
    two_level,
    with_factor,
)
from gradwire.kernels import reference
from gradwire.kernels.specs import ThresholdSpec
from gradwire.spec import parse
from gradwire.types import EFInput, EncodeContext
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import apart, crowd_at_four_fifths, odd_numbers, same_bits, same_numbers

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.usefixtures("poisoned_memory"),
]

SIZES = [1, 7, 4097, 1_000_003]
KEY = 0x9E3779B97F4A7C15
FIXED = ["topk:ratio=0.01", "topk:ratio=0.1,values=fp32", "randomk:ratio=0.01", "grbs:ratio=0.01"]
VARYING = [
    "threshold:value=2.5",
    "dgc:ratio=0.01",
    "redsync:ratio=0.01",
    "sidco:ratio=0.01",
    "gaussiank:ratio=0.01",
]

each_size = pytest.mark.parametrize("numel", SIZES)
each_kind = pytest.mark.parametrize("kind", odd_numbers(0))


@each_size
@each_kind
def test_the_largest(kind: str, numel: int) -> None:
    from gradwire.kernels import cuda

    x = odd_numbers(numel)[kind]
    for count in sorted({1, numel // 100 or 1, numel // 2 or 1, numel}):
        residual_out = torch.full_like(x, torch.nan).cuda()
        found = cuda.select_largest(
            EFInput(x.cuda(), torch.zeros_like(residual_out), residual_out, 0.5), count
        )
        assert same_bits(found.cpu(), reference.select_largest(EFInput(x), count))
        assert same_numbers(residual_out.cpu(), x)


@each_size
@each_kind
def test_thresholds_and_entries_that_reach_them(kind: str, numel: int) -> None:
    from gradwire.kernels import cuda

    x = odd_numbers(numel)[kind]
    count = max(1, numel // 100)
    settings: dict[str, tuple[object, ...]] = {
        "sampled_threshold": (7, max(1, numel // 30), max(1, count // 30), math.ceil(0.8 * count)),
        "bisected_threshold": (count,),
        "excess_threshold": ([0.25, 0.25, 0.16],),
        "normal_threshold": (2.57, count, 5),
    }
    for name, rest in settings.items():
        residual_out = torch.full_like(x, torch.nan).cuda()
        found = getattr(cuda, name)(
            EFInput(x.cuda(), torch.zeros_like(residual_out), residual_out), *rest
        )
        expected = getattr(reference, name)(EFInput(x), *rest)
        assert apart(found.cpu(), expected) <= 1, name
        assert same_numbers(residual_out.cpu(), x)
        index = cuda.select_above(EFInput(x.cuda()), expected.cuda())
        assert same_bits(index.cpu(), reference.select_above(EFInput(x), expected))


@each_size
@each_kind
def test_messages_of_entries_above_a_threshold(kind: str, numel: int) -> None:
    """Compares on the GPU, where torch sums and rounds in the same way."""
    from gradwire.kernels import cuda

    x, count = odd_numbers(numel)[kind].cuda(), max(1, numel // 100)
    sample_size, sample_rank = max(1, numel // 30), max(1, count // 30)
    specs = [
        ThresholdSpec("fixed", threshold=1.0),
        ThresholdSpec(
            "sampled",
            count,
            math.ceil(0.8 * count),
            key=7,
            sample_size=sample_size,
            sample_rank=sample_rank,
        ),
        ThresholdSpec("bisected", 2 * count, count),
        ThresholdSpec("excess", 2 * count, stage_ratios=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", 2 * count, count, deviations=2.57, rounds=5),
    ]
    for spec in specs:
        residual_out, other = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        message = trim_message(
            cuda.encode_by_threshold(
                EFInput(x, torch.zeros_like(x), residual_out), spec, torch.bfloat16
            ),
            numel,
        )
        expected_message = reference.encode_by_threshold(
            EFInput(x, torch.zeros_like(x), other), spec, torch.bfloat16
        )
        assert all(same_bits(a, b) for a, b in zip(message, expected_message, strict=True)), spec
        assert same_numbers(residual_out, other), spec
        residual_out.fill_(torch.nan)
        index = cuda.select_by_threshold(EFInput(x, torch.zeros_like(x), residual_out), spec)
        assert same_bits(index, reference.select_by_threshold(EFInput(x), spec)), spec
        assert same_numbers(residual_out, x), spec


def test_messages_of_large_tensors() -> None:
    """Programs have many tiles; magnitudes are normal, heavy-tailed or mostly zero."""
    from gradwire.kernels import cuda

    numel, count = 9_000_001, 90_000
    specs = [
        ThresholdSpec(
            "sampled",
            count,
            math.ceil(0.8 * count),
            key=7,
            sample_size=count,
            sample_rank=count // 100,
        ),
        ThresholdSpec("bisected", 2 * count, count),
        ThresholdSpec("excess", 2 * count, stage_ratios=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", 2 * count, count, deviations=2.57, rounds=5),
    ]
    plain = odd_numbers(numel)["normal"].cuda()
    for x in (plain, plain**3, plain * (plain.roll(1) > 0.5)):
        for spec in specs:
            residual_out, other = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            padded = cuda.encode_by_threshold(
                EFInput(x, torch.zeros_like(x), residual_out), spec, torch.bfloat16
            )
            expected_message = reference.encode_by_threshold(
                EFInput(x, torch.zeros_like(x), other), spec, torch.bfloat16
            )
            message = trim_message(padded, numel)
            assert all(same_bits(a, b) for a, b in zip(message, expected_message, strict=True)), (
                spec
            )
            assert same_numbers(residual_out, other), spec
            index = cuda.select_by_threshold(EFInput(x), spec)
            assert same_bits(index, reference.select_by_threshold(EFInput(x), spec)), spec


def test_thresholds_that_a_sample_predicts_or_not() -> None:
    from gradwire.kernels.cuda.threshold import sampled_bounds, thresholds
    from gradwire.kernels.cuda.threshold.histogram import RESCANS, THRESHOLD
    from gradwire.kernels.cuda.threshold.passes import grid_of

    numel = 20_000_003
    plain = torch.randn(numel, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    unsampled = plain.clone()
    unsampled[:: (numel // (sampled_bounds.BLOCK * sampled_bounds.BLOCKS) - 1) | 1] = 0
    stage_ratios = (0.25, 0.25, 0.16)
    search = thresholds.search_of(ThresholdSpec("excess", numel // 50, stage_ratios=stage_ratios))
    empty = torch.empty(0, dtype=torch.int32, device="cuda")
    for x, rescans in ((plain, 0), (plain**3, 0), (unsampled, 2 * grid_of(numel)[0])):
        state = thresholds.run_search(EFInput(x), search, empty).state
        threshold = state[THRESHOLD.value].to(torch.int32).view(1).view(torch.float32)
        assert (
            apart(threshold.cpu(), reference.excess_threshold(EFInput(x), stage_ratios).cpu()) <= 1
        )
        assert int(state[RESCANS.value]) == rescans


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts(numel: int, dtype: torch.dtype) -> None:
    from gradwire.kernels import cuda

    for kind, x in odd_numbers(numel).items():
        gpu, residual = x.cuda(), odd_numbers(numel)["normal"].cuda()
        residual_out, other = torch.full_like(gpu, torch.nan), torch.full_like(gpu, torch.nan)
        values = cuda.cast_pack_sum(gpu, residual, 0.5, residual_out, dtype)
        assert same_numbers(values, reference.cast_pack_sum(gpu, residual, 0.5, other, dtype)), kind
        assert same_numbers(residual_out, other), kind
        assert same_numbers(cuda.cast_pack(gpu, dtype), reference.cast_pack(gpu, dtype)), kind
    rows = [odd_numbers(numel)["normal"].cuda().to(dtype) / (i + 1) for i in range(10)]
    out, other = torch.ones(2, numel, device="cuda")
    cuda.cast_add(out, rows, 0.3)
    reference.cast_add(other, rows, 0.3)
    assert same_bits(out, other)


@each_size
def test_messages_of_many_lengths(numel: int) -> None:
    from gradwire.kernels import cuda

    counts = [max(1, numel // divisor) for divisor in (100, 3, 1000, 1, 50, 7, 100, 20, 11, 100)]
    positions = [reference.strata(KEY + c, numel, c, torch.device("cpu")) for c in counts]
    layouts = [(low_bits(numel, c), bitmap_bits(numel, c)) for c in counts]
    packed = [reference.pack_index(p, *form) for p, form in zip(positions, layouts, strict=True)]
    values = [odd_numbers(c)["normal"].bfloat16() for c in counts]
    out = odd_numbers(numel)["normal"]
    gpu_out = out.cuda()
    cuda.add_packed_ragged(gpu_out, [p.cuda() for p in packed], [v.cuda() for v in values], 0.3)
    reference.add_packed_ragged(out, packed, values, 0.3)
    assert same_bits(gpu_out.cpu(), out)


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [50, 3])
def test_positions_and_entries(numel: int, dtype: torch.dtype, divisor: int) -> None:
    """One in three is sent as a plain bitmap."""
    from gradwire.kernels import cuda

    gpu, count = torch.device("cuda"), max(1, numel // divisor)
    indices = [reference.strata(key, numel, count, torch.device("cpu")) for key in (1, KEY)]
    gpu_indices = [cuda.strata(key, numel, count, gpu) for key in (1, KEY)]
    assert all(same_bits(a.cpu(), b) for a, b in zip(gpu_indices, indices, strict=True))
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = torch.stack([cuda.pack_index(index, low, bits) for index in gpu_indices])
    expected = torch.stack([reference.pack_index(index, low, bits) for index in indices])
    assert same_bits(packed.cpu(), expected)
    assert same_bits(cuda.unpack_index(packed[1], low, bits, count).cpu(), indices[1])
    assert cuda.index_fits(packed[1], low, bits, count, numel)
    x = odd_numbers(numel)["normal"] * 1e5
    residual_out, other = x.cuda(), x.clone()
    rows = torch.stack([cuda.extract(residual_out, index, dtype) for index in gpu_indices])
    others = torch.stack([reference.extract(other, index, dtype) for index in indices])
    assert same_bits(rows.cpu(), others)
    cuda.add_packed(residual_out, packed, low, bits, rows, 0.3)
    reference.add_packed(other, expected, low, bits, others, 0.3)
    cuda.add_at(residual_out, gpu_indices[0], rows, 0.3)
    reference.add_at(other, indices[0], others, 0.3)
    assert same_bits(residual_out.cpu(), other)


@pytest.mark.parametrize("spec", [*FIXED, *VARYING])
def test_gpu_and_cpu_send_the_same(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((100_003,), step=3)
    x, residual = odd_numbers(100_003)["normal"], odd_numbers(100_003)["ties"] / 8
    gpu_residual, cpu_residual = residual.cuda(), residual.clone()
    message = encode_with_feedback(codec, EFInput(x.cuda(), gpu_residual, gpu_residual), ctx)  # type: ignore[arg-type]
    expected = encode_with_feedback(codec, EFInput(x, cpu_residual, cpu_residual), ctx)  # type: ignore[arg-type]
    assert all(same_bits(a.cpu(), b) for a, b in zip(message, expected, strict=True))
    assert same_bits(gpu_residual.cpu(), cpu_residual)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("spec", FIXED)
def test_fixed_sizes_never_synchronize_and_can_be_captured(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((300_000,), world_size=4)
    x, residual = torch.randn(2, 300_000, device="cuda")
    start, out = residual.clone(), torch.zeros(300_000, device="cuda")
    ef = EFInput(x, residual, residual)

    def step() -> tuple[torch.Tensor, ...]:
        parts = encode_with_feedback(codec, ef, ctx)  # type: ignore[arg-type]
        codec.decode_add(out, [parts] * 4, 0.25, ctx)  # type: ignore[attr-defined]
        return parts

    expected = [part.clone() for part in step()]
    residual_out, mean = residual.clone(), out.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        residual.copy_(start)
        out.zero_()
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(captured, expected, strict=True))
        assert same_bits(residual, residual_out)
        assert same_bits(out, mean)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("spec", VARYING)
def test_padded_messages_never_synchronize_and_can_be_captured(spec: str) -> None:
    codec, ctx, numel = parse(spec), EncodeContext((300_000,), world_size=4), 300_000
    assert isinstance(codec, ThresholdSparsifier)
    x, residual = torch.randn(2, numel, device="cuda")
    start, out = residual.clone(), torch.zeros(numel, device="cuda")
    ef = EFInput(x, residual, residual)
    expected = trim_message(codec.encode_padded(ef, ctx), numel)
    residual_out = residual.clone()
    residual.copy_(start)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode_padded(ef, ctx)
        codec.decode_add(out, [expected] * 4, 0.25, ctx)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded = codec.encode_padded(ef, ctx)
    for _ in range(2):
        residual.copy_(start)
        graph.replay()
        message = trim_message(padded, numel)
        assert all(same_bits(a, b) for a, b in zip(message, expected, strict=True))
        assert same_bits(residual, residual_out)


def test_more_than_two_to_the_31_entries() -> None:
    from gradwire.kernels import cuda

    numel = (1 << 31) + 4097
    positions = torch.tensor([0, 5, (1 << 31) - 1, 1 << 31, numel - 1], device="cuda")
    x = torch.zeros(numel, device="cuda")
    x[positions] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0], device="cuda")
    assert torch.equal(cuda.select_above(EFInput(x), torch.tensor([0.5], device="cuda")), positions)
    assert torch.equal(cuda.select_largest(EFInput(x), 5), positions)
    # Ties are zeros here: the first of them are selected.
    assert cuda.select_largest(EFInput(x), 7).tolist() == [0, 1, 2, 5, *positions[2:].tolist()]
    low, bits = low_bits(numel, 5), bitmap_bits(numel, 5)
    packed = cuda.pack_index(positions, low, bits)
    assert torch.equal(cuda.unpack_index(packed, low, bits, 5), positions)
    cuda.add_packed(x, packed.unsqueeze(0), low, bits, torch.ones(1, 5, device="cuda"), 1.0)
    assert x[positions].tolist() == [2.0, -1.0, 4.0, -3.0, 6.0]


@pytest.mark.parametrize("name", ["dgc", "redsync"])
def test_two_levels_equal_those_of_the_cpu(name: str) -> None:
    """Padding zeros behind the positions are never selected."""
    x = odd_numbers(1_000_003)["normal"]
    ctx = EncodeContext((x.numel(),), seed=3)
    compressor = two_level(
        parse(f"{name}:ratio=0.1"), 10, 1000, "candidate", False, GainMeter(raw=True)
    )
    sparsifier, first = (
        sparsifier_of(compressor),
        with_factor(sparsifier_of(parse(f"{name}:ratio=0.1")), 10),
    )
    assert isinstance(sparsifier, TwoLevelSparsifier)
    assert isinstance(first, ThresholdSparsifier)
    found = sparsifier.select(EFInput(x.cuda()), ctx)
    assert same_bits(found.cpu(), sparsifier.select_padded(first, EFInput(x), ctx))


def test_a_threshold_that_is_lowered_into_near_ties() -> None:
    """More entries than may be sent are next to it, and differ in their last bits only."""
    from gradwire.kernels import cuda

    x = crowd_at_four_fifths()
    spec = ThresholdSpec(
        "sampled", max_count=300, target_count=205, key=7, sample_size=1365, sample_rank=20
    )
    message = trim_message(
        cuda.encode_by_threshold(EFInput(x.cuda()), spec, torch.bfloat16), x.numel()
    )
    expected = reference.encode_by_threshold(EFInput(x), spec, torch.bfloat16)
    assert all(same_bits(a.cpu(), b) for a, b in zip(message, expected, strict=True))
