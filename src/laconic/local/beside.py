"""Conversations that go on while a worker computes: a thread, and on a GPU a stream, beside it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch

from laconic.comm.base import Comm, Conversation, drive
from laconic.comm.side import Side

Wait: TypeAlias = Callable[[], None]
"""Returns when a conversation is over, and raises what went wrong in it."""


class Beside:
    """Holds one conversation after the other, in the order in which they were started."""

    def __init__(self, device: torch.device) -> None:
        self._side = Side(device)
        self._thread = ThreadPoolExecutor(1, "laconic-local", initializer=self._side.settle)

    def start(self, conversation: Conversation[None], comm: Comm) -> Wait:
        """Begins when the GPU has done what it was given so far; what it is given later goes on."""
        over = self._thread.submit(self._hold, conversation, comm, self._side.mark())
        return lambda: self._side.join(over.result())

    def end(self, *, wait: bool) -> None:
        self._thread.shutdown(wait=wait)

    def _hold(
        self, conversation: Conversation[None], comm: Comm, begin: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """The point on the side from which on all is there that the conversation has brought."""
        with self._side.after(begin):
            drive(conversation, comm)
            return self._side.mark()
