"""Counts the bytes that pass through a rank's network interface, per collective."""

from dataclasses import dataclass, fields


@dataclass
class Meter:
    """Counts bytes as the usual algorithms move them, which interface counters confirm on gloo.

    Mean is a ring all-reduce, gather a ring on which blocks are forwarded, scatter is pairwise, and
    neighbors sends one message over each edge.
    `inside` means that only ranks of one node took part.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    inside_bytes: int = 0
    """Sent bytes that stayed inside the node; the others crossed between nodes."""
    message_bytes: int = 0
    """Length of this rank's messages, each counted once per collective."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0
    """Time for which a training loop that computes meanwhile was blocked by communication."""

    def mean(self, nbytes: int, size: int, *, inside: bool = False) -> None:
        ring = ring_bytes(nbytes, size)
        self._count(nbytes, ring, ring, inside)

    def add_means(self, nbytes: int, size: int, times: int) -> None:
        """Counts equal means at once, of which another library made the collectives."""
        ring = ring_bytes(nbytes, size)
        self.calls += times
        self.message_bytes += times * nbytes
        self.sent_bytes += times * ring
        self.received_bytes += times * ring

    def gather(self, nbytes: int, size: int, *, inside: bool = False) -> None:
        self._count(nbytes, (size - 1) * nbytes, (size - 1) * nbytes, inside)

    def all_to_all(self, sent: int, received: int, *, inside: bool = False) -> None:
        self._count(sent, sent, received, inside)

    def neighbors(self, nbytes: int, targets: int, received: int) -> None:
        """Counts a message of `nbytes` to every target, and what came from all sources."""
        self._count(nbytes, targets * nbytes, received, inside=False)

    def broadcast(self, nbytes: int, is_root: bool, *, inside: bool = False) -> None:
        self._count(nbytes * is_root, nbytes * is_root, nbytes * (not is_root), inside)

    def point_to_point(self, sent: int, received: int) -> None:
        """Counts a message to one rank, or from it."""
        self._count(sent, sent, received, inside=False)

    def add_time(self, encode_s: float, wire_s: float, decode_s: float) -> None:
        self.encode_s += encode_s
        self.wire_s += wire_s
        self.decode_s += decode_s

    def since(self, before: "Meter") -> "Meter":
        """Returns what was counted since a copy of this meter was made."""
        names = (field.name for field in fields(self))
        return Meter(*(getattr(self, name) - getattr(before, name) for name in names))

    def hidden(self) -> float:
        """Returns the share of the time of encoding, wire and decoding that nobody waited for."""
        exchange_s = self.encode_s + self.wire_s + self.decode_s
        return max(0.0, 1 - self.waited_s / exchange_s) if exchange_s > 0 else 0.0

    def _count(self, message: int, sent: int, received: int, inside: bool) -> None:
        self.calls += 1
        self.message_bytes += message
        self.sent_bytes += sent
        self.received_bytes += received
        self.inside_bytes += sent * inside


def ring_bytes(nbytes: int, size: int) -> int:
    """Returns how many bytes each rank sends in a ring all-reduce."""
    return 2 * (size - 1) * nbytes // size


def reduce_scatter_bytes(nbytes: int, size: int) -> int:
    """Returns how many bytes each rank sends in a reduce-scatter: half a ring all-reduce."""
    return (size - 1) * nbytes // size
