"""Compares the Triton kernels of sparsifiers, interpreted on the CPU, with the reference."""

import math
import os
from collections import Counter
from functools import partial
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gradwire.compressors._sparsifier import trim_message
from gradwire.kernels import cuda, reference
from gradwire.kernels.cuda.threshold import passes, sampled_bounds
from gradwire.kernels.cuda.threshold import thresholds as threshold_search
from gradwire.kernels.cuda.threshold.histogram import RESCANS, THRESHOLD
from gradwire.kernels.reference.packing import PLAIN
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import apart, crowd_at_four_fifths, normal, odd_numbers, same_bits, same_numbers

# Makes `torch.empty` fill with NaN or the largest integer, for the whole process.
torch.use_deterministic_algorithms(True)

CPU = torch.device("cpu")
KEY = 0x9E3779B97F4A7C15
compared: Counter[str] = Counter()


def compare_bits(width: int) -> None:
    values = torch.randint(0, 1 << width, (1000,), generator=torch.Generator().manual_seed(0))
    packed = cuda.pack_bits(values, width)
    assert same_bits(packed, reference.pack_bits(values, width))
    assert same_bits(cuda.unpack_bits(packed, width, 1000), values)
    compared["widths"] += 1


def compare_index(numel: int, count: int) -> None:
    index = reference.strata(KEY, numel, count, CPU)
    assert same_bits(cuda.strata(KEY, numel, count, CPU), index)
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = cuda.pack_index(index, low, bits)
    assert same_bits(packed, reference.pack_index(index, low, bits))
    assert same_bits(cuda.unpack_index(packed, low, bits, count), index)
    flips = [[], [0], [packed.numel() * 4], [packed.numel() * 8 - 1], [bits - 1]]
    # Ones that move to the end of the map do not change their number.
    first = int(index[0]) >> max(0, low)
    flips += [[first, bits - 1 - back] for back in range(min(4, bits - 1 - first))]
    for places in flips:
        flipped = packed.clone()
        for place in places:
            flipped[place >> 3] ^= 1 << (place & 7)
        expected = bool(reference.index_fits(flipped, low, bits, count, numel))
        assert bool(cuda.index_fits(flipped, low, bits, count, numel)) == expected
        compared["fits" if expected else "does not fit"] += 1
    compared["indices"] += 1


def compare_entries(numel: int, count: int, dtype: torch.dtype) -> None:
    indices = [reference.strata(key, numel, count, CPU) for key in (1, KEY)]
    residual_out, expected = normal(numel) * 1e5, normal(numel) * 1e5
    rows = torch.stack([cuda.extract(residual_out, index, dtype) for index in indices])
    others = torch.stack([reference.extract(expected, index, dtype) for index in indices])
    assert same_bits(rows, others)
    assert same_bits(residual_out, expected)
    cuda.add_at(residual_out, indices[0], rows, 0.3)
    reference.add_at(expected, indices[0], rows, 0.3)
    assert same_bits(residual_out, expected)
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = torch.stack([reference.pack_index(index, low, bits) for index in indices])
    cuda.add_packed(residual_out, packed, low, bits, rows, 0.3)
    reference.add_packed(expected, packed, low, bits, rows, 0.3)
    # Messages of two lengths, one maybe empty, and more of them than one launch adds.
    few = indices[0][: count // 2]
    short = reference.pack_index(few, low_bits(numel, len(few)), bitmap_bits(numel, len(few)))
    messages = [short, packed[1]] * 5, [rows[0][: len(few)], rows[1]] * 5
    cuda.add_packed_ragged(residual_out, *messages, 0.3)
    reference.add_packed_ragged(expected, *messages, 0.3)
    assert same_bits(residual_out, expected)
    compared["entries"] += 1


def compare_blocks(numel: int, count: int, block: int) -> None:
    for key in (KEY, 0, (1 << 64) - 1, 1 << 33):
        blocks = cuda.random_blocks(key, numel, count, block, CPU)
        assert same_bits(blocks, reference.random_blocks(key, numel, count, block, CPU))
        # A key that is stored on the device.
        stored_key = torch.tensor([key & 0xFFFFFFFF, key >> 32])
        assert same_bits(blocks, cuda.random_blocks(stored_key, numel, count, block, CPU))
        assert same_bits(blocks, reference.random_blocks(stored_key, numel, count, block, CPU))
    compared["blocks"] += 1


def compare_selection(x: torch.Tensor, count: int) -> None:
    """Compares the largest entries, and all entries that reach the smallest of those."""
    residual_out = torch.full_like(x, torch.nan)
    found = cuda.select_largest(EFInput(x, torch.zeros_like(x), residual_out, 0.5), count)
    assert same_bits(found, reference.select_largest(EFInput(x), count))
    assert same_numbers(residual_out, x)
    threshold = x[found].abs().nan_to_num(0.0, 1.0).min().view(1)
    assert same_bits(
        cuda.select_above(EFInput(x), threshold), reference.select_above(EFInput(x), threshold)
    )
    compared["selections"] += 1


def compare_thresholds(x: torch.Tensor) -> None:
    count = max(1, x.numel() // 20)
    settings: dict[str, tuple[object, ...]] = {
        "sampled_threshold": (
            7,
            max(1, x.numel() // 3),
            max(1, count // 3),
            math.ceil(0.8 * count),
        ),
        "bisected_threshold": (count,),
        "excess_threshold": ([0.25, 0.25, 0.16],),
        "normal_threshold": (1.96, count, 16),
    }
    for name, rest in settings.items():
        residual_out = torch.full_like(x, torch.nan)
        found = getattr(cuda, name)(EFInput(x, torch.zeros_like(x), residual_out), *rest)
        assert apart(found, getattr(reference, name)(EFInput(x), *rest)) <= 1, name
        assert same_numbers(residual_out, x)
        compared["thresholds"] += 1


def compare_messages(x: torch.Tensor, max_count: int, kinds: str = "") -> None:
    """Compares whole messages and residuals; only the padding of the buffers may differ."""
    numel, count = x.numel(), max(1, x.numel() // 20)
    sample_size, sample_rank = max(1, numel // 3), max(1, count // 3)
    specs = [
        ThresholdSpec("fixed", threshold=1.0),
        ThresholdSpec(
            "sampled", max_count, count, key=7, sample_size=sample_size, sample_rank=sample_rank
        ),
        ThresholdSpec("bisected", max_count, count),
        ThresholdSpec("excess", max_count, stage_ratios=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", max_count, count, deviations=1.96, rounds=16),
    ]
    for spec in specs:
        if kinds and spec.kind not in kinds.split():
            continue
        compare_message(x, spec)


def compare_message(x: torch.Tensor, spec: ThresholdSpec) -> None:
    residual_out, expected = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    padded = cuda.encode_by_threshold(
        EFInput(x, torch.zeros_like(x), residual_out), spec, torch.float16
    )
    theirs = reference.encode_by_threshold(
        EFInput(x, torch.zeros_like(x), expected), spec, torch.float16
    )
    ours = trim_message(padded, x.numel())
    assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True)), (spec, ours, theirs)
    assert same_numbers(residual_out, expected), spec
    # Positions only, which leave all entries as they are.
    residual_out.fill_(torch.nan)
    index = cuda.select_by_threshold(EFInput(x, torch.zeros_like(x), residual_out), spec)
    assert same_bits(index, reference.select_by_threshold(EFInput(x), spec)), spec
    assert same_numbers(residual_out, x), spec
    if spec.kind in ("sampled", "bisected"):
        compare_padded(x, spec)
    compared["messages"] += 1


def compare_padded(x: torch.Tensor, spec: ThresholdSpec) -> None:
    """Compares padded selections, of the kinds that two-level compression uses."""
    residual_out = torch.full_like(x, torch.nan)
    count, index, values = cuda.select_by_threshold_padded(
        EFInput(x, torch.zeros_like(x), residual_out), spec
    )
    expected_count, expected, expected_values = reference.select_by_threshold_padded(
        EFInput(x), spec
    )
    assert same_bits(count, expected_count), spec
    assert same_bits(index[: int(count)], expected[: int(count)]), spec
    assert same_numbers(values, expected_values), spec
    assert same_numbers(residual_out, x), spec


def positions() -> None:
    for width in (1, 3, 13):
        compare_bits(width)
    for numel, count in ((1, 1), (7, 7), (1000, 10), (4097, 410), (4097, 1639), (1000, 900)):
        compare_index(numel, count)
        for block in (1, 16):
            compare_blocks(numel, count, block)
        # Not bfloat16: the interpreter truncates where the GPU rounds.
        for dtype in (torch.float32, torch.float16):
            compare_entries(numel, count, dtype)


def selections() -> None:
    for kind, x in odd_numbers(4097).items():
        compare_selection(x, 41)
        if kind in ("normal", "ties", "zeros", "nan"):
            compare_selection(x[:7], 3)


def thresholds() -> None:
    for kind in ("normal", "ties", "zeros", "nan"):
        compare_thresholds(odd_numbers(4097)[kind])
    x, stage_ratios = odd_numbers(4097)["normal"], [0.7] * 12
    found = cuda.excess_threshold(EFInput(x), stage_ratios)
    assert apart(found, reference.excess_threshold(EFInput(x), stage_ratios)) <= 1
    compared["stages"] += len(stage_ratios)


def messages(kinds: tuple[str, str]) -> None:
    """Compares messages; a max_count of 300 is below the count of some thresholds, above others."""
    for kind in kinds:
        compare_messages(odd_numbers(4097)[kind], 300)
    compare_messages(odd_numbers(7)[kinds[0]], 2)


def formats() -> None:
    """Compares messages around the counts at which a plain bitmap is shorter than Elias-Fano.

    The device knows the count before the host does, and chooses the format.
    """
    for numel in (9, 29, 1000, 4097):
        x = torch.randperm(numel, generator=torch.Generator().manual_seed(0)) + 1.0
        plain = [count for count in range(numel + 1) if low_bits(numel, count) == PLAIN]
        for count in sorted({1, plain[0] - 1, plain[0], plain[0] + 1, numel // 2, numel} - {0}):
            compare_message(x, ThresholdSpec("fixed", threshold=numel - count + 0.5))
            compared["plain" if count in plain else "elias-fano"] += 1
    compare_message(x, ThresholdSpec("bisected", 2400, 1200))


def lowered_into_near_ties() -> None:
    """The outcome depends on the last bits, far above the bound, of entries next to the threshold.

    The sample's threshold is 1, which too few reach, and next to 0.8 there are more than may be
    sent.
    """
    x = crowd_at_four_fifths()
    compare_message(
        x,
        ThresholdSpec(
            "sampled", max_count=300, target_count=205, key=7, sample_size=1365, sample_rank=20
        ),
    )


def large() -> None:
    """Compares as if tensors were large: several programs sample them, and each has many tiles."""
    x = odd_numbers(20_481)["normal"]
    x[5], x[-5] = torch.nan, 1e30
    with patch.object(sampled_bounds, "LARGE", 0), patch.object(passes, "PROGRAMS", 1):
        compare_messages(x, 900, "sampled normal excess")
        # More entries reach the threshold than may be selected.
        compare_messages(x, 100, "excess")
    # The sampled entries are larger than the rest: too few are marked, then all again.
    x = normal(6000)
    x[:2048] *= 10
    with patch.object(sampled_bounds, "LARGE", 1 << 22), patch.object(passes, "PROGRAMS", 1):
        for max_count in (58, 52):
            compare_messages(x, max_count, "excess")
    lowered_into_near_ties()


def rescans(x: torch.Tensor, stages: int) -> int:
    """Compares the threshold; returns how often a program had to read its range again."""
    stage_ratios = [0.25] * stages
    search = threshold_search.search_of(
        ThresholdSpec("excess", x.numel() // 50, stage_ratios=tuple(stage_ratios))
    )
    state = threshold_search.run_search(EFInput(x), search, torch.empty(0, dtype=torch.int32)).state
    threshold = state[THRESHOLD.value].to(torch.int32).view(1).view(torch.float32)
    assert apart(threshold, reference.excess_threshold(EFInput(x), stage_ratios)) <= 1, stages
    compared["searches"] += 1
    return int(state[RESCANS.value])


def spill_buffer() -> None:
    """Checks the spill buffer with two programs, of several tiles each, and a sample of 8192."""
    with patch.object(sampled_bounds, "LARGE", 0), patch.object(passes, "PROGRAMS", 2):
        for power in (1, 3):
            x = normal(40_001) ** power
            x[7], x[-7] = torch.nan, -torch.inf
            assert [rescans(x, stages) for stages in (1, 2, 3, 5)] == [0, 0, 0, 0]
        # One thread has more entries near the first threshold than its column can hold.
        x.view(-1)[: 5 * 4096].view(20, 1024)[:, :4] = reference.excess_threshold(
            EFInput(x), [0.25]
        )
        assert rescans(x, 3) == 2
        # The sampled entries are zero, so the prediction is wrong.
        x[:: (40_001 // 8192 - 1) | 1] = 0
        assert rescans(x, 3) == 4
        x = torch.zeros(40_001)
        assert rescans(x, 3) == 4
        # The threshold is the largest entry, and nearly all are equal to it.
        x.fill_(0.1)
        assert rescans(x, 3) == 0


def casts() -> None:
    for dtype in (torch.float32, torch.float16):
        for kind, x in odd_numbers(2051).items():
            residual_out, expected = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            # Exact products: the interpreter rounds a fused multiply-add twice.
            values = cuda.cast_pack_sum(x, normal(2051), 1.0, residual_out, dtype)
            expected_values = reference.cast_pack_sum(x, normal(2051), 1.0, expected, dtype)
            assert same_numbers(values, expected_values), (kind, dtype)
            assert same_numbers(residual_out, expected), (kind, dtype)
            assert same_numbers(cuda.cast_pack(x, dtype), reference.cast_pack(x, dtype))
            compared["casts"] += 1
        rows = [normal(2051, seed).to(dtype) for seed in range(10)]
        out, other = normal(2051, 11), normal(2051, 11)
        cuda.cast_add(out, rows, 0.125)
        reference.cast_add(other, rows, 0.125)
        assert same_bits(out, other)


def compare(part: str) -> dict[str, int]:
    """Returns the number of comparisons of each kind."""
    parts = {
        "positions": positions,
        "selections": selections,
        "thresholds": thresholds,
        "messages": partial(messages, ("normal", "ties")),
        "more messages": partial(messages, ("nan", "mostly zeros")),
        "formats": formats,
        "large": large,
        "spill buffer": spill_buffer,
        "casts": casts,
    }
    compared.clear()
    parts[part]()
    return dict(compared)
