"""Cost model of collectives: latency per hop plus bytes over bandwidth; link rates and latencies.

The algorithms are those that gloo and NCCL use for large messages. Mean is a ring in which every
rank sends 2(N-1) pieces of m/N bytes; gather is a ring that forwards N-1 messages; scatter sends
N-1 pieces at once; broadcast is a tree of log2 N levels, each of which takes the whole message.
Rates are written like "100mbit", latencies like "0.1ms".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from gradwire.errors import ConfigError

_RATE_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)", re.IGNORECASE)


def parse_rate(text: str) -> int:
    """The bits per second that `text` names; decimal units, as on the box of a switch."""
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
    """The shortest text that `parse_rate` reads back, in the largest unit that is not below 1."""
    unit, size = next(
        ((unit, size) for unit, size in _RATE_UNITS.items() if rate_bits >= size), ("bit", 1)
    )
    return f"{rate_bits / size:.12g}{unit}"


_LATENCY_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us)", re.IGNORECASE)


def parse_latency(text: str) -> float:
    """The seconds that `text` names."""
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"latency: expected a number and s, ms or us such as '0.1ms', got {text!r}"
        )
    return float(match[1]) * _LATENCY_UNITS[match[2].lower()]


Kind: TypeAlias = Literal["mean", "gather", "scatter", "broadcast"]
KINDS: tuple[Kind, ...] = ("mean", "gather", "scatter", "broadcast")


class Way(NamedTuple):
    """What a call asks of one rank's link."""

    hops: int
    """Transfers that have to wait for one another."""
    passed_bytes: float
    """What goes out through the link, and as much comes in."""


def way(kind: Kind, nbytes: float, size: int) -> Way:
    """The way of a call of `size` ranks.

    `nbytes` is the message: of mean and broadcast the buffer, of gather what one rank says, and of
    scatter all that one rank says to the others.
    """
    others = size - 1
    if kind == "mean":
        return Way(2 * others, 2 * others * nbytes / size)
    if kind == "gather":
        return Way(others, others * nbytes)
    if kind == "scatter":
        return Way(min(1, others), nbytes * min(1, others))
    levels = others.bit_length()
    return Way(levels, levels * nbytes)


@dataclass(frozen=True)
class LinkModel:
    """A link as two numbers; the defaults are a slow local network, waking the process included.

    The processor has work with a call too, which matters where it computes at the same time.
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
        """How long the call takes when all ranks begin at once."""
        hops, passed_bytes = way(kind, nbytes, size)
        return hops * self.latency_s + 8 * passed_bytes / self.rate_bits

    def work_s(self, kind: Kind, nbytes: float, size: int) -> float:
        """How long it keeps one rank's processor busy."""
        passed_bytes = way(kind, nbytes, size).passed_bytes
        return self.hops_work_s(kind, size) + passed_bytes * self.byte_work_s

    def hops_work_s(self, kind: Kind, size: int) -> float:
        """The part of it that no hop can do without, however short the call."""
        return way(kind, 0, size).hops * self.hop_work_s

    def words(self) -> str:
        three_digits = round(float(f"{self.rate_bits:.3g}"))
        return f"{format_rate(three_digits)}, {self.latency_s * 1e3:.3g} ms"


@dataclass(frozen=True)
class Network:
    """The links of a cluster; where kinds of calls were measured one by one, each has its own."""

    link: LinkModel
    inside: LinkModel | None = None
    """Inside nodes, where that is another one."""
    measured: Mapping[Kind, LinkModel] = field(default_factory=dict)

    def of(self, kind: Kind, inside: bool) -> LinkModel:
        """What carries a call of this kind."""
        if inside and self.inside is not None:
            return self.inside
        return self.measured.get(kind, self.link)


def fit(kind: Kind, size: int, small: tuple[float, float], large: tuple[float, float]) -> LinkModel:
    """The link on which calls of two lengths, (bytes, seconds), take what was measured."""
    hops, few_bytes = way(kind, small[0], size)
    many_bytes = way(kind, large[0], size).passed_bytes
    # Noise can make the longer call the faster one; no link has a negative rate.
    byte_s = max((large[1] - small[1]) / (many_bytes - few_bytes), 1e-12)
    latency_s = max((small[1] - few_bytes * byte_s) / hops, 0.0)
    return LinkModel(latency_s, 8 / byte_s)
