"""Drift of parameters from a base (definition: kernels/reference/drift.py).

Tensors are processed in chunks that stay in the cache from one pass to the next.
"""

from collections.abc import Iterator

from gradwire.kernels.reference import drift as reference
from gradwire.kernels.specs import DriftTensors

CHUNK = 1 << 16


def capture_drift(drifts: DriftTensors, lookahead: float) -> None:
    for chunk in _chunks(drifts):
        reference.capture_drift(chunk, lookahead)


def apply_outer_mean(drifts: DriftTensors, rate: float) -> None:
    for chunk in _chunks(drifts):
        reference.apply_outer_mean(chunk, rate)


def apply_and_capture(drifts: DriftTensors, rate: float, lookahead: float) -> None:
    for chunk in _chunks(drifts):
        reference.apply_and_capture(chunk, rate, lookahead)


def _chunks(drifts: DriftTensors) -> Iterator[DriftTensors]:
    """Yields the same chunk of a parameter in every list, one after the other."""
    for vectors in zip(*drifts, strict=True):
        for chunks in zip(*(vector.split(CHUNK) for vector in vectors), strict=True):
            yield DriftTensors(*([chunk] for chunk in chunks))
