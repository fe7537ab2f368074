"""A worker of an asynchronous method that comes back without the process group it was lost from.

A process group cannot take back a rank. The server of an asynchronous method can: its address and
token are in the store of the process group, which a new process can reach.
"""

from datetime import timedelta

from torch._C._distributed_c10d import Store

from gradwire.checks import check_whole
from gradwire.comm.base import CollectiveProgram
from gradwire.comm.meter import Meter
from gradwire.comm.simulated import Simulated
from gradwire.comm.tcp import decode_address
from gradwire.errors import ConfigError, PeerError
from gradwire.local.workers import Wait, Workers

SERVER_KEY = "gradwire/async-server"
"""Key of the server's address and token in the store of the default process group."""


class RejoinedWorker(Workers):
    """Takes the place of a lost worker, as `process_group` of `AsyncQsparseLocalSGD`.

    `store` is a client of the store that the first processes have met at: after
    `init_process_group` with MASTER_ADDR and MASTER_PORT it is
    `torch.distributed.TCPStore(address, port, is_master=False)`.
    """

    def __init__(self, rank: int, world_size: int, store: Store) -> None:
        check_whole("RejoinedWorker", "world_size", world_size, 2)
        # The server is a thread of worker 0, so worker 0 cannot come back to it.
        check_whole("RejoinedWorker", "rank", rank, 1, world_size - 1)
        if not isinstance(store, Store):
            raise ConfigError(f"RejoinedWorker: store must be a torch store, got {store!r:.40}")
        self.rank, self.size = rank, world_size
        self.meter, self.aux_meter = Meter(), Meter()
        self._store, self._started = store, False

    def server_address(self, timeout_s: float) -> tuple[tuple[str, int], bytes]:
        """Returns the server's address and token; raises PeerError if there is no server."""
        try:
            self._store.wait([SERVER_KEY], timedelta(seconds=timeout_s))
            return decode_address(self._store.get(SERVER_KEY))
        except RuntimeError as error:
            raise PeerError(f"the store knows no server to rejoin: {error}") from error

    def run(self, program: CollectiveProgram[None], *, auxiliary: bool = False) -> None:
        """Runs the program of the startup alone; refuses all others."""
        if self._started or not auxiliary:
            raise _no_group()
        Simulated(1).run([program])
        self._started = True

    def start(self, program: CollectiveProgram[None], *, blocking: bool = False) -> Wait:
        raise _no_group()

    def check_finished(self) -> None:
        pass

    def shutdown(self, *, wait: bool) -> None:
        self._started = False

    def prepare(self, node: int | None) -> None:
        pass


def _no_group() -> ConfigError:
    return ConfigError(
        "a worker that has rejoined is in no process group: it can sync with the server, but "
        "averaged() and other collectives are not possible"
    )
