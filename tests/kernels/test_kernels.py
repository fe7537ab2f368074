"""Every kernel against its meaning in torch: bit for bit, and to rounding where sums are involved.

Memory that a kernel takes without clearing it is filled with NaN or 255 here, so a place that it
forgets to write shows.
"""

from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.errors import ConfigError, MissingExtra
from gradwire.kernels import cpu, reference
from gradwire.kernels.reference.random import random_bits, uniform
from gradwire.spec import parse
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import same_bits

SIZES = [0, 1, 7, 8, 9, 1000, 4097]
CPU = torch.device("cpu")
KEY = 0x9E3779B97F4A7C15

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_size = pytest.mark.parametrize("numel", SIZES)


@pytest.fixture(autouse=True)
def automatic_choice() -> Iterator[None]:
    yield
    kernels.use("auto")


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
def test_every_backend_has_every_kernel_with_the_same_arguments(backend: str) -> None:
    """Also the card's, whose module can be imported without one."""
    module = import_module(f"gradwire.kernels.{backend}")
    names = {name for name in vars(kernels.Kernels) if not name.startswith("_")}
    assert len(names) == 43
    # A random number for each place is the reference's alone, for methods that are torch all over.
    assert set(module.__all__) - {"uniform"} == names
    for name in sorted(names):
        _self, *expected = signature(getattr(kernels.Kernels, name)).parameters.values()
        found = signature(getattr(module, name)).parameters.values()
        assert [_spoken(p) for p in found] == [_spoken(p) for p in expected], name


def _spoken(parameter: Parameter) -> tuple[str, object, object]:
    return parameter.name, parameter.kind, parameter.default


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

    def test_triton_is_for_cards(self) -> None:
        kernels.use("triton")
        message = "kernels: backend 'triton' runs on cuda, got a tensor on cpu"
        with pytest.raises(ConfigError, match=message):
            parse("efsign").encode(torch.ones(4))
        with pytest.raises(ConfigError, match=message):
            gradwire.simulate({"w": torch.ones(4)}, "efsign", workers=2).stats()

    @pytest.mark.parametrize("backend", ["numba", "triton"])
    def test_one_that_is_not_installed(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        extra = {"numba": "cpu", "triton": "cuda"}[backend]
        with pytest.raises(MissingExtra, match=rf"pip install 'gradwire\[{extra}\]'"):
            kernels.use(backend)
        assert kernels.chosen(torch.device(extra)) == "reference"

    def test_what_was_chosen_is_recorded(self) -> None:
        found = []
        for backend in ("auto", "reference", "numba"):
            kernels.use(backend)  # type: ignore[arg-type]
            link = gradwire.simulate({"w": torch.ones(4)}, "efsign", workers=2)
            found.append(link.stats()["backend"])
        assert found == ["numba", "reference", "numba"]
