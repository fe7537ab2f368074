"""Cost model of collectives: latency per hop plus bytes over bandwidth; link rates and latencies.

The algorithms are those that gloo and NCCL use for large messages. Mean is a ring in which every
rank sends 2(N-1) pieces of m/N bytes; gather is a ring that forwards N-1 messages; scatter sends
N-1 pieces at once, as a rank does to its neighbors; broadcast is a tree of log2 N levels, each of
which takes the whole message. Rates are written like "100mbit", latencies like "0.1ms".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from gradwire.errors import ConfigError

_RATE_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)", re.IGNORECASE)


def parse_rate(text: str) -> int:
    """Returns the bits per second of a text such as "100mbit", in decimal units."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"rate: expected a number and bit, kbit, mbit or gbit such as '100mbit', got {text!r}"
        )
    rate_bits = round(float(match[1]) * _RATE_UNITS[match[2].lower()])
    if rate_bits < 1:
        raise ConfigError(f"rate: must be at least 1bit, got {text!r}")
    return rate_bits


def format_rate(rate_bits: int) -> str:
    """Returns the shortest text that `parse_rate` reads back, in the largest unit not below 1."""
    unit, size = next(
        ((unit, size) for unit, size in _RATE_UNITS.items() if rate_bits >= size), ("bit", 1)
    )
    return f"{rate_bits / size:.12g}{unit}"


_LATENCY_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us)", re.IGNORECASE)


def parse_latency(text: str) -> float:
    """Returns the seconds of a text such as "0.1ms"."""
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"latency: expected a number and s, ms or us such as '0.1ms', got {text!r}"
        )
    return float(match[1]) * _LATENCY_UNITS[match[2].lower()]


Kind: TypeAlias = Literal["mean", "gather", "all_to_all", "broadcast", "neighbors"]
KINDS: tuple[Kind, ...] = ("mean", "gather", "all_to_all", "broadcast")
"""The kinds that a probe measures."""


class Transfer(NamedTuple):
    """The load that a collective puts on one rank's link."""

    hops: int
    """Transfers that have to wait for one another."""
    link_bytes: float
    """Bytes that leave through the link; as many arrive."""


def transfer(kind: Kind, nbytes: float, size: int) -> Transfer:
    """Returns the load of a collective of `size` ranks.

    `nbytes` is the length of the buffer (mean, broadcast), of one rank's message (gather), or of
    all messages of one rank to the others (scatter) or to its neighbors.
    """
    others = size - 1
    if kind == "mean":
        return Transfer(2 * others, 2 * others * nbytes / size)
    if kind == "gather":
        return Transfer(others, others * nbytes)
    if kind in ("all_to_all", "neighbors"):
        return Transfer(min(1, others), nbytes * min(1, others))
    levels = others.bit_length()
    return Transfer(levels, levels * nbytes)


@dataclass(frozen=True)
class LinkModel:
    """Latency and rate of a link; the defaults are a slow local network with process wake-up.

    A collective also takes time of the processor, which matters if it computes at the same time.
    """

    latency_s: float = 1e-3
    rate_bits: float = 1e9
    hop_work_s: float = 0.0
    byte_work_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise ConfigError(f"latency: must not be negative, got {self.latency_s:g} s")
        if not self.rate_bits >= 1:
            raise ConfigError(f"rate: must be at least 1bit, got {self.rate_bits:g}")

    def call_s(self, kind: Kind, nbytes: float, size: int) -> float:
        """Returns the duration of a collective that all ranks start at the same time."""
        hops, link_bytes = transfer(kind, nbytes, size)
        return hops * self.latency_s + 8 * link_bytes / self.rate_bits

    def work_s(self, kind: Kind, nbytes: float, size: int) -> float:
        """Returns the time for which a collective keeps one rank's processor busy."""
        link_bytes = transfer(kind, nbytes, size).link_bytes
        return self.hops_work_s(kind, size) + link_bytes * self.byte_work_s

    def hops_work_s(self, kind: Kind, size: int) -> float:
        """Returns the part of `work_s` that does not depend on the message's length."""
        return transfer(kind, 0, size).hops * self.hop_work_s

    def describe(self) -> str:
        """Returns rate and latency as a text, such as "1gbit, 1 ms"."""
        three_digits = round(float(f"{self.rate_bits:.3g}"))
        return f"{format_rate(three_digits)}, {self.latency_s * 1e3:.3g} ms"


@dataclass(frozen=True)
class Network:
    """The links of a cluster; kinds of collectives that were measured have a model of their own."""

    link: LinkModel
    inside: LinkModel | None = None
    """The link inside nodes, if it differs."""
    measured: Mapping[Kind, LinkModel] = field(default_factory=dict)

    def link_for(self, kind: Kind, inside: bool) -> LinkModel:
        """Returns the model of the link that a collective of this kind uses."""
        if inside and self.inside is not None:
            return self.inside
        return self.measured.get(kind, self.link)


def fit(kind: Kind, size: int, small: tuple[float, float], large: tuple[float, float]) -> LinkModel:
    """Fits a link to the measured durations of two lengths, each given as (bytes, seconds)."""
    hops, few_bytes = transfer(kind, small[0], size)
    many_bytes = transfer(kind, large[0], size).link_bytes
    # Noise can make the longer collective the faster one; no link has a negative rate.
    byte_s = max((large[1] - small[1]) / (many_bytes - few_bytes), 1e-12)
    latency_s = max((small[1] - few_bytes * byte_s) / hops, 0.0)
    return LinkModel(latency_s, 8 / byte_s)
