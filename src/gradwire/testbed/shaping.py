"""Traffic shaping by the kernel's token bucket filter (tbf), with delay and loss by netem."""

from __future__ import annotations

from dataclasses import dataclass
from errno import ENOENT
from typing import TYPE_CHECKING

from gradwire.comm.cost_model import format_rate, parse_rate
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_ROOT = 0xFFFFFFFF  # the parent of an interface's outermost qdisc
_HANDLE = 0x10000  # 1:0, the handle of our qdisc
_INSIDE_TBF = 0x10001  # 1:1, the only class of our tbf
_INNER_HANDLE = 0x100000  # 10:0
_NETEM_PACKETS = 100_000  # more than fit into any delay at 10 Gbit/s and 100 ms
_FRAME_BYTES = 1514
_GSO_MAX_BYTES = 65536
# tbf counts bytes per second in 32 bits.
_MAX_RATE_BITS = 8 * (2**32 - 1)


@dataclass(frozen=True)
class Shape:
    """The tbf parameters of one direction of a link.

    The bucket holds 1 ms of the rate. A larger one would let a compressed message of that size
    pass for free after every pause, which would favour compression. The kernel's segmentation
    offload produces packets of up to 64 kB; they are capped at half a bucket, since tokens that
    arrive at a full bucket are lost.
    """

    rate_bits: int

    def __post_init__(self) -> None:
        if not 8 <= self.rate_bits <= _MAX_RATE_BITS:
            raise ConfigError(
                f"rate: must be between 8bit and {format_rate(_MAX_RATE_BITS)} to be shaped, "
                f"got {format_rate(self.rate_bits)}"
            )

    @staticmethod
    def parse(rate: str | None) -> Shape | None:
        """Returns the shape of `rate`; None leaves the link as fast as the machine."""
        return None if rate is None else Shape(parse_rate(rate))

    @property
    def burst_bytes(self) -> int:
        return max(self.rate_bits // 8 // 1000, 3 * _FRAME_BYTES)

    @property
    def gso_bytes(self) -> int:
        return min(self.burst_bytes // 2, _GSO_MAX_BYTES)

    @property
    def queue_bytes(self) -> int:
        """Holds 100 ms and the windows of several senders, so that TCP loses nothing."""
        return max(self.rate_bits // 8 // 10, 4 * 2**20)


@dataclass(frozen=True)
class Impairment:
    """The netem parameters of one direction of a link."""

    delay_s: float
    jitter_s: float
    loss: float

    def arguments(self) -> dict[str, float]:
        """Returns them as pyroute2 takes them: microseconds, percent, and packets in the queue."""
        return {
            "delay": round(self.delay_s * 1e6),
            "jitter": round(self.jitter_s * 1e6),
            "loss": 100 * self.loss,
            "limit": _NETEM_PACKETS,
        }


def impair_link(
    netlink: IPRoute, index: int, impairment: Impairment | None, below_tbf: bool
) -> None:
    """Delays and drops what interface `index` sends, inside its rate limit if it has one."""
    parent, handle = (_INSIDE_TBF, _INNER_HANDLE) if below_tbf else (_ROOT, _HANDLE)
    if impairment is None:
        _remove(netlink, index, "netem", parent)
        return
    try:
        netlink.tc("replace", "netem", index, handle, parent=parent, **impairment.arguments())
    except Exception as error:  # netlink errors have no common base in all versions
        if getattr(error, "code", None) != ENOENT:
            raise
        raise ConfigError(
            "delay, jitter and loss need netem, which this kernel does not have (module "
            "sch_netem); give rates only, or use a kernel that has it"
        ) from error


def shape_link(netlink: IPRoute, index: int, shape: Shape | None) -> None:
    """Limits the rate at which interface `index` sends; works on a link in use."""
    if shape is None:
        _unshape(netlink, index)
        return
    netlink.link("set", index=index, gso_max_size=shape.gso_bytes)
    netlink.tc(
        "replace",
        "tbf",
        index,
        _HANDLE,
        rate=shape.rate_bits // 8,
        burst=shape.burst_bytes,
        limit=shape.queue_bytes,
    )


def _unshape(netlink: IPRoute, index: int) -> None:
    netlink.link("set", index=index, gso_max_size=_GSO_MAX_BYTES)
    _remove(netlink, index, "tbf", _ROOT)


def _remove(netlink: IPRoute, index: int, kind: str, parent: int) -> None:
    kinds = [qdisc.get_attr("TCA_KIND") for qdisc in netlink.get_qdiscs(index=index)]
    if kind in kinds:
        netlink.tc("del", index=index, parent=parent)
