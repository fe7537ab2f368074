"""Membership: who is in the quorum, who has just joined it, and whether all are set up alike.

The replicas of a new quorum introduce themselves in messages of a fixed format, before any message
whose length depends on the settings. It must stay as it is: replicas of other versions read it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from uuid import uuid4

import torch
from torch import Tensor

from gradwire.comm.base import Collective, Comm
from gradwire.comm.consistency import compare_settings, settings_collective
from gradwire.errors import ConfigError, PeerError, WireError

_MAGIC = b"gradwire"
_BYTES = 64
_JOINED, _SILENT = 1, 2


@dataclass(frozen=True)
class Introduction:
    """The 64 bytes that a replica sends about itself."""

    replica: bytes
    """A random number of 16 bytes, which a process draws when it starts."""
    digest: bytes
    """The SHA-256 of its settings."""
    joined: bool
    """True if it has received its state from a peer in this quorum."""
    silent: bool
    """True if it has nothing to contribute to the mean of this step."""

    def encode(self, device: torch.device) -> Tensor:
        flags = bytes([self.joined * _JOINED + self.silent * _SILENT])
        content = _MAGIC + flags + self.replica + self.digest
        return torch.tensor(list(content.ljust(_BYTES, b"\0")), dtype=torch.uint8, device=device)

    @staticmethod
    def decode(rank: int, message: Tensor) -> "Introduction":
        content = bytes(message.tolist())
        if not content.startswith(_MAGIC):
            raise WireError(f"replica {rank} does not introduce itself as one of gradwire.elastic")
        flags, replica, digest = content[8], content[9:25], content[25:57]
        return Introduction(replica, digest, bool(flags & _JOINED), bool(flags & _SILENT))


class Membership:
    """The replicas of the last quorum in which all introduced themselves."""

    def __init__(self) -> None:
        self._own = uuid4().bytes
        self._members: frozenset[bytes] = frozenset()
        self.contributors = 1
        """The number of replicas over which the mean of this step is taken."""
        self.quorums = self.joined = self.lost = 0

    def introduce(
        self,
        comm: Comm,
        device: torch.device,
        settings: Mapping[str, object],
        *,
        joined: bool,
        silent: bool,
    ) -> int:
        """Exchanges introductions; returns the number of replicas that have gone.

        Settings count if they are those of the first replica that was there before. Those with
        others raise ConfigError, which names all differences, and all the rest PeerError.
        """
        text = json.dumps(settings, sort_keys=True).encode()
        own = Introduction(self._own, sha256(text).digest(), joined, silent)
        collective = Collective("gather", [own.encode(device)], [_BYTES] * comm.size)
        found = [Introduction.decode(r, row) for r, row in enumerate(comm.run(collective))]
        if len({each.digest for each in found}) > 1:
            _refuse(comm, device, settings, found)
        now = frozenset(each.replica for each in found)
        gone = len(self._members - now)
        self.joined += len(now - self._members) if self._members else 0
        self.lost += gone
        self.quorums += 1
        self._members = now
        # If there is nobody else, all are silent only if there is nothing to do.
        self.contributors = max(1, sum(not each.silent for each in found))
        return gone

    def step_committed(self, size: int) -> None:
        """Notes that replicas which joined in this step take part in the next."""
        self.contributors = size


def _refuse(
    comm: Comm, device: torch.device, settings: Mapping[str, object], found: list[Introduction]
) -> None:
    """Raises the error of a replica whose settings differ, or that of the others."""
    gathered = comm.run(settings_collective(comm.size, device, settings))
    try:
        compare_settings(gathered)
    except ConfigError as error:
        text = str(error)
    else:
        raise WireError("replicas sent other settings than they introduced themselves with")
    first = next((rank for rank, each in enumerate(found) if not each.joined), 0)
    refused = [rank for rank, each in enumerate(found) if each.digest != found[first].digest]
    if comm.rank in refused:
        raise ConfigError(f"replica {comm.rank} cannot join replica {first}: {text}")
    raise PeerError(f"replicas {refused} were refused: {text}")
