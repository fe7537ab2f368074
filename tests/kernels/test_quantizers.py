"""The dense quantizers of the CPU backend equal the reference."""

from types import ModuleType

import numpy as np
import pytest
import torch

from gradwire.kernels import cpu, reference
from gradwire.kernels.cpu.random import key_words, random_words
from gradwire.kernels.specs import RoundingSpec
from quantizer_checks import (
    KEY,
    ROUNDINGS,
    check_rounding,
    check_signs,
    check_trits,
    check_two_means,
    check_votes,
    normal,
    odd_numbers,
    same,
)

SIZES = [0, 1, 7, 8, 9, 1000, 4097]
MANY = 1_000_003

each_size = pytest.mark.parametrize("numel", SIZES)
each_kind = pytest.mark.parametrize("kind", odd_numbers(0))
each_spec = pytest.mark.parametrize("spec", ROUNDINGS, ids=str)
each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])


class TestRounding:
    @each_size
    @each_spec
    def test_alike_at_every_size(self, spec: RoundingSpec, numel: int) -> None:
        check_rounding(cpu, normal(numel, seed=5), spec)

    @each_kind
    @each_spec
    def test_alike_on_odd_numbers(self, spec: RoundingSpec, kind: str) -> None:
        check_rounding(cpu, odd_numbers(2500)[kind], spec)

    @pytest.mark.parametrize("spec", ROUNDINGS[::2], ids=str)
    def test_alike_on_a_million_entries(self, spec: RoundingSpec) -> None:
        x = normal(MANY)
        for ours, expected in zip(
            cpu.round_pack(x, spec, KEY), reference.round_pack(x, spec, KEY), strict=True
        ):
            same(ours, expected)

    @pytest.mark.parametrize("width", range(2, 9))
    @pytest.mark.parametrize("bucket", [1, 3, 127, 128, 5000])
    @pytest.mark.parametrize("numel", [9, 4097])
    def test_alike_at_every_width_and_bucket(self, width: int, bucket: int, numel: int) -> None:
        check_rounding(cpu, normal(numel, seed=width), RoundingSpec("stochastic", bucket, width))

    def test_integers_are_rounded_alike(self) -> None:
        """Entries on a level, where the last bit of levels/scale decides."""
        wrong = []
        for largest in range(1, 400):
            x = torch.arange(largest + 1, dtype=torch.float32)
            for spec in (
                RoundingSpec("stochastic", 512),
                RoundingSpec("nearest", 512, 4),
                RoundingSpec("tree", 512),
            ):
                codes, expected = (b.round_pack(x, spec, 1)[0] for b in (cpu, reference))
                wrong += [] if torch.equal(codes, expected) else [(largest, spec)]
        assert not wrong

    @each_size
    @pytest.mark.parametrize("width", [2, 4, 8])
    def test_euclidean_scales_to_rounding(self, width: int, numel: int) -> None:
        x, spec = normal(numel, seed=3), RoundingSpec("stochastic", 129, width, "l2")
        codes, scales = cpu.round_pack(x, spec, KEY)
        expected_codes, expected_scales = reference.round_pack(x, spec, KEY)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
        level = reference.unpack_bits(codes, width, numel)
        expected = reference.unpack_bits(expected_codes, width, numel)
        assert ((level - expected).abs() <= 1).all()
        assert (level != expected).sum() <= numel // 1000

    @each_backend
    def test_by_hand(self, backend: ModuleType) -> None:
        """Two bits: levels -scale, 0, +scale; entries on a level stay there."""
        spec = RoundingSpec("stochastic", 3, 2)
        codes, scales = backend.round_pack(torch.tensor([2.0, 0.0, -2.0, -5.0]), spec, KEY)
        assert scales.tolist() == [2.0, 5.0]
        assert codes.tolist() == [0b00_00_01_10]
        out = torch.tensor([1.0, 1.0, 1.0, 1.0])
        backend.round_add(out, codes.view(1, -1), scales.view(1, -1), 1.0, spec)
        assert out.tolist() == [3.0, 1.0, -1.0, -4.0]

    @each_backend
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize(
        "spec",
        [
            RoundingSpec("stochastic", 10, 4, "l2"),
            *(RoundingSpec(r.kind, 10, r.width, r.scale) for r in ROUNDINGS),
        ],
        ids=str,
    )
    def test_a_non_finite_entry_affects_its_bucket_only(
        self, backend: ModuleType, value: float, spec: RoundingSpec
    ) -> None:
        x = normal(30)
        x[13] = value
        codes, scales = backend.round_pack(x, spec, KEY)
        out = torch.zeros(30)
        backend.round_add(out, codes.view(1, -1), scales.view(1, -1), 1.0, spec)
        finite = out.isfinite()
        assert finite[:10].all()
        assert finite[20:].all()
        assert not finite[13]

    @each_backend
    def test_rows_may_be_anywhere_in_memory(self, backend: ModuleType) -> None:
        """Rows of gathered messages have gaps; repeated messages share memory."""
        spec, numel = RoundingSpec("stochastic", 16, 4), 100
        messages = [reference.round_pack(normal(numel, seed), spec, seed) for seed in range(3)]
        codes, scales = (torch.stack(parts) for parts in zip(*messages, strict=True))
        expected = torch.zeros(numel)
        backend.round_add(expected, codes, scales, 0.5, spec)
        spaced = torch.full((3, codes.shape[1] + 7), 255, dtype=torch.uint8)
        spaced[:, 3:-4] = codes
        out = torch.zeros(numel)
        backend.round_add(out, spaced[:, 3:-4], scales, 0.5, spec)
        assert torch.equal(out, expected)
        one, twice = torch.zeros(numel), torch.zeros(numel)
        backend.round_add(one, codes[[0, 0]], scales[[0, 0]], 0.5, spec)
        backend.round_add(twice, codes[:1].expand(2, -1), scales[:1].expand(2, -1), 0.5, spec)
        assert torch.equal(one, twice)


class TestSigns:
    @each_backend
    def test_a_set_bit_for_every_negative_entry(self, backend: ModuleType) -> None:
        bits, scale = backend.sign_pack(torch.tensor([1.0, -2.0, 0.0, -0.0, -3.0]))
        assert bits.tolist() == [0b10010]
        assert scale.tolist() == pytest.approx([6 / 5])

    @pytest.mark.parametrize("numel", [*SIZES, 31, 32, 33, MANY])
    def test_alike_at_every_size(self, numel: int) -> None:
        check_signs(cpu, normal(numel, seed=5))

    @each_kind
    def test_alike_on_odd_numbers(self, kind: str) -> None:
        check_signs(cpu, odd_numbers(2500)[kind])

    @pytest.mark.parametrize("bucket", [1, 3, 32, 100, 1024, 10_000])
    @pytest.mark.parametrize("numel", [*SIZES, 31, 32, 33])
    def test_two_means_alike_at_every_size(self, numel: int, bucket: int) -> None:
        check_two_means(cpu, normal(numel, seed=5), bucket)

    @each_kind
    @pytest.mark.parametrize("bucket", [100, 10_000])
    def test_two_means_alike_on_odd_numbers(self, kind: str, bucket: int) -> None:
        check_two_means(cpu, odd_numbers(5000)[kind], bucket)

    def test_residual_out_may_be_the_residual(self) -> None:
        x, residual = normal(5000), normal(5000, 1)
        residual_out = torch.empty(5000)
        cpu.sign_pack_sum(x, residual, 0.5, residual_out)
        cpu.sign_pack_sum(x, residual, 0.5, residual)
        assert torch.equal(residual_out, residual)

    @pytest.mark.parametrize("numel", [*SIZES, 31, 32, 33, MANY])
    def test_votes_alike_at_every_size(self, numel: int) -> None:
        check_votes(cpu, normal(numel, seed=5).round())

    @each_kind
    def test_votes_alike_on_odd_numbers(self, kind: str) -> None:
        check_votes(cpu, odd_numbers(2500)[kind])


class TestTrits:
    @pytest.mark.parametrize("clip", [0, 2.5])
    @pytest.mark.parametrize("numel", [*SIZES, MANY])
    def test_alike_at_every_size(self, numel: int, clip: float) -> None:
        check_trits(cpu, normal(numel, seed=5), clip)

    @each_kind
    @pytest.mark.parametrize("clip", [0, 2.5])
    def test_alike_on_odd_numbers(self, kind: str, clip: float) -> None:
        check_trits(cpu, odd_numbers(2500)[kind], clip)

    @each_backend
    def test_every_byte_decodes_to_five_trits(self, backend: ModuleType) -> None:
        packed = torch.arange(256, dtype=torch.uint8).view(1, -1)
        out = torch.zeros(1280)
        backend.trits_add(out, packed, torch.ones(1, 1), 1.0)
        digits = [[byte // 3**j % 3 - 1 for j in range(5)] for byte in range(256)]
        assert torch.equal(out, torch.tensor(digits).view(-1).float())


@each_backend
def test_the_global_generator_is_untouched(backend: ModuleType) -> None:
    before = torch.random.get_rng_state()
    for spec in ROUNDINGS:
        backend.round_pack(normal(100), spec, KEY)
    backend.trits_pack(normal(100), 0.0, KEY)
    backend.sign_votes_pack(torch.zeros(100), KEY)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("first", [0, 5, (1 << 32) - 1000, (1 << 32) - 500, 1 << 32, 7 << 40])
def test_words_are_those_of_their_positions(first: int) -> None:
    """Also if positions exceed 32 bits in the middle of a block."""
    words = np.zeros(1000, dtype=np.uint32)
    random_words(first, *key_words(KEY), words)

    def hashed(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
        return x ^ (x >> 16)

    places = range(first, first + 1000)
    low, high = KEY & 0xFFFFFFFF, KEY >> 32
    assert words.tolist() == [hashed(hashed(p & 0xFFFFFFFF ^ low) ^ high ^ p >> 32) for p in places]
