"""Predicts the step time of a method from its costs, with communication during backward.

Encoding and decoding compete with backward for the same processor, so they add to computation. The
wire is busy from the first bucket on; it ends the step if it takes longer than the rest of
backward, and the last bucket's transfer is always waited for.
"""

from dataclasses import dataclass

from gradwire.comm.cost_model import LinkModel

FORWARD, BACKWARD = 0.35, 0.55
"""Shares of a step's computation; the rest is the optimiser's step, after the exchange."""


@dataclass(frozen=True)
class ExchangeLoad:
    """The work of one step of a method: time of the processor, bytes and calls of the link."""

    codec_s: float
    hops: float
    """Transfers of one bucket that wait for one another."""
    link_bytes: float

    def wire_s(self, link: LinkModel, buckets: int) -> float:
        """Returns how long the link is busy."""
        return buckets * self.hops * link.latency_s + 8 * self.link_bytes / link.rate_bits


@dataclass(frozen=True)
class StepModel:
    """The training loop without communication, and how it overlaps with it."""

    compute_s: float
    buckets: int
    overlaps: bool

    def step_s(self, load: ExchangeLoad, link: LinkModel) -> float:
        """Returns the predicted duration of a step."""
        wire_s = load.wire_s(link, self.buckets)
        if not self.overlaps:
            return self.compute_s + load.codec_s + wire_s
        backward_s = BACKWARD * self.compute_s + load.codec_s
        first_s = backward_s / self.buckets
        exchanged_s = max(backward_s + wire_s / self.buckets, first_s + wire_s)
        return (1 - BACKWARD) * self.compute_s + exchanged_s

    def shares(self) -> list[tuple[float, float]]:
        """Returns the shares of encoding and of wire time that lengthen a step.

        There is a pair for steps that end with backward, and one for those that the wire ends.
        """
        if not self.overlaps:
            return [(1.0, 1.0)]
        return [(1.0, 1 / self.buckets), (1 / self.buckets, 1.0)]


def solve_compute_s(step_s: float, load: ExchangeLoad, link: LinkModel, model: StepModel) -> float:
    """Returns the computation with which the model predicts this step, at least a tenth of it.

    For collectives on a GPU, whose duration the host cannot see.
    """
    low_s, high_s = 0.1 * step_s, step_s
    for _ in range(40):
        middle_s = (low_s + high_s) / 2
        tried = StepModel(middle_s, model.buckets, model.overlaps)
        if tried.step_s(load, link) < step_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return (low_s + high_s) / 2


def link_at(wire_s: float, load: ExchangeLoad, link: LinkModel, buckets: int) -> LinkModel:
    """Returns the link on which this load would have taken `wire_s`: its rate is another.

    If latency alone explains the time, a tenth of it is attributed to bytes.
    """
    latency_s = buckets * load.hops * link.latency_s
    bytes_s = max(wire_s - latency_s, 0.1 * wire_s, 1e-9)
    return LinkModel(link.latency_s, max(1.0, 8 * load.link_bytes / bytes_s))
