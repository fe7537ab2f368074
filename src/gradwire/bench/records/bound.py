"""The lower bound of a step with given bytes on links of a given rate.

A link sends and receives at its rate at the same time, so the bytes of a step take at least
`wire_ms`, the larger of both directions in bits over the rate. All but the exposed bytes may be
sent while the step computes; those of the last bucket become known when the backward pass ends.
So no step is shorter than the computation and the time of the exposed bytes, nor than `wire_ms`.
Headers of packets, latency, encoding and decoding are left out: they are what an exchange adds.
"""

from typing import NamedTuple

from gradwire.comm.cost_model import parse_rate


class StepBound(NamedTuple):
    wire_ms: float
    step_ms: float | None
    """None if the time of the computation is unknown."""


def step_bound(
    rate: str, wire_bytes: float, exposed_bytes: float, compute_ms: float | None
) -> StepBound:
    """Returns the bound of a step in which a worker sends or receives `wire_bytes`."""
    ms_per_byte = 8e3 / parse_rate(rate)
    wire_ms = wire_bytes * ms_per_byte
    if compute_ms is None:
        return StepBound(wire_ms, None)
    return StepBound(wire_ms, max(compute_ms + exposed_bytes * ms_per_byte, wire_ms))
