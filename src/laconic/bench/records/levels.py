"""What choosing at two factors costs, as `laconic bench kernels --levels` measures it."""

from dataclasses import dataclass
from typing import Literal

from laconic.bench.records.files import VERSION


@dataclass(frozen=True, kw_only=True)
class LevelsRecord:
    """One sparsifier at one size; on a GPU the times are those of CUDA graphs where `by` says so.

    Each chooses positions and takes their values at both factors; the sum with a residual, which
    both need once, counts too.
    """

    kind: Literal["levels"] = "levels"
    version: int = VERSION
    spec: str
    factors: tuple[float, float]
    device: str
    backend: str
    numel: int
    two_levels_us: float
    twice_us: float
    ratio: float
    """Twice over two levels."""
    by: Literal["graph", "eager"]
    command: str
    machine: dict[str, str]
