"""Parameters that have drifted from a base: what the kernels of drifts are given."""

from typing import NamedTuple

from torch import Tensor


class Drifted(NamedTuple):
    """Vectors, one a parameter in each list; all but `here` are float32, and all may be written."""

    here: list[Tensor]
    """Where the parameters are, in their own types."""
    base: list[Tensor]
    """Where they would be without the steps that have yet to be told."""
    anchor: list[Tensor]
    """Where all workers agree that they are."""
    drift: list[Tensor]
    """What is told on departure; on arrival the mean of it."""
