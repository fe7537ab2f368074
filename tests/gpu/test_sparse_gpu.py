"""The sparsifiers' kernels on the card: what they choose, and what they never do."""

import math

import pytest
import torch

from gradwire.base import encode_with_feedback
from gradwire.compressors._sparsifier import ThresholdSparsifier, trimmed
from gradwire.control.two_level import Gauge, Levels, at_factor, levels, sparsifier_of
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
        found = cuda.largest(
            EFInput(x.cuda(), torch.zeros_like(residual_out), residual_out, 0.5), count
        )
        assert same_bits(found.cpu(), reference.largest(EFInput(x), count))
        assert same_numbers(residual_out.cpu(), x)


@each_size
@each_kind
def test_borders_and_what_reaches_them(kind: str, numel: int) -> None:
    from gradwire.kernels import cuda

    x = odd_numbers(numel)[kind]
    count = max(1, numel // 100)
    settings: dict[str, tuple[object, ...]] = {
        "sampled_border": (7, max(1, numel // 30), max(1, count // 30), math.ceil(0.8 * count)),
        "bisected_border": (count,),
        "excess_border": ([0.25, 0.25, 0.16],),
        "normal_border": (2.57, count, 5),
    }
    for name, rest in settings.items():
        residual_out = torch.full_like(x, torch.nan).cuda()
        found = getattr(cuda, name)(
            EFInput(x.cuda(), torch.zeros_like(residual_out), residual_out), *rest
        )
        expected = getattr(reference, name)(EFInput(x), *rest)
        assert apart(found.cpu(), expected) <= 1, name
        assert same_numbers(residual_out.cpu(), x)
        index = cuda.reaching(EFInput(x.cuda()), expected.cuda())
        assert same_bits(index.cpu(), reference.reaching(EFInput(x), expected))


@each_size
@each_kind
def test_messages_of_what_passes(kind: str, numel: int) -> None:
    """Compared on the card, where sums and roundings are torch's own."""
    from gradwire.kernels import cuda

    x, count = odd_numbers(numel)[kind].cuda(), max(1, numel // 100)
    tried, top = max(1, numel // 30), max(1, count // 30)
    aims = [
        ThresholdSpec("fixed", border=1.0),
        ThresholdSpec("sampled", count, math.ceil(0.8 * count), key=7, tried=tried, top=top),
        ThresholdSpec("bisected", 2 * count, count),
        ThresholdSpec("excess", 2 * count, shares=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", 2 * count, count, spread=2.57, rounds=5),
    ]
    for aim in aims:
        residual_out, other = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        said = trimmed(
            cuda.tell(EFInput(x, torch.zeros_like(x), residual_out), aim, torch.bfloat16), numel
        )
        told = reference.tell(EFInput(x, torch.zeros_like(x), other), aim, torch.bfloat16)
        assert all(same_bits(a, b) for a, b in zip(said, told, strict=True)), aim
        assert same_numbers(residual_out, other), aim
        residual_out.fill_(torch.nan)
        index = cuda.passing(EFInput(x, torch.zeros_like(x), residual_out), aim)
        assert same_bits(index, reference.passing(EFInput(x), aim)), aim
        assert same_numbers(residual_out, x), aim


def test_messages_of_large_tensors() -> None:
    """Where programs have many tiles; the magnitudes of a normal distribution, and long tails."""
    from gradwire.kernels import cuda

    numel, count = 9_000_001, 90_000
    aims = [
        ThresholdSpec(
            "sampled", count, math.ceil(0.8 * count), key=7, tried=count, top=count // 100
        ),
        ThresholdSpec("bisected", 2 * count, count),
        ThresholdSpec("excess", 2 * count, shares=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", 2 * count, count, spread=2.57, rounds=5),
    ]
    plain = odd_numbers(numel)["normal"].cuda()
    for x in (plain, plain**3, plain * (plain.roll(1) > 0.5)):
        for aim in aims:
            residual_out, other = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            draft = cuda.tell(EFInput(x, torch.zeros_like(x), residual_out), aim, torch.bfloat16)
            told = reference.tell(EFInput(x, torch.zeros_like(x), other), aim, torch.bfloat16)
            said = trimmed(draft, numel)
            assert all(same_bits(a, b) for a, b in zip(said, told, strict=True)), aim
            assert same_numbers(residual_out, other), aim
            index = cuda.passing(EFInput(x), aim)
            assert same_bits(index, reference.passing(EFInput(x), aim)), aim


def test_borders_that_a_sample_foresees_or_not() -> None:
    from gradwire.kernels.cuda.threshold import sampled_bounds, thresholds
    from gradwire.kernels.cuda.threshold.histogram import AGAIN, BORDER
    from gradwire.kernels.cuda.threshold.passes import spread

    numel = 20_000_003
    plain = torch.randn(numel, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    unseen = plain.clone()
    unseen[:: (numel // (sampled_bounds.BLOCK * sampled_bounds.BLOCKS) - 1) | 1] = 0
    shares = (0.25, 0.25, 0.16)
    search = thresholds.search_of(ThresholdSpec("excess", numel // 50, shares=shares))
    nothing = torch.empty(0, dtype=torch.int32, device="cuda")
    for x, again in ((plain, 0), (plain**3, 0), (unseen, 2 * spread(numel)[0])):
        state = thresholds.found(EFInput(x), search, nothing).state
        border = state[BORDER.value].to(torch.int32).view(1).view(torch.float32)
        assert apart(border.cpu(), reference.excess_border(EFInput(x), shares).cpu()) <= 1
        assert int(state[AGAIN.value]) == again


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts(numel: int, dtype: torch.dtype) -> None:
    from gradwire.kernels import cuda

    for kind, x in odd_numbers(numel).items():
        card, residual = x.cuda(), odd_numbers(numel)["normal"].cuda()
        residual_out, other = torch.full_like(card, torch.nan), torch.full_like(card, torch.nan)
        said = cuda.cast_pack_sum(card, residual, 0.5, residual_out, dtype)
        assert same_numbers(said, reference.cast_pack_sum(card, residual, 0.5, other, dtype)), kind
        assert same_numbers(residual_out, other), kind
        assert same_numbers(cuda.cast_pack(card, dtype), reference.cast_pack(card, dtype)), kind
    rows = [odd_numbers(numel)["normal"].cuda().to(dtype) / (i + 1) for i in range(10)]
    out, other = torch.ones(2, numel, device="cuda")
    cuda.cast_add(out, rows, 0.3)
    reference.cast_add(other, rows, 0.3)
    assert same_bits(out, other)


@each_size
def test_messages_of_many_lengths(numel: int) -> None:
    from gradwire.kernels import cuda

    counts = [max(1, numel // share) for share in (100, 3, 1000, 1, 50, 7, 100, 20, 11, 100)]
    places = [reference.strata(KEY + c, numel, c, torch.device("cpu")) for c in counts]
    forms = [(low_bits(numel, c), bitmap_bits(numel, c)) for c in counts]
    packed = [reference.pack_index(p, *form) for p, form in zip(places, forms, strict=True)]
    values = [odd_numbers(c)["normal"].bfloat16() for c in counts]
    out = odd_numbers(numel)["normal"]
    card = out.cuda()
    cuda.add_told(card, [p.cuda() for p in packed], [v.cuda() for v in values], 0.3)
    reference.add_told(out, packed, values, 0.3)
    assert same_bits(card.cpu(), out)


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_and_entries(numel: int, dtype: torch.dtype) -> None:
    from gradwire.kernels import cuda

    card, count = torch.device("cuda"), max(1, numel // 50)
    indices = [reference.strata(key, numel, count, torch.device("cpu")) for key in (1, KEY)]
    drawn = [cuda.strata(key, numel, count, card) for key in (1, KEY)]
    assert all(same_bits(a.cpu(), b) for a, b in zip(drawn, indices, strict=True))
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = torch.stack([cuda.pack_index(index, low, bits) for index in drawn])
    expected = torch.stack([reference.pack_index(index, low, bits) for index in indices])
    assert same_bits(packed.cpu(), expected)
    assert same_bits(cuda.unpack_index(packed[1], low, bits, count).cpu(), indices[1])
    assert cuda.index_fits(packed[1], low, bits, count, numel)
    x = odd_numbers(numel)["normal"] * 1e5
    residual_out, other = x.cuda(), x.clone()
    rows = torch.stack([cuda.lift(residual_out, index, dtype) for index in drawn])
    others = torch.stack([reference.lift(other, index, dtype) for index in indices])
    assert same_bits(rows.cpu(), others)
    cuda.add_packed(residual_out, packed, low, bits, rows, 0.3)
    reference.add_packed(other, expected, low, bits, others, 0.3)
    cuda.add_at(residual_out, drawn[0], rows, 0.3)
    reference.add_at(other, indices[0], others, 0.3)
    assert same_bits(residual_out.cpu(), other)


@pytest.mark.parametrize("spec", [*FIXED, *VARYING])
def test_card_and_host_say_the_same(spec: str) -> None:
    codec, ctx = parse(spec), EncodeContext((100_003,), step=3)
    x, residual = odd_numbers(100_003)["normal"], odd_numbers(100_003)["ties"] / 8
    mine, theirs = residual.cuda(), residual.clone()
    said = encode_with_feedback(codec, EFInput(x.cuda(), mine, mine), ctx)  # type: ignore[arg-type]
    expected = encode_with_feedback(codec, EFInput(x, theirs, theirs), ctx)  # type: ignore[arg-type]
    assert all(same_bits(a.cpu(), b) for a, b in zip(said, expected, strict=True))
    assert same_bits(mine.cpu(), theirs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("spec", FIXED)
def test_fixed_sizes_never_wait_and_can_be_captured(spec: str) -> None:
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
def test_drafts_never_wait_and_can_be_captured(spec: str) -> None:
    codec, ctx, numel = parse(spec), EncodeContext((300_000,), world_size=4), 300_000
    assert isinstance(codec, ThresholdSparsifier)
    x, residual = torch.randn(2, numel, device="cuda")
    start, out = residual.clone(), torch.zeros(numel, device="cuda")
    ef = EFInput(x, residual, residual)
    expected = trimmed(codec.draft(ef, ctx), numel)
    residual_out = residual.clone()
    residual.copy_(start)
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.draft(ef, ctx)
        codec.decode_add(out, [expected] * 4, 0.25, ctx)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft = codec.draft(ef, ctx)
    for _ in range(2):
        residual.copy_(start)
        graph.replay()
        said = trimmed(draft, numel)
        assert all(same_bits(a, b) for a, b in zip(said, expected, strict=True))
        assert same_bits(residual, residual_out)


def test_more_than_two_to_the_31_entries() -> None:
    from gradwire.kernels import cuda

    numel = (1 << 31) + 4097
    spots = torch.tensor([0, 5, (1 << 31) - 1, 1 << 31, numel - 1], device="cuda")
    x = torch.zeros(numel, device="cuda")
    x[spots] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0], device="cuda")
    assert torch.equal(cuda.reaching(EFInput(x), torch.tensor([0.5], device="cuda")), spots)
    assert torch.equal(cuda.largest(EFInput(x), 5), spots)
    # Ties are zeros here: the first of them come first.
    assert cuda.largest(EFInput(x), 7).tolist() == [0, 1, 2, 5, *spots[2:].tolist()]
    low, bits = low_bits(numel, 5), bitmap_bits(numel, 5)
    packed = cuda.pack_index(spots, low, bits)
    assert torch.equal(cuda.unpack_index(packed, low, bits, 5), spots)
    cuda.add_packed(x, packed.unsqueeze(0), low, bits, torch.ones(1, 5, device="cuda"), 1.0)
    assert x[spots].tolist() == [2.0, -1.0, 4.0, -3.0, 6.0]


@pytest.mark.parametrize("name", ["dgc", "redsync"])
def test_two_levels_are_those_of_the_cpu(name: str) -> None:
    """Where positions are in room for more of them, zeros behind them are never chosen."""
    x = odd_numbers(1_000_003)["normal"]
    ctx = EncodeContext((x.numel(),), seed=3)
    made = levels(parse(f"{name}:ratio=0.1"), 10, 1000, "candidate", False, Gauge(raw=True))
    both, first = sparsifier_of(made), at_factor(sparsifier_of(parse(f"{name}:ratio=0.1")), 10)
    assert isinstance(both, Levels)
    assert isinstance(first, ThresholdSparsifier)
    found = both.select(EFInput(x.cuda()), ctx)
    assert same_bits(found.cpu(), both.select_in_room(first, EFInput(x), ctx))


def test_a_border_that_is_lowered_into_a_crowd() -> None:
    """More lie next to it than may be told, and differ in their last bits only."""
    from gradwire.kernels import cuda

    x = crowd_at_four_fifths()
    aim = ThresholdSpec("sampled", most=300, wanted=205, key=7, tried=1365, top=20)
    told = trimmed(cuda.tell(EFInput(x.cuda()), aim, torch.bfloat16), x.numel())
    expected = reference.tell(EFInput(x), aim, torch.bfloat16)
    assert all(same_bits(a.cpu(), b) for a, b in zip(told, expected, strict=True))
