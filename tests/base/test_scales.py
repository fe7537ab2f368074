"""The scale of a gradient does not matter: neither large nor small ones overflow or underflow."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catalogue import singles, usual_cases
from torch import Tensor

from gradwire import kernels
from gradwire.testing.case import Case, run_step

SHAPE = (24, 33)
STEPS = 4
SCALES = (2.0**-100, 2.0**-66, 2.0**60, 2.0**100)
"""About 1e-30, 1e-20, 1e18 and 1e30. Powers of two, so that scaling rounds nothing."""
NEAR_THE_LIMIT = 2.0**120
"""Squares and sums over a tensor leave the range of float32; entries and their means do not."""

ABSOLUTE = {
    "fp16": "has the range of float16, 6e-8 to 65504",
    "inceptionn": "its bound is absolute: smaller entries are not sent, and larger ones exactly",
    "threshold": "its threshold is absolute",
}
"""Methods whose parameters, or number format, depend on the scale of the gradient."""

SIGNS = {
    "signsgd": "the result is +1, -1 or 0",
    "signum": "the result is +1, -1 or 0",
}
"""Methods whose result is the same at every scale."""


def names(case: Case) -> set[str]:
    return {part.strip().partition(":")[0] for part in case.spec.split("|")}


def relative_cases() -> list[Case]:
    return [case for case in usual_cases() if not names(case) & ABSOLUTE.keys()]


def results(case: Case, scale: float) -> Tensor:
    """Returns the means of several steps with error feedback, in float64."""
    lanes = case.lanes(torch.zeros(SHAPE))
    outs = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(SHAPE, generator=generator) * scale for _ in lanes]
        outs.append(run_step(lanes, grads)[0])
    return torch.stack(outs).double()


def check(case: Case) -> None:
    expected = results(case, 1.0)
    for scale in SCALES:
        factor = 1.0 if names(case) & SIGNS.keys() else scale
        assert torch.equal(results(case, scale), expected * factor), scale
    limit = results(case, NEAR_THE_LIMIT)
    assert limit.isfinite().all()
    for one, two in zip(limit / NEAR_THE_LIMIT, expected, strict=True):
        cosine = (one * two).sum() / (one.norm() * two.norm())
        assert cosine > 0.9999 or not two.any()


@pytest.fixture
def _reference() -> Iterator[None]:
    kernels.use("reference")
    yield
    kernels.use("auto")


@pytest.mark.parametrize("case", relative_cases(), ids=str)
def test_results_scale_with_the_gradient(case: Case) -> None:
    check(case)


@pytest.mark.usefixtures("_reference")
@pytest.mark.parametrize(
    "case", [case for case in relative_cases() if case.spec in singles()], ids=str
)
def test_results_of_the_reference_kernels_scale_with_the_gradient(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", [*ABSOLUTE, *SIGNS])
def test_exceptions_are_needed(name: str) -> None:
    """Every method that is excepted does depend on the scale, or not at all."""
    case = next(case for case in usual_cases() if names(case) == {name})
    expected: Any = results(case, 1.0)
    assert not all(torch.equal(results(case, scale), expected * scale) for scale in SCALES)
