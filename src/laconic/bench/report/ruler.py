"""Where an axis ends and where it has its marks."""

import math
from collections.abc import Sequence
from statistics import median


def cut_at(lengths: Sequence[float]) -> float | None:
    """Where to break off bars that are so long that the others could not be compared."""
    enough = 3 * median(lengths)
    return enough if max(lengths) > 2 * enough else None


def ticks(most: float, about: int) -> list[float]:
    """Round numbers from 0 to `most`, about so many."""
    raw = most / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * i for i in range(math.floor(most / step + 1e-9) + 1)]
