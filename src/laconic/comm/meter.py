"""Counts what passes through a rank's network interface, call by call."""

from dataclasses import dataclass


@dataclass
class Meter:
    """Bytes as the usual algorithms move them, which interface counters confirm on gloo.

    Mean is a ring all-reduce, gather a ring on which blocks are passed on, scatter is pairwise.
    """

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    message_bytes: int = 0
    """What this rank had to say, each message counted once."""
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0

    def mean(self, nbytes: int, size: int) -> None:
        ring = ring_bytes(nbytes, size)
        self._count(nbytes, ring, ring)

    def gather(self, nbytes: int, size: int) -> None:
        self._count(nbytes, (size - 1) * nbytes, (size - 1) * nbytes)

    def scatter(self, sent: int, received: int) -> None:
        self._count(sent, sent, received)

    def broadcast(self, nbytes: int, is_root: bool) -> None:
        self._count(nbytes * is_root, nbytes * is_root, nbytes * (not is_root))

    def spent(self, encode_s: float, wire_s: float, decode_s: float) -> None:
        self.encode_s += encode_s
        self.wire_s += wire_s
        self.decode_s += decode_s

    def _count(self, said: int, sent: int, received: int) -> None:
        self.calls += 1
        self.message_bytes += said
        self.sent_bytes += sent
        self.received_bytes += received


def ring_bytes(nbytes: int, size: int) -> int:
    """What each rank sends in a ring all-reduce."""
    return 2 * (size - 1) * nbytes // size
