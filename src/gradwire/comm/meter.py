"""Counts what passes through a rank's network interface, call by call."""

from dataclasses import dataclass


@dataclass
class Meter:
    """Bytes as the usual algorithms move them, which interface counters confirm on gloo.

    Mean is a ring all-reduce, gather a ring on which blocks are passed on, scatter is pairwise.
    `inside` says that only ranks of one node took part.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    inside_bytes: int = 0
    """How many of the sent bytes stayed inside the node; the others crossed between nodes."""
    message_bytes: int = 0
    """What this rank had to say, each message counted once a call."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0
    """How long a training loop that computes meanwhile stood still for all this."""

    def mean(self, nbytes: int, size: int, *, inside: bool = False) -> None:
        ring = ring_bytes(nbytes, size)
        self._count(nbytes, ring, ring, inside)

    def gather(self, nbytes: int, size: int, *, inside: bool = False) -> None:
        self._count(nbytes, (size - 1) * nbytes, (size - 1) * nbytes, inside)

    def scatter(self, sent: int, received: int, *, inside: bool = False) -> None:
        self._count(sent, sent, received, inside)

    def broadcast(self, nbytes: int, is_root: bool, *, inside: bool = False) -> None:
        self._count(nbytes * is_root, nbytes * is_root, nbytes * (not is_root), inside)

    def spent(self, encode_s: float, wire_s: float, decode_s: float) -> None:
        self.encode_s += encode_s
        self.wire_s += wire_s
        self.decode_s += decode_s

    def _count(self, said: int, sent: int, received: int, inside: bool) -> None:
        self.calls += 1
        self.message_bytes += said
        self.sent_bytes += sent
        self.received_bytes += received
        self.inside_bytes += sent * inside


def ring_bytes(nbytes: int, size: int) -> int:
    """What each rank sends in a ring all-reduce."""
    return 2 * (size - 1) * nbytes // size
