"""Update kernels: the optimisers' formulas in float64, and equal results in both CPU backends."""

from types import ModuleType

import pytest
import torch

from gradwire.kernels import cpu, reference
from gradwire.kernels.specs import AdamSpec, Moments

each_backend = pytest.mark.parametrize("backend", [cpu, reference], ids=["cpu", "reference"])

SPEC = AdamSpec(0.9, 0.999, 1e-8)


def moments(numel: int, *, in_place: bool = False) -> Moments:
    mean, square = torch.zeros(numel), torch.zeros(numel)
    return Moments(mean, square, *((mean, square) if in_place else (mean.clone(), square.clone())))


def swapped(given: Moments) -> Moments:
    return Moments(given.mean_out, given.square_out, given.mean, given.square)


def step_of(number: int) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float64)


@each_backend
@pytest.mark.parametrize("in_place", [False, True])
def test_adam_is_its_formula(backend: ModuleType, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    state = moments(1003, in_place=in_place)
    mean = square = torch.zeros(1003, dtype=torch.float64)
    for number in range(1, 30):
        grad = torch.randn(1003, generator=generator) * 10.0 ** -(number % 7)
        g = grad.double()
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        corrected = mean / (1 - 0.9**number), square / (1 - 0.999**number)
        backend.adam_update(grad, state, SPEC, step_of(number))
        torch.testing.assert_close(grad.double(), corrected[0] / (corrected[1].sqrt() + 1e-8),
                                   rtol=2e-5, atol=1e-6)  # fmt: skip
        torch.testing.assert_close(state.square_out.double(), square, rtol=2e-6, atol=0)
        state = swapped(state)


@each_backend
def test_adam_of_several_workers_has_the_length_of_their_mean(backend: ModuleType) -> None:
    """Pure noise: the mean of local updates is as long as the update of the mean gradient."""
    workers, steps = 4, 300
    gradients = torch.randn(steps, workers, 500, generator=torch.Generator().manual_seed(2))

    def last_updates(rows: torch.Tensor, spec: AdamSpec) -> torch.Tensor:
        state = moments(rows.shape[1], in_place=True)
        for number, row in enumerate(rows, 1):
            grad = row.clone()
            backend.adam_update(grad, state, spec, step_of(number))
        return grad

    of_mean = last_updates(gradients.mean(1), SPEC).norm()
    for spec, low, high in ((SPEC._replace(workers=workers), 0.85, 1.05), (SPEC, 0.4, 0.6)):
        own = [last_updates(gradients[:, worker], spec) for worker in range(workers)]
        assert low < float(torch.stack(own).mean(0).norm() / of_mean) < high


@each_backend
def test_lion_is_its_formula(backend: ModuleType) -> None:
    mean, out = torch.tensor([1.0, -1.0, 0.0, 0.0]), torch.full((4,), torch.nan)
    grad = torch.tensor([-1.0, -1.0, 2.0, 0.0])
    backend.lion_update(grad, mean, out, 0.9, 0.5)
    assert grad.tolist() == [1.0, -1.0, 1.0, 0.0]
    assert out.tolist() == [0.0, -1.0, 1.0, 0.0]


@each_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_updates_of_gradients_that_overflow_are_not_finite(
    backend: ModuleType, value: float
) -> None:
    """An infinite square would give a zero update, and stay infinite in all later steps."""
    grad = torch.tensor([1.0, value, 2.0])
    backend.adam_update(grad, moments(3), SPEC, step_of(1))
    assert grad.isfinite().tolist() == [True, False, True]
    if abs(value) != 1e30:
        grad = torch.tensor([1.0, value, 2.0])
        backend.lion_update(grad, torch.zeros(3), torch.zeros(3), 0.9, 0.99)
        assert grad.isfinite().tolist() == [True, False, True]


@each_backend
def test_empty_and_zero_gradients(backend: ModuleType) -> None:
    backend.adam_update(torch.zeros(0), moments(0), SPEC, step_of(1))
    grad = torch.zeros(3)
    backend.adam_update(grad, moments(3), SPEC, step_of(1))
    assert grad.tolist() == [0.0, 0.0, 0.0]
