"""Checks of arguments: the error texts hold the name, the rule and the value."""

import numpy as np
import pytest
import torch

from gradwire.checks import check_number, check_whole, read_number
from gradwire.errors import ConfigError


@pytest.mark.parametrize("value", [2.0, True, "2", None])
def test_a_value_that_is_not_an_integer_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^m: k must be a whole number, at least 1, got "):
        check_whole("m", "k", value, 1)
    with pytest.raises(ConfigError, match=r"^m: k must be a whole number, 1 to 9, got "):
        check_whole("m", "k", value, 1, 9)


def test_an_integer_out_of_bounds_is_refused_with_the_bounds() -> None:
    for value in (0, 10):
        with pytest.raises(ConfigError, match=f"^m: k must be 1 to 9, got {value}$"):
            check_whole("m", "k", value, 1, 9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_numbers_must_be_finite(value: float) -> None:
    with pytest.raises(ConfigError, match=r"^m: k must be finite, got "):
        check_number("m", "k", value)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5])])
def test_numbers_of_numpy_and_torch_are_read(value: object) -> None:
    found = read_number("m", "k", value)
    assert type(found) is float
    assert found == 0.5


@pytest.mark.parametrize(
    "value", [True, "0.5", None, torch.tensor(True), torch.zeros(2), np.float32("nan")]
)
def test_values_that_are_no_finite_number_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^m: k must be "):
        read_number("m", "k", value)
