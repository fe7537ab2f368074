"""Compares the Triton kernels of sparsifiers, interpreted on the CPU, with the reference."""

import math
import os
from collections import Counter
from functools import partial
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch

from gradwire.compressors._sparsifier import trimmed
from gradwire.kernels import cuda, reference
from gradwire.kernels.cuda.threshold import passes, sampled_bounds
from gradwire.kernels.cuda.threshold import thresholds as borders_of
from gradwire.kernels.cuda.threshold.histogram import AGAIN, BORDER
from gradwire.kernels.specs import ThresholdSpec
from gradwire.types import EFInput
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import apart, crowd_at_four_fifths, normal, odd_numbers, same_bits, same_numbers

# Fills what `torch.empty` gives with NaN or the largest integer, in this process for good.
torch.use_deterministic_algorithms(True)

CPU = torch.device("cpu")
KEY = 0x9E3779B97F4A7C15
done: Counter[str] = Counter()


def compare_bits(width: int) -> None:
    values = torch.randint(0, 1 << width, (1000,), generator=torch.Generator().manual_seed(0))
    packed = cuda.pack_bits(values, width)
    assert same_bits(packed, reference.pack_bits(values, width))
    assert same_bits(cuda.unpack_bits(packed, width, 1000), values)
    done["widths"] += 1


def compare_index(numel: int, count: int) -> None:
    index = reference.strata(KEY, numel, count, CPU)
    assert same_bits(cuda.strata(KEY, numel, count, CPU), index)
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = cuda.pack_index(index, low, bits)
    assert same_bits(packed, reference.pack_index(index, low, bits))
    assert same_bits(cuda.unpack_index(packed, low, bits, count), index)
    flips = [[], [0], [packed.numel() * 4], [packed.numel() * 8 - 1], [bits - 1]]
    # Ones that move to the end of the map leave their number as it is.
    first = int(index[0]) >> low
    flips += [[first, bits - 1 - back] for back in range(min(4, bits - 1 - first))]
    for places in flips:
        flipped = packed.clone()
        for place in places:
            flipped[place >> 3] ^= 1 << (place & 7)
        expected = bool(reference.index_fits(flipped, low, bits, count, numel))
        assert bool(cuda.index_fits(flipped, low, bits, count, numel)) == expected
        done["fits" if expected else "does not fit"] += 1
    done["choices"] += 1


def compare_entries(numel: int, count: int, dtype: torch.dtype) -> None:
    indices = [reference.strata(key, numel, count, CPU) for key in (1, KEY)]
    residual_out, expected = normal(numel) * 1e5, normal(numel) * 1e5
    rows = torch.stack([cuda.lift(residual_out, index, dtype) for index in indices])
    others = torch.stack([reference.lift(expected, index, dtype) for index in indices])
    assert same_bits(rows, others)
    assert same_bits(residual_out, expected)
    cuda.add_at(residual_out, indices[0], rows, 0.3)
    reference.add_at(expected, indices[0], rows, 0.3)
    assert same_bits(residual_out, expected)
    low, bits = low_bits(numel, count), bitmap_bits(numel, count)
    packed = torch.stack([reference.pack_index(index, low, bits) for index in indices])
    cuda.add_packed(residual_out, packed, low, bits, rows, 0.3)
    reference.add_packed(expected, packed, low, bits, rows, 0.3)
    # Of two lengths, one of which may be none, and more than are added at once.
    few = indices[0][: count // 2]
    short = reference.pack_index(few, low_bits(numel, len(few)), bitmap_bits(numel, len(few)))
    told = [short, packed[1]] * 5, [rows[0][: len(few)], rows[1]] * 5
    cuda.add_told(residual_out, *told, 0.3)
    reference.add_told(expected, *told, 0.3)
    assert same_bits(residual_out, expected)
    done["entries"] += 1


def compare_blocks(numel: int, count: int, block: int) -> None:
    for key in (KEY, 0, (1 << 64) - 1):
        drawn = cuda.random_blocks(key, numel, count, block, CPU)
        assert same_bits(drawn, reference.random_blocks(key, numel, count, block, CPU))
        # A key that lies on the device.
        there = torch.tensor([key & 0xFFFFFFFF, key >> 32])
        assert same_bits(drawn, cuda.random_blocks(there, numel, count, block, CPU))
        assert same_bits(drawn, reference.random_blocks(there, numel, count, block, CPU))
    done["blocks"] += 1


def compare_choice(x: torch.Tensor, count: int) -> None:
    """The largest, and all that reach the border of the largest."""
    residual_out = torch.full_like(x, torch.nan)
    found = cuda.largest(EFInput(x, torch.zeros_like(x), residual_out, 0.5), count)
    assert same_bits(found, reference.largest(EFInput(x), count))
    assert same_numbers(residual_out, x)
    border = x[found].abs().nan_to_num(0.0, 1.0).min().view(1)
    assert same_bits(cuda.reaching(EFInput(x), border), reference.reaching(EFInput(x), border))
    done["selections"] += 1


def compare_borders(x: torch.Tensor) -> None:
    count = max(1, x.numel() // 20)
    settings: dict[str, tuple[object, ...]] = {
        "sampled_border": (7, max(1, x.numel() // 3), max(1, count // 3), math.ceil(0.8 * count)),
        "bisected_border": (count,),
        "excess_border": ([0.25, 0.25, 0.16],),
        "normal_border": (1.96, count, 4),
    }
    for name, rest in settings.items():
        residual_out = torch.full_like(x, torch.nan)
        found = getattr(cuda, name)(EFInput(x, torch.zeros_like(x), residual_out), *rest)
        assert apart(found, getattr(reference, name)(EFInput(x), *rest)) <= 1, name
        assert same_numbers(residual_out, x)
        done["borders"] += 1


def compare_told(x: torch.Tensor, most: int, kinds: str = "") -> None:
    """Whole messages, and what is left: only the room they lie in is the kernel's own."""
    numel, count = x.numel(), max(1, x.numel() // 20)
    tried, top = max(1, numel // 3), max(1, count // 3)
    aims = [
        ThresholdSpec("fixed", border=1.0),
        ThresholdSpec("sampled", most, count, key=7, tried=tried, top=top),
        ThresholdSpec("bisected", most, count),
        ThresholdSpec("excess", most, shares=(0.25, 0.25, 0.16)),
        ThresholdSpec("normal", most, count, spread=1.96, rounds=4),
    ]
    for aim in aims:
        if kinds and aim.kind not in kinds.split():
            continue
        compare_message(x, aim)


def compare_message(x: torch.Tensor, aim: ThresholdSpec) -> None:
    residual_out, expected = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    draft = cuda.tell(EFInput(x, torch.zeros_like(x), residual_out), aim, torch.float16)
    told = reference.tell(EFInput(x, torch.zeros_like(x), expected), aim, torch.float16)
    mine = trimmed(draft, x.numel())
    assert all(same_bits(a, b) for a, b in zip(mine, told, strict=True)), (aim, mine, told)
    assert same_numbers(residual_out, expected), aim
    # The positions alone, and all that there is stays.
    residual_out.fill_(torch.nan)
    index = cuda.passing(EFInput(x, torch.zeros_like(x), residual_out), aim)
    assert same_bits(index, reference.passing(EFInput(x), aim)), aim
    assert same_numbers(residual_out, x), aim
    if aim.kind in ("sampled", "bisected"):
        compare_in_room(x, aim)
    done["messages"] += 1


def compare_in_room(x: torch.Tensor, aim: ThresholdSpec) -> None:
    """Of the kinds that are asked for in levels."""
    residual_out = torch.full_like(x, torch.nan)
    many, index, values = cuda.passing_in_room(EFInput(x, torch.zeros_like(x), residual_out), aim)
    same, expected, told = reference.passing_in_room(EFInput(x), aim)
    assert same_bits(many, same), aim
    assert same_bits(index[: int(many)], expected[: int(many)]), aim
    assert same_numbers(values, told), aim
    assert same_numbers(residual_out, x), aim


def positions() -> None:
    for width in (1, 3, 13):
        compare_bits(width)
    for numel, count in ((1, 1), (7, 7), (1000, 10), (4097, 410)):
        compare_index(numel, count)
        compare_blocks(numel, count, 16)
        # Not bfloat16: the interpreter cuts its bits off where the card rounds them.
        for dtype in (torch.float32, torch.float16):
            compare_entries(numel, count, dtype)


def selections() -> None:
    for kind, x in odd_numbers(4097).items():
        compare_choice(x, 41)
        if kind in ("normal", "ties", "zeros", "nan"):
            compare_choice(x[:7], 3)


def borders() -> None:
    for kind in ("normal", "ties", "zeros", "nan"):
        compare_borders(odd_numbers(4097)[kind])
    x, shares = odd_numbers(4097)["normal"], [0.7] * 12
    found = cuda.excess_border(EFInput(x), shares)
    assert apart(found, reference.excess_border(EFInput(x), shares)) <= 1
    done["stages"] += len(shares)


def messages(kinds: tuple[str, str]) -> None:
    """A most of 300 is more than some borders let pass, and less than others."""
    for kind in kinds:
        compare_told(odd_numbers(4097)[kind], 300)
    compare_told(odd_numbers(7)[kinds[0]], 2)


def lowered_into_a_crowd() -> None:
    """All is decided by the last bits, far above the guess, of entries next to the lowered border.

    The sample's border is 1, which too few reach, and next to 0.8 there are more than may be told.
    """
    x = crowd_at_four_fifths()
    compare_message(x, ThresholdSpec("sampled", most=300, wanted=205, key=7, tried=1365, top=20))


def large() -> None:
    """As if tensors were large: more programs sample them, and each has many tiles."""
    x = odd_numbers(20_481)["normal"]
    x[5], x[-5] = torch.nan, 1e30
    with patch.object(sampled_bounds, "LARGE", 0), patch.object(passes, "PROGRAMS", 1):
        compare_told(x, 900, "sampled normal excess")
        # More reach the border of the tails than may be chosen.
        compare_told(x, 100, "excess")
    # What the guess looks at is larger than the rest: too little is marked, and then all again.
    x = normal(6000)
    x[:2048] *= 10
    with patch.object(sampled_bounds, "LARGE", 1 << 22), patch.object(passes, "PROGRAMS", 1):
        for most in (58, 52):
            compare_told(x, most, "excess")
    lowered_into_a_crowd()


def climbed(x: torch.Tensor, stages: int) -> int:
    """How often a program had to pass over all again; the border is the reference's."""
    shares = [0.25] * stages
    search = borders_of.search_of(ThresholdSpec("excess", x.numel() // 50, shares=tuple(shares)))
    state = borders_of.found(EFInput(x), search, torch.empty(0, dtype=torch.int32)).state
    border = state[BORDER.value].to(torch.int32).view(1).view(torch.float32)
    assert apart(border, reference.excess_border(EFInput(x), shares)) <= 1, stages
    done["climbs"] += 1
    return int(state[AGAIN.value])


def ahead() -> None:
    """Two programs, of several tiles each, and a sample of 8192."""
    with patch.object(sampled_bounds, "LARGE", 0), patch.object(passes, "PROGRAMS", 2):
        for power in (1, 3):
            x = normal(40_001) ** power
            x[7], x[-7] = torch.nan, -torch.inf
            assert [climbed(x, stages) for stages in (1, 2, 3, 5)] == [0, 0, 0, 0]
        # One thread has more entries near the first border than there is room for.
        x.view(-1)[: 5 * 4096].view(20, 1024)[:, :4] = reference.excess_border(EFInput(x), [0.25])
        assert climbed(x, 3) == 2
        # Of what the sample sees nothing is foreseen; without anything else it is right.
        x[:: (40_001 // 8192 - 1) | 1] = 0
        assert climbed(x, 3) == 4
        x = torch.zeros(40_001)
        assert climbed(x, 3) == 4
        # A border at the largest of all, which nearly all are.
        x.fill_(0.1)
        assert climbed(x, 3) == 0


def casts() -> None:
    for dtype in (torch.float32, torch.float16):
        for kind, x in odd_numbers(2051).items():
            residual_out, expected = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
            # Exact products: the interpreter rounds a fused multiply-add twice.
            said = cuda.cast_pack_sum(x, normal(2051), 1.0, residual_out, dtype)
            told = reference.cast_pack_sum(x, normal(2051), 1.0, expected, dtype)
            assert same_numbers(said, told), (kind, dtype)
            assert same_numbers(residual_out, expected), (kind, dtype)
            assert same_numbers(cuda.cast_pack(x, dtype), reference.cast_pack(x, dtype))
            done["casts"] += 1
        rows = [normal(2051, seed).to(dtype) for seed in range(10)]
        out, other = normal(2051, 11), normal(2051, 11)
        cuda.cast_add(out, rows, 0.125)
        reference.cast_add(other, rows, 0.125)
        assert same_bits(out, other)


def compare(part: str) -> dict[str, int]:
    """How much of each was the same."""
    parts = {
        "positions": positions,
        "selections": selections,
        "borders": borders,
        "messages": partial(messages, ("normal", "ties")),
        "more messages": partial(messages, ("nan", "mostly zeros")),
        "large": large,
        "ahead": ahead,
        "casts": casts,
    }
    done.clear()
    parts[part]()
    return dict(done)
