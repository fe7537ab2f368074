"""Traffic shaping by the kernel's token bucket filter (tbf)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.comm.cost_model import format_rate, parse_rate
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_ROOT = 0xFFFFFFFF  # the parent of an interface's outermost qdisc
_HANDLE = 0x10000  # 1:0, the handle of our qdisc
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
    kinds = [qdisc.get_attr("TCA_KIND") for qdisc in netlink.get_qdiscs(index=index)]
    if "tbf" in kinds:
        netlink.tc("del", index=index, parent=_ROOT)
