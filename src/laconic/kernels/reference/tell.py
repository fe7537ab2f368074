"""Messages of what passes a threshold, and their sum (see kernels/reference/passing.py)."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from laconic.kernels.aim import Aim
from laconic.kernels.reference.passing import add_one_by_one, tell_by_steps
from laconic.types import Given

if TYPE_CHECKING:
    from laconic.kernels import Kernels


def tell(given: Given, aim: Aim, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tell_by_steps(_here(), given, aim, dtype)


def add_told(
    out: Tensor, packed: Sequence[Tensor], values: Sequence[Tensor], weight: float
) -> None:
    add_one_by_one(_here(), out, packed, values, weight)


def _here() -> "Kernels":
    return cast("Kernels", import_module("laconic.kernels.reference"))
