"""Every kernel against its meaning in torch: bit for bit, and to rounding where sums are involved.

Memory that a kernel takes without clearing it is filled with NaN or 255 here, so a place that it
forgets to write shows.
"""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.errors import ConfigError, MissingExtra
from laconic.kernels import cpu, reference
from laconic.kernels.reference.random import random_bits, uniform
from laconic.wire.indices import bitmap_bits, low_bits

SIZES = [0, 1, 7, 8, 9, 1000, 4097]
BUCKETS = [1, 3, 127, 128, 5000]
CPU = torch.device("cpu")
KEY = 0x9E3779B97F4A7C15

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_size = pytest.mark.parametrize("numel", SIZES)
each_width = pytest.mark.parametrize("width", range(2, 9))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fills what `torch.empty` gives with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def automatic_choice() -> Iterator[None]:
    yield
    kernels.use("auto")


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and -0.0 is not 0.0."""
    return (
        one.dtype == two.dtype
        and one.shape == two.shape
        and torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
    )


def odd_numbers(numel: int) -> dict[str, Tensor]:
    """Inputs with ties, zeros of both signs, NaN and infinities at the same places."""
    place = torch.arange(numel)
    plain = normal(numel)
    return {
        "normal": plain,
        "ties": (place * 37 % 5 - 2).float(),
        "equal": torch.full((numel,), -1.5),
        "zeros": torch.where(place % 2 == 0, 0.0, -0.0),
        "nan": torch.where(place % 7 == 3, torch.nan, plain),
        "inf": torch.where(
            place % 7 == 3, torch.inf, torch.where(place % 7 == 5, -torch.inf, plain)
        ),
        "tiny": plain * 1e-41,
        "huge": plain.sign() * 3e38,
    }


def test_both_backends_have_every_kernel() -> None:
    names = [name for name in vars(kernels.Kernels) if not name.startswith("_")]
    assert len(names) >= 11
    for backend in (cpu, reference):
        assert not [name for name in names if not callable(getattr(backend, name, None))]


class TestBits:
    @each_backend
    def test_first_value_has_the_lowest_bits(self, backend: ModuleType) -> None:
        assert backend.pack_bits(torch.tensor([1, 2, 3]), 2).tolist() == [0b111001]
        assert backend.pack_bits(torch.tensor([1, 1, 1]), 3).tolist() == [0b01001001, 0]
        assert backend.pack_bits(torch.tensor([True, False, True]), 1).tolist() == [5]

    @each_size
    @pytest.mark.parametrize("width", range(17))
    def test_packs_alike_and_unpacks_to_what_was_packed(self, width: int, numel: int) -> None:
        generator = torch.Generator().manual_seed(numel)
        values = torch.randint(0, 1 << width, (numel,), generator=generator)
        packed = cpu.pack_bits(values, width)
        assert packed.numel() == -(-numel * width // 8)
        assert same_bits(packed, reference.pack_bits(values, width))
        assert same_bits(cpu.unpack_bits(packed, width, numel), values)
        assert same_bits(reference.unpack_bits(packed, width, numel), values)

    @pytest.mark.parametrize("width", range(1, 17))
    def test_largest_values_do_not_spill(self, width: int) -> None:
        values = torch.tensor([0, (1 << width) - 1] * 9)
        for backend in (cpu, reference):
            packed = backend.pack_bits(values, width)
            assert torch.equal(backend.unpack_bits(packed, width, 18), values)


def positions(numel: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(numel, generator=generator)[:count].sort().values


class TestIndex:
    CHOICES = (
        (0, 0), (1, 0), (1, 1), (7, 0), (7, 7), (8, 1), (9, 3), (1000, 1), (1000, 10), (1000, 999),
        (1000, 1000), (4097, 41), (4097, 4096), (1_000_003, 1000),
    )  # fmt: skip

    @pytest.mark.parametrize(("numel", "count"), CHOICES)
    def test_packs_and_unpacks_alike(self, numel: int, count: int) -> None:
        index = positions(numel, count)
        low, bits = low_bits(numel, count), bitmap_bits(numel, count)
        packed = cpu.pack_index(index, low, bits)
        assert same_bits(packed, reference.pack_index(index, low, bits))
        for backend in (cpu, reference):
            assert backend.index_fits(packed, low, bits, count, numel)
            assert same_bits(backend.unpack_index(packed, low, bits, count), index)

    @pytest.mark.parametrize(
        ("numel", "count"), [(1, 1), (9, 3), (100, 7), (1000, 10), (1000, 999)]
    )
    def test_flipped_bits_are_judged_alike(self, numel: int, count: int) -> None:
        low, bits = low_bits(numel, count), bitmap_bits(numel, count)
        packed = cpu.pack_index(positions(numel, count), low, bits)
        verdicts = set()
        for place in range(packed.numel() * 8):
            for other in (place, (place * 7 + 3) % (packed.numel() * 8)):
                flipped = packed.clone()
                flipped[place >> 3] ^= 1 << (place & 7)
                flipped[other >> 3] ^= (1 << (other & 7)) * (other != place)
                fits = bool(cpu.index_fits(flipped, low, bits, count, numel))
                assert fits == bool(reference.index_fits(flipped, low, bits, count, numel))
                verdicts.add(fits)
                if fits:
                    index = cpu.unpack_index(flipped, low, bits, count)
                    assert same_bits(index, reference.unpack_index(flipped, low, bits, count))
                    assert index.min() >= 0
                    assert index.max() < numel
        assert False in verdicts


class TestRandom:
    @pytest.mark.parametrize("key", [0, 1, KEY, (1 << 64) - 1, 1 << 32])
    def test_the_same_bits_in_both_backends(self, key: int) -> None:
        # Strata of 2^31 entries show 31 of the 32 random bits.
        count = 1000
        start = torch.arange(count) << 31
        drawn = cpu.strata(key, count << 31, count, CPU) - start
        assert torch.equal(drawn, reference.strata(key, count << 31, count, CPU) - start)
        assert torch.equal(drawn, random_bits(key, count, CPU) >> 1)

    def test_roughly_uniform(self) -> None:
        u = uniform(KEY, 1_000_000, CPU)
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(u.mean() - 0.5) < 5 * (1 / 12 / 1e6) ** 0.5
        bins = torch.histc(u, 100, 0, 1)
        # Chi squared with 99 degrees of freedom: mean 99, deviation 14.
        assert (bins - 1e4).square().sum() / 1e4 < 99 + 5 * 14
        neighbours = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
        assert abs(neighbours) < 5e-3

    @pytest.mark.parametrize("other", [KEY ^ 1, KEY ^ (1 << 32), KEY + 1, 0])
    def test_other_keys_give_other_numbers(self, other: int) -> None:
        one, two = uniform(KEY, 100_000, CPU), uniform(other, 100_000, CPU)
        assert (one == two).float().mean() < 1e-3
        assert abs(((one - 0.5) * (two - 0.5)).mean() * 12) < 2e-2

    def test_the_global_generator_is_untouched(self) -> None:
        before = torch.random.get_rng_state()
        uniform(KEY, 100, CPU)
        for backend in (cpu, reference):
            backend.strata(KEY, 100, 10, CPU)
            backend.round_pack(normal(100), 4, 16, False, KEY)
        assert torch.equal(torch.random.get_rng_state(), before)


class TestStrata:
    @pytest.mark.parametrize(("numel", "count"), [(1, 1), (9, 9), (10, 3), (1000, 7), (4097, 4096)])
    def test_distinct_ascending_and_in_range(self, numel: int, count: int) -> None:
        edges = torch.arange(count + 1) * numel // count
        for key in range(50):
            drawn = cpu.strata(key * KEY, numel, count, CPU)
            assert same_bits(drawn, reference.strata(key * KEY, numel, count, CPU))
            assert (drawn >= edges[:-1]).all()
            assert (drawn < edges[1:]).all()

    @pytest.mark.parametrize(("numel", "count"), [(10, 5), (10, 3), (17, 7)])
    def test_every_entry_has_its_chance(self, numel: int, count: int) -> None:
        """An entry is drawn as often as its stratum is short."""
        draws = 20_000
        hits = np.zeros(numel)
        for step in range(draws):
            hits[cpu.strata(step * KEY % (1 << 64), numel, count, CPU).numpy()] += 1
        edges = np.arange(count + 1) * numel // count
        chance = np.repeat(1 / np.diff(edges), np.diff(edges))
        error = np.sqrt(chance * (1 - chance) / draws) + 1e-9
        assert (np.abs(hits / draws - chance) < 5 * error).all()

    @each_backend
    @pytest.mark.parametrize("numel", [0, 10])
    def test_no_strata_no_positions(self, backend: ModuleType, numel: int) -> None:
        assert backend.strata(KEY, numel, 0, CPU).tolist() == []


class TestSigns:
    @each_backend
    def test_a_set_bit_for_every_negative_entry(self, backend: ModuleType) -> None:
        bits, scale = backend.sign_pack(torch.tensor([1.0, -2.0, 0.0, -0.0, -3.0]))
        assert bits.tolist() == [0b10010]
        assert scale.tolist() == pytest.approx([6 / 5])

    @each_size
    @pytest.mark.parametrize("kind", [kind for kind in odd_numbers(0) if kind != "huge"])
    def test_packs_alike(self, kind: str, numel: int) -> None:
        # Sums of huge entries leave float32, and where they do is up to the order of the sum.
        x = odd_numbers(numel)[kind]
        bits, scale = cpu.sign_pack(x)
        expected_bits, expected_scale = reference.sign_pack(x)
        assert same_bits(bits, expected_bits)
        assert scale.shape == (1,)
        torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0, equal_nan=True)

    @each_size
    @pytest.mark.parametrize("rows", [1, 2, 5])
    def test_adds_alike(self, rows: int, numel: int) -> None:
        bits = torch.stack([reference.sign_pack(normal(numel, row))[0] for row in range(rows)])
        scales = normal(rows, seed=9)
        ours, expected = normal(numel, 7), normal(numel, 7)
        cpu.sign_add(ours, bits, scales)
        reference.sign_add(expected, bits, scales)
        assert same_bits(ours, expected)
        signs = torch.stack([1 - 2 * reference.unpack_bits(row, 1, numel) for row in bits])
        exact = normal(numel, 7).double() + (signs * scales.double().view(-1, 1)).sum(0)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


class TestRounding:
    @each_size
    @each_width
    @pytest.mark.parametrize("bucket", BUCKETS)
    def test_packs_alike(self, width: int, bucket: int, numel: int) -> None:
        x = normal(numel, seed=width)
        codes, scales = cpu.round_pack(x, width, bucket, False, KEY)
        expected_codes, expected_scales = reference.round_pack(x, width, bucket, False, KEY)
        assert same_bits(codes, expected_codes)
        assert same_bits(scales, expected_scales)

    @each_width
    @pytest.mark.parametrize("kind", odd_numbers(0))
    def test_odd_numbers_pack_alike(self, kind: str, width: int) -> None:
        x = odd_numbers(1000)[kind]
        codes, scales = cpu.round_pack(x, width, 77, False, KEY)
        expected_codes, expected_scales = reference.round_pack(x, width, 77, False, KEY)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
        assert same_bits(codes, expected_codes)

    def test_integers_pack_alike(self) -> None:
        """Entries that lie on a level, where the last bit of levels/scale decides."""
        wrong = []
        for largest in range(1, 400):
            x = torch.arange(largest + 1, dtype=torch.float32)
            codes, _ = cpu.round_pack(x, 8, 512, False, 1)
            expected, _ = reference.round_pack(x, 8, 512, False, 1)
            wrong += [] if same_bits(codes, expected) else [largest]
        assert not wrong

    @each_width
    def test_a_million_entries_pack_alike(self, width: int) -> None:
        x = normal(1_000_003, seed=2)
        codes, _ = cpu.round_pack(x, width, 128, False, KEY)
        expected, _ = reference.round_pack(x, width, 128, False, KEY)
        assert (codes != expected).sum() == 0

    @each_size
    @each_width
    def test_euclidean_scales_to_rounding(self, width: int, numel: int) -> None:
        x = normal(numel, seed=3)
        codes, scales = cpu.round_pack(x, width, 129, True, KEY)
        expected_codes, expected_scales = reference.round_pack(x, width, 129, True, KEY)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
        level = reference.unpack_bits(codes, width, numel)
        expected = reference.unpack_bits(expected_codes, width, numel)
        assert ((level - expected).abs() <= 1).all()
        assert (level != expected).sum() <= numel // 1000

    @each_size
    @each_width
    @pytest.mark.parametrize("bucket", BUCKETS)
    def test_adds_alike(self, width: int, bucket: int, numel: int) -> None:
        messages = [
            reference.round_pack(normal(numel, r), width, bucket, False, r) for r in range(3)
        ]
        codes = torch.stack([codes for codes, _ in messages])
        scales = torch.stack([scales for _, scales in messages]) * 0.25
        ours, expected = normal(numel, 7), normal(numel, 7)
        cpu.round_add(ours, codes, scales, width, bucket)
        reference.round_add(expected, codes, scales, width, bucket)
        assert same_bits(ours, expected)

    @each_backend
    def test_by_hand(self, backend: ModuleType) -> None:
        """Two bits: levels -scale, 0, +scale; entries on a level stay there."""
        codes, scales = backend.round_pack(torch.tensor([2.0, 0.0, -2.0, -5.0]), 2, 3, False, KEY)
        assert scales.tolist() == [2.0, 5.0]
        assert codes.tolist() == [0b00_00_01_10]
        out = torch.tensor([1.0, 1.0, 1.0, 1.0])
        backend.round_add(out, codes.view(1, -1), scales.view(1, -1), 2, 3)
        assert out.tolist() == [3.0, 1.0, -1.0, -4.0]

    @each_backend
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("l2", [False, True])
    def test_a_bad_entry_spoils_its_bucket_alone(
        self, backend: ModuleType, bad: float, l2: bool
    ) -> None:
        x = normal(30)
        x[13] = bad
        codes, scales = backend.round_pack(x, 4, 10, l2, KEY)
        out = torch.zeros(30)
        backend.round_add(out, codes.view(1, -1), scales.view(1, -1), 4, 10)
        finite = out.isfinite()
        assert finite[:10].all()
        assert finite[20:].all()
        assert not finite[13]


class TestChoice:
    def test_automatic_choice_is_by_device(self) -> None:
        assert kernels.chosen(CPU) == "numba"
        assert kernels.chosen(torch.device("cuda")) == "triton"

    def test_pinned(self) -> None:
        kernels.use("reference")
        assert kernels.at(torch.zeros(1)) is reference
        kernels.use("numba")
        assert kernels.at(torch.zeros(1)) is cpu

    def test_unknown_backend(self) -> None:
        message = "kernels: backend must be one of .*'reference', 'numba', 'triton'., got 'cuda'"
        with pytest.raises(ConfigError, match=message):
            kernels.use("cuda")  # type: ignore[arg-type]
        assert kernels.chosen(CPU) == "numba", "a refused choice changes nothing"

    def test_numba_is_for_cpu(self) -> None:
        kernels.use("numba")
        message = "kernels: backend 'numba' runs on cpu, got a tensor on cuda:0"
        with pytest.raises(ConfigError, match=message):
            kernels.chosen(torch.device("cuda:0"))

    def test_numba_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        with pytest.raises(MissingExtra, match=r"pip install 'laconic\[cpu\]'"):
            kernels.use("numba")
        assert kernels.chosen(CPU) == "reference"


class TestSums:
    """The kernels that add a residual first say the same as those that do not."""

    @pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 4097])
    def test_signs_of_a_sum(self, numel: int) -> None:
        x, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
        left, expected = torch.full((2, numel), float("nan"))
        bits, scale = cpu.sign_pack_sum(x, residual, 0.5, left)
        other_bits, other_scale = reference.sign_pack_sum(x, residual, 0.5, expected)
        assert torch.equal(bits, other_bits)
        torch.testing.assert_close(scale, other_scale)
        torch.testing.assert_close(left, expected)
