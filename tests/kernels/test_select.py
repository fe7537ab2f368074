"""Selection by magnitude is the same in every backend, ties and NaN included."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.types import EFInput
from odd import normal, odd_numbers, same_bits, same_numbers

SIZES = [0, 1, 7, 8, 9, 1000, 4097]

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])
each_size = pytest.mark.parametrize("numel", SIZES)
each_kind = pytest.mark.parametrize("kind", odd_numbers(0))


def expected_largest(x: Tensor, count: int) -> list[int]:
    """Selects by sorting: large magnitudes first (NaN is the largest), then small positions."""
    size = x.view(torch.int32) & 0x7FFFFFFF
    return sorted(sorted(range(x.numel()), key=lambda i: (-int(size[i]), i))[:count])


def with_residual(x: Tensor) -> EFInput:
    """Adds a zero residual, and a `residual_out` that must be filled."""
    return EFInput(x, torch.zeros_like(x), torch.full_like(x, torch.nan))


class TestLargest:
    @each_size
    @each_kind
    def test_equal_to_sorting(self, kind: str, numel: int) -> None:
        x = odd_numbers(numel)[kind]
        counts = {1, 2, 3, numel // 100, numel // 2, numel - 1, numel}
        for count in sorted(c for c in counts if 0 < c <= numel):
            expected = expected_largest(x, count)
            assert cpu.select_largest(EFInput(x), count).tolist() == expected
            assert reference.select_largest(EFInput(x), count).tolist() == expected

    @each_backend
    def test_of_equal_magnitudes_the_first_win(self, backend: ModuleType) -> None:
        x = EFInput(torch.tensor([1.0, -3.0, 3.0, 3.0, 2.0]))
        assert backend.select_largest(x, 2).tolist() == [1, 2]
        assert backend.select_largest(x, 4).tolist() == [1, 2, 3, 4]

    @each_backend
    def test_more_than_there_are_means_all(self, backend: ModuleType) -> None:
        assert backend.select_largest(EFInput(normal(5)), 9).tolist() == [0, 1, 2, 3, 4]
        assert backend.select_largest(EFInput(normal(0)), 0).tolist() == []
        assert backend.select_largest(EFInput(normal(5)), 0).tolist() == []

    @pytest.mark.parametrize("numel", [*SIZES, 300_000])
    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_of_a_sum(self, numel: int, decay: float) -> None:
        x, residual = normal(numel), normal(numel, seed=1)
        total = torch.add(x, residual, alpha=decay)
        for count in {0, min(1, numel), numel // 50, numel}:
            residual_out = torch.full((numel,), torch.nan)
            found = cpu.select_largest(EFInput(x, residual, residual_out, decay), count)
            assert torch.equal(found, reference.select_largest(EFInput(total), count))
            assert torch.equal(residual_out, total)

    @pytest.mark.parametrize("period", [61, 122, 7])
    def test_a_misleading_sample_does_no_harm(self, period: int) -> None:
        x = torch.rand(400_000, generator=torch.Generator().manual_seed(0))
        for high in (True, False):
            odd = x.clone()
            # All sampled entries are large, or all are small.
            odd[::period] = odd[::period] * 0.001 + (10 if high else 0)
            found = cpu.select_largest(with_residual(odd), 20_000)
            assert torch.equal(found, reference.select_largest(EFInput(odd), 20_000))

    @pytest.mark.parametrize("kind", [k for k in odd_numbers(0) if k != "nan"])
    def test_a_sample_of_odd_numbers_does_no_harm(self, kind: str) -> None:
        x = odd_numbers(400_000)[kind]
        for count in (4000, 200_000):
            found = cpu.select_largest(with_residual(x), count)
            assert torch.equal(found, reference.select_largest(EFInput(x), count))

    def test_nan_is_found(self) -> None:
        x = normal(400_000)
        x[[5, 399_999]] = torch.nan
        found = cpu.select_largest(with_residual(x), 20_000)
        assert torch.equal(found, reference.select_largest(EFInput(x), 20_000))


class TestAbove:
    THRESHOLDS = (0.0, 1e-45, 1e-41, 0.5, 1.0, 1.5, 2.0, 3e38, float("inf"))

    @pytest.mark.parametrize("numel", [*SIZES, 300_000])
    @each_kind
    def test_equal_in_all_backends_with_the_sum(self, kind: str, numel: int) -> None:
        x = odd_numbers(numel)[kind]
        for value in self.THRESHOLDS:
            threshold = torch.tensor([value])
            expected = reference.select_above(EFInput(x), threshold)
            assert same_bits(cpu.select_above(EFInput(x), threshold), expected)
            for backend in (cpu, reference):
                ef = with_residual(x)
                assert same_bits(backend.select_above(ef, threshold), expected)
                assert ef.residual_out is not None
                assert same_numbers(ef.residual_out, x)

    @each_backend
    def test_by_hand(self, backend: ModuleType) -> None:
        x = torch.tensor([0.0, -0.0, 0.5, -1.0, 2.0, torch.nan, -torch.inf])
        assert backend.select_above(EFInput(x), torch.tensor([1.0])).tolist() == [3, 4, 5, 6]
        assert backend.select_above(EFInput(x), torch.tensor([0.0])).tolist() == [2, 3, 4, 5, 6]

    def test_residual_out_may_be_the_residual(self) -> None:
        x, residual = normal(5000), normal(5000, seed=1)
        total = torch.add(x, residual, alpha=0.5)
        threshold = torch.tensor([1.0])
        found = cpu.select_above(EFInput(x, residual, residual, 0.5), threshold)
        assert torch.equal(found, reference.select_above(EFInput(total), threshold))
        assert torch.equal(residual, total)
