"""What to tell when a collective fails: which one, where, how long it took, and the reason."""

import re

from laconic.errors import PeerError

# gloo puts its own source line before the reason, and advice to its developers behind it.
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
_ADVICE = " This is typically caused by"


def lost_peer(
    collective: str, rank: int, size: int, waited_s: float, error: Exception
) -> PeerError:
    """The error to raise instead of torch's own, whose reason names the peer's address."""
    first = str(error).strip().partition("\n")[0]
    reason = _SOURCE_LINE.sub("", first).partition(_ADVICE)[0].rstrip(". ")
    return PeerError(
        f"{collective} among {size} ranks failed on rank {rank} after {waited_s:.1f} s: {reason}"
    )
