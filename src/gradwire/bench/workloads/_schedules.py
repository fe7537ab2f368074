"""Learning-rate schedules: the factor of the highest rate by the fraction of steps done."""

import math


def triangle(progress: float, top: float) -> float:
    """Rises linearly until `top`, then falls linearly to 0."""
    return progress / top if progress < top else (1 - progress) / (1 - top)


def cosine(progress: float, warm: float) -> float:
    """Rises linearly until `warm`, then follows half a cosine to 0."""
    if progress < warm:
        return progress / warm
    return (1 + math.cos(math.pi * (progress - warm) / (1 - warm))) / 2


def stairs(progress: float, warm: float, *drops: float) -> float:
    """Rises linearly until `warm`; every drop divides by 10."""
    return min(1.0, progress / warm) * 0.1 ** sum(progress >= drop for drop in drops)


def plateau(progress: float, end: float) -> float:
    """Stays constant until `end`, then falls linearly to 0."""
    return min(1.0, (1 - progress) / (1 - end))
