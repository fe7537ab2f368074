"""Reads the byte counters of an emulated host's network interface."""

from pathlib import Path
from typing import NamedTuple

from gradwire.testbed.hosts import Host

# Not /proc/net, which shows the namespace in which the process started.
_TABLE = Path("/proc/thread-self/net/dev")
_RECEIVED, _SENT = 0, 8


class Counters(NamedTuple):
    """Bytes since the interface was created.

    A packet that segmentation offload has not split yet counts once, with one set of headers; the
    bucket charges the link for every frame of it.
    """

    sent_bytes: int
    received_bytes: int


def counters(host: Host) -> Counters:
    lines = host.namespace.run(_TABLE.read_text).splitlines()
    rows = {
        name.strip(): numbers.split() for name, _, numbers in (ln.partition(":") for ln in lines)
    }
    own = rows[host.interface]
    return Counters(int(own[_SENT]), int(own[_RECEIVED]))
