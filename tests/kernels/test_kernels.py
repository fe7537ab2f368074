"""Every kernel equals the reference: bit for bit, and up to rounding if sums are involved.

Uninitialized memory is filled with NaN or 255 here, so that entries a kernel fails to write show.
"""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.errors import ConfigError, MissingExtra
from gradwire.kernels import cpu, exports, reference
from gradwire.kernels.reference.random import random_bits, uniform
from gradwire.spec import parse
from gradwire.wire.indices import bitmap_bits, low_bits
from odd import same_bits
from quantizer_checks import check_uniform

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
    """Covers cuda, too, which can be imported without a GPU."""
    module = import_module(f"gradwire.kernels.{backend}")
    for name in sorted(exports.NAMES):
        _self, *expected = signature(getattr(kernels.Kernels, name)).parameters.values()
        found = signature(getattr(module, name)).parameters.values()
        assert [_interface(p) for p in found] == [_interface(p) for p in expected], name


def _interface(parameter: Parameter) -> tuple[str, object, object]:
    return parameter.name, parameter.kind, parameter.default


@pytest.fixture(name="backend_folder")
def importable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one kernel, in a file that is named after it."""
    folder = tmp_path / f"backend_{tmp_path.name.replace('-', '_')}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("def pack_bits(values, width): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_module(folder.name)
    return folder


def all_but(*names: str) -> dict[str, exports.Kernel]:
    return {name: getattr(reference, name) for name in exports.NAMES - {*names}}


class TestExports:
    def test_defined_and_declared_kernels_are_collected(self, backend_folder: Path) -> None:
        # A kernel that is only used here, and a helper, are not kernels of this module.
        lines = "from gradwire.kernels.reference import pack_bits\ndef helper(): ...\n"
        (backend_folder / "two.py").write_text(lines)
        found = exports.collect(backend_folder.name, all_but("pack_bits"))
        assert found.keys() == exports.NAMES
        assert found["pack_bits"] is import_module(f"{backend_folder.name}.one").pack_bits

    def test_a_missing_kernel_is_an_error(self, backend_folder: Path) -> None:
        (backend_folder / "two.py").write_text("def unpack_bit(packed, width, count): ...\n")
        with pytest.raises(RuntimeError, match=r"has no kernel \['unpack_bits'\]"):
            exports.collect(backend_folder.name, all_but("pack_bits", "unpack_bits"))

    def test_a_kernel_that_is_defined_twice_is_an_error(self, backend_folder: Path) -> None:
        (backend_folder / "two").mkdir()
        (backend_folder / "two" / "__init__.py").touch()
        (backend_folder / "two" / "three.py").write_text("def pack_bits(values, width): ...\n")
        name = backend_folder.name
        with pytest.raises(RuntimeError, match=rf"twice: in {name}.one and in {name}.two.three"):
            exports.collect(name, all_but("pack_bits"))

    def test_a_kernel_that_is_defined_and_declared_is_an_error(self, backend_folder: Path) -> None:
        with pytest.raises(RuntimeError, match=r"'pack_bits' is defined twice: in .* \(declared\)"):
            exports.collect(backend_folder.name, all_but())

    def test_an_unknown_declaration_is_an_error(self, backend_folder: Path) -> None:
        declared = all_but("pack_bits") | {"unpack_bit": reference.unpack_bits}
        with pytest.raises(RuntimeError, match=r"declares \['unpack_bit'\], which the protocol"):
            exports.collect(backend_folder.name, declared)

    def test_cpu_inherits_two_kernels_from_torch(self) -> None:
        """All others are its own, or composed of them."""
        inherited = [n for n in exports.NAMES if getattr(cpu, n) is getattr(reference, n)]
        assert sorted(inherited) == ["cast_add", "orthonormal"]

    def test_triton_is_imported_for_cuda_only(self) -> None:
        code = (
            "import sys, torch; from gradwire import kernels; kernels.on(torch.zeros(1).device); "
            "assert 'gradwire.kernels.cpu' in sys.modules; assert 'triton' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestBits:
    @each_backend
    def test_first_value_has_the_lowest_bits(self, backend: ModuleType) -> None:
        assert backend.pack_bits(torch.tensor([1, 2, 3]), 2).tolist() == [0b111001]
        assert backend.pack_bits(torch.tensor([1, 1, 1]), 3).tolist() == [0b01001001, 0]
        assert backend.pack_bits(torch.tensor([True, False, True]), 1).tolist() == [5]

    @each_size
    @pytest.mark.parametrize("width", range(17))
    def test_packs_alike_and_round_trips(self, width: int, numel: int) -> None:
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
        (1000, 1000), (4097, 41), (4097, 1025), (4097, 4096), (1_000_003, 1000),
        (1_000_003, 300_000),
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
    def test_flipped_bits_are_validated_alike(self, numel: int, count: int) -> None:
        low, bits = low_bits(numel, count), bitmap_bits(numel, count)
        packed = cpu.pack_index(positions(numel, count), low, bits)
        results = set()
        for place in range(packed.numel() * 8):
            for other in (place, (place * 7 + 3) % (packed.numel() * 8)):
                flipped = packed.clone()
                flipped[place >> 3] ^= 1 << (place & 7)
                flipped[other >> 3] ^= (1 << (other & 7)) * (other != place)
                fits = bool(cpu.index_fits(flipped, low, bits, count, numel))
                assert fits == bool(reference.index_fits(flipped, low, bits, count, numel))
                results.add(fits)
                if fits:
                    index = cpu.unpack_index(flipped, low, bits, count)
                    assert same_bits(index, reference.unpack_index(flipped, low, bits, count))
                    assert index.min() >= 0
                    assert index.max() < numel
        assert False in results


class TestRandom:
    @pytest.mark.parametrize("key", [0, 1, KEY, (1 << 64) - 1, 1 << 32])
    def test_the_same_bits_in_both_backends(self, key: int) -> None:
        # Strata of 2^31 entries reveal 31 of the 32 random bits.
        count = 1000
        start = torch.arange(count) << 31
        drawn = cpu.strata(key, count << 31, count, CPU) - start
        assert torch.equal(drawn, reference.strata(key, count << 31, count, CPU) - start)
        assert torch.equal(drawn, random_bits(key, count, CPU) >> 1)

    @pytest.mark.parametrize("key", [0, 1, KEY, (1 << 64) - 1, 1 << 32])
    @pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 4097])
    def test_uniform_numbers_alike_in_both_backends(self, key: int, count: int) -> None:
        check_uniform(cpu, count, key)

    def test_roughly_uniform(self) -> None:
        u = uniform(KEY, 1_000_000, CPU)
        assert u.min() >= 0
        assert u.max() < 1
        assert abs(u.mean() - 0.5) < 5 * (1 / 12 / 1e6) ** 0.5
        bins = torch.histc(u, 100, 0, 1)
        # Chi squared with 99 degrees of freedom: mean 99, deviation 14.
        assert (bins - 1e4).square().sum() / 1e4 < 99 + 5 * 14
        correlation = ((u[1:] - 0.5) * (u[:-1] - 0.5)).mean() * 12
        assert abs(correlation) < 5e-3

    @pytest.mark.parametrize("other", [KEY ^ 1, KEY ^ (1 << 32), KEY + 1, 0])
    def test_other_keys_give_other_numbers(self, other: int) -> None:
        one, two = uniform(KEY, 100_000, CPU), uniform(other, 100_000, CPU)
        assert (one == two).float().mean() < 1e-3
        assert abs(((one - 0.5) * (two - 0.5)).mean() * 12) < 2e-2

    def test_the_global_generator_is_untouched(self) -> None:
        before = torch.random.get_rng_state()
        for backend in (cpu, reference):
            backend.uniform(KEY, 100, CPU)
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
    def test_every_entry_has_its_probability(self, numel: int, count: int) -> None:
        """The probability of an entry is one over the length of its stratum."""
        draws = 20_000
        hits = np.zeros(numel)
        for step in range(draws):
            hits[cpu.strata(step * KEY % (1 << 64), numel, count, CPU).numpy()] += 1
        edges = np.arange(count + 1) * numel // count
        probability = np.repeat(1 / np.diff(edges), np.diff(edges))
        error = np.sqrt(probability * (1 - probability) / draws) + 1e-9
        assert (np.abs(hits / draws - probability) < 5 * error).all()

    @each_backend
    @pytest.mark.parametrize("numel", [0, 10])
    def test_no_strata_no_positions(self, backend: ModuleType, numel: int) -> None:
        assert backend.strata(KEY, numel, 0, CPU).tolist() == []


class TestChoice:
    def test_automatic_choice_is_by_device(self) -> None:
        assert kernels.backend_for(CPU) == "numba"
        assert kernels.backend_for(torch.device("cuda")) == "triton"

    def test_pinned(self) -> None:
        kernels.use("reference")
        assert kernels.on(torch.zeros(1).device) is reference
        kernels.use("numba")
        assert kernels.on(torch.zeros(1).device) is cpu

    def test_unknown_backend(self) -> None:
        message = "kernels: backend must be one of .*'reference', 'numba', 'triton'., got 'cuda'"
        with pytest.raises(ConfigError, match=message):
            kernels.use("cuda")  # type: ignore[arg-type]
        assert kernels.backend_for(CPU) == "numba", "a refused choice changes nothing"

    def test_numba_is_for_cpu(self) -> None:
        kernels.use("numba")
        message = "kernels: backend 'numba' runs on cpu, got a tensor on cuda:0"
        with pytest.raises(ConfigError, match=message):
            kernels.backend_for(torch.device("cuda:0"))

    def test_triton_is_for_gpus(self) -> None:
        kernels.use("triton")
        message = "kernels: backend 'triton' runs on cuda, got a tensor on cpu"
        with pytest.raises(ConfigError, match=message):
            parse("efsign").encode(torch.ones(4))
        with pytest.raises(ConfigError, match=message):
            gradwire.simulate({"w": torch.ones(4)}, "efsign", workers=2).stats()

    @pytest.mark.parametrize("backend", ["numba", "triton"])
    def test_a_backend_that_is_not_installed(
        self, backend: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        extra = {"numba": "cpu", "triton": "cuda"}[backend]
        with pytest.raises(MissingExtra, match=rf"pip install 'gradwire\[{extra}\]'"):
            kernels.use(backend)
        assert kernels.backend_for(torch.device(extra)) == "reference"

    def test_the_choice_is_recorded(self) -> None:
        found = []
        for backend in ("auto", "reference", "numba"):
            kernels.use(backend)  # type: ignore[arg-type]
            link = gradwire.simulate({"w": torch.ones(4)}, "efsign", workers=2)
            found.append(link.stats()["backend"])
        assert found == ["numba", "reference", "numba"]
