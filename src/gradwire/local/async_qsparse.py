"""Asynchronous Qsparse-local-SGD: every worker syncs with a server at its own times.

Basu, Data, Karakus & Diggavi 2019, arXiv:1906.02367, the asynchronous algorithm.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Timer
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.base import Compressor, OneRound, encode_with_feedback
from gradwire.checks import check_number
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.tcp import Listener, decode_address, encode_address, own_host, root_store
from gradwire.engine.engine import Engine
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError, NonFiniteError, WireError
from gradwire.local.base import LocalMethod, drift_plan, message_ratio
from gradwire.local.optimizers import Optimizers
from gradwire.local.rejoin import SERVER_KEY, RejoinedWorker
from gradwire.local.server import MessageFormat, Reply, Server, nonfinite_name, reply_bytes
from gradwire.local.server_protocol import RemoteServer, ServerAddress, ServerEndpoint, serve
from gradwire.local.state import float_copies
from gradwire.local.workers import Group, SimulatedWorker
from gradwire.memory.residual import Residual
from gradwire.spec import compressor_of, format_spec
from gradwire.types import Parts, State, mix
from gradwire.version import VERSION

log = logging.getLogger("gradwire")

_ADDRESS_BYTES = 256
"""Length of the buffer in which worker 0 broadcasts the server's address."""

MAX_TIMEOUT_S = 1e6


class AsyncQsparseLocalSGD(LocalMethod):
    """Sends C(m + anchor - x) to a server at each worker's own times, and gets the model from it.

    The server is a thread of worker 0. It subtracts each message, divided by the number of workers
    that are connected, and answers with what the others have sent since. No worker waits for
    another: a slow one syncs rarely, and a lost one is reported in worker 0's log and no longer
    counted. Gaps between a worker's syncs are `sync_every` steps, or with `gaps="random"` anything
    from 1 to that. The server listens at `host`, by default at the address by which worker 0
    reaches the process group's store.

    Every wait for another process ends after `timeout_s`. A worker that has not finished an
    optimiser step for that long is lost; if it comes back it gets the server's model and continues.
    Worker 0 leaves the context when all others have left it or are lost. Without the server the
    others raise PeerError. A new process takes the place of a lost one with
    `process_group=RejoinedWorker(...)`.
    """

    takes_shards: ClassVar = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        compressor: Compressor | str = "topk:ratio=0.01 | qsgd:bits=4",
        *,
        sync_every: int,
        gaps: Literal["fixed", "random"] = "fixed",
        process_group: Group = None,
        host: str | None = None,
        timeout_s: float = 300.0,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        LocalMethod.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        if gaps not in ("fixed", "random"):
            raise ConfigError(f"gaps must be 'fixed' or 'random', got {gaps!r}")
        name = type(self).__name__
        check_number(name, "timeout_s", timeout_s)
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"{name}: timeout_s must be in (0, {MAX_TIMEOUT_S:g}], got {timeout_s}"
            )
        self.gaps, self.timeout_s = gaps, float(timeout_s)
        self._host, self._group = host, process_group
        self._engine = self._make_engine(compressor)
        self._format = MessageFormat(self._engine.lanes)
        self._anchor = float_copies(self.parameters)
        # On the CPU, where the messages of TCP connections are.
        self._server_model = float_copies(self.parameters, "cpu") if self._workers.rank == 0 else {}
        self._next_sync = torch.tensor(self._gap(0))
        self._endpoint: ServerEndpoint | None = None
        self._server: Server | None = None
        self._listener: Listener | None = None
        self._connect_timer: Timer | None = None
        self._connect, self._disconnect = self._connect_server, self._leave_server
        self._own_stats = self._connection_stats

    def settings(self) -> dict[str, object]:
        return {**self._engine.plan.identity(), "gaps": self.gaps}

    def planned_ratio(self) -> float:
        mean_gap = self.sync_every if self.gaps == "fixed" else (1 + self.sync_every) / 2
        return mean_gap * message_ratio(self._engine)

    def workers(self) -> list[int]:
        """Returns the ranks that are still connected; on worker 0 only, which has the server."""
        if self._server is None:
            raise ConfigError("only worker 0 has the server, which knows the connected workers")
        return self._server.alive()

    def _initialize(self) -> None:
        for name, copy in float_copies(self.parameters).items():
            for tensors in (self._anchor, self._server_model):
                if name in tensors:
                    tensors[name].copy_(copy)

    def _step(self) -> None:
        if self.steps >= int(self._next_sync):
            self.syncs += 1
            self._next_sync.fill_(self.steps + self._gap(self.syncs))
            self._sync()
        elif self._endpoint is not None:
            self._endpoint.ping(self._workers.rank)

    def _gap(self, sync: int) -> int:
        if self.gaps == "fixed":
            return self.sync_every
        return 1 + mix(self.seed, 3, self._workers.rank, sync) % self.sync_every

    def _sync(self) -> None:
        assert self._endpoint is not None
        lanes = self._engine.lanes.values()
        try:
            message = self._format.pack(self._encode_drifts())
            reply = self._endpoint.sync(self._workers.rank, self._message_step(), message)
        except BaseException:
            # The sync has failed for this worker: drift and residual stay as they were.
            for lane in lanes:
                lane.discard()
            raise
        for lane in lanes:
            lane.commit()
        self._workers.meter.all_to_all(message.numel(), reply_bytes(reply))
        self._apply(reply)

    def _message_step(self) -> int:
        """Returns the number of messages that this worker has sent, which is that of the next."""
        return next(iter(self._engine.lanes.values())).ctx.step

    def _encode_drifts(self) -> list[Parts]:
        """Encodes the drifts of all parameters; the rest becomes the lanes' pending residuals."""
        messages = []
        for name, parameter in self.parameters.items():
            drift = self._drift(name, parameter)
            if not drift.isfinite().all():
                raise NonFiniteError(f"parameter {name!r} is not finite; nothing is sent")
            lane = self._engine.lanes[name]
            pending, _ = lane.begin_step()
            ef = lane.memory.before(drift, lane.memory_state, pending)
            assert isinstance(lane.compressor, OneRound)
            parts = encode_with_feedback(lane.compressor, ef, lane.ctx)
            if not _all_finite([*parts, *pending.values()]):
                raise NonFiniteError(
                    f"the drift of parameter {name!r} overflows the number format of "
                    f"{format_spec(lane.compressor)}; nothing is sent"
                )
            messages.append(parts)
        return messages

    def _drift(self, name: str, parameter: Tensor) -> Tensor:
        start = self._anchor[name].to(parameter.dtype).to(torch.float32, copy=True)
        return start.sub_(parameter.detach().reshape(-1))

    def _apply(self, reply: Reply) -> None:
        """Brings the anchor to the server's model, and the parameters to the anchor."""
        anchor = {name: tensor.clone() for name, tensor in self._anchor.items()}
        if isinstance(reply, dict):
            for name, tensor in reply.items():
                anchor[name].copy_(tensor)
        else:
            for update in reply:
                self._format.apply(anchor, update)
        bad = nonfinite_name(anchor)
        if bad is not None:
            raise WireError(f"the server's updates make parameter {bad!r} non-finite")
        self._anchor.update(anchor)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._anchor[name].view(parameter.shape))

    def _connect_server(self) -> CollectiveProgram[None]:
        """Starts the server on worker 0, and connects all workers to it."""
        if self._workers.rank == 0:
            self._server = Server(self._server_model, self._format, self._workers.size)
            if self.steps:
                self._server.resend_model()
        if isinstance(self._group, SimulatedWorker):
            self._endpoint = self._group.share("server", self._server)
            self._endpoint.join(self._workers.rank, self._message_step())
            return
        try:
            if isinstance(self._group, RejoinedWorker):
                self._rejoin(self._group)
            else:
                yield from self._connect_over_tcp()
        except BaseException:
            # The context is not entered, so nothing else would end the server.
            self._leave_server(failed=True)
            raise

    def _connect_over_tcp(self) -> CollectiveProgram[None]:
        text, settings = "", self._settings_digest()
        if self._server is not None:
            server, token = self._server, secrets.token_bytes(16)
            host = own_host() if self._host is None else self._host
            self._listener = Listener(
                host, token, lambda connection: serve(server, connection, settings), self.timeout_s
            )
            text = encode_address(self._listener.address, token)
            if self._publishes_address():
                root_store().set(SERVER_KEY, text)
        buffer = torch.frombuffer(bytearray(text.encode().ljust(_ADDRESS_BYTES)), dtype=torch.uint8)
        [received] = yield Collective("broadcast", [buffer.to(self.device)])
        address, token = decode_address(bytes(received.tolist()))
        self._join(ServerAddress(address, token, settings))
        if self._server is not None:
            self._connect_timer = Timer(self.timeout_s, self._server.drop_unconnected)
            self._connect_timer.daemon = True
            self._connect_timer.start()

    def _join(self, where: ServerAddress) -> int:
        """Connects to a remote server; returns the step that it expects of the next message."""
        remote = RemoteServer(where, self._anchor, self._workers.size, self.timeout_s)
        self._endpoint = remote
        return remote.join(self._workers.rank, self._message_step())

    def _rejoin(self, worker: RejoinedWorker) -> None:
        """Takes the place of a lost worker, with the server's model."""
        address, token = worker.server_address(self.timeout_s)
        step = self._join(ServerAddress(address, token, self._settings_digest()))
        assert self._endpoint is not None
        if step != self._message_step():
            log.warning(
                "worker %d rejoins with the state of message %d where the server expects %d: its "
                "residual is dropped, since later messages had a part of it",
                *(worker.rank, self._message_step(), step),
            )
            for lane in self._engine.lanes.values():
                _restart(lane, step)
        model = self._endpoint.fetch(worker.rank)
        worker.meter.all_to_all(0, reply_bytes(model))
        self._apply(model)

    def _settings_digest(self) -> bytes:
        """Returns a digest of what a worker must have in common with the server."""
        common = {"version": VERSION, "world_size": self._workers.size}
        code = self._engine.plan.code_digests()
        text = json.dumps({**self._identity(), **common, "code": code}, sort_keys=True)
        return hashlib.sha256(text.encode()).digest()

    def _publishes_address(self) -> bool:
        """Returns whether lost workers may find the server: the key is for the default group."""
        return self._group is None or self._group is dist.group.WORLD

    def _leave_server(self, failed: bool) -> None:
        if self._endpoint is not None:
            self._endpoint.leave(self._workers.rank, failed=failed)
        if self._server is None or self._listener is None:
            return
        try:
            if not failed:
                self._server.wait_until_all_left()
        finally:
            self._close_listener()
        lost = self._server.lost_ranks()
        if lost:
            log.warning("worker 0 has left; workers %s were lost and have not rejoined", lost)

    def _close_listener(self) -> None:
        assert self._server is not None
        assert self._listener is not None
        if self._connect_timer is not None:
            self._connect_timer.cancel()
        self._server.close()
        self._listener.close()
        if self._publishes_address():
            # The store may have ended before this process.
            with suppress(RuntimeError):
                root_store().delete_key(SERVER_KEY)

    def _connection_stats(self) -> dict[str, object]:
        remote = self._endpoint if isinstance(self._endpoint, RemoteServer) else None
        own: dict[str, object] = {"reconnects": 0 if remote is None else remote.reconnects}
        if self._server is None:
            return own
        return {
            **own,
            "lost_workers": self._server.lost,
            "rejoined_workers": self._server.rejoined,
            "refused_updates": self._server.refused_updates,
            "refused_connections": 0 if self._listener is None else self._listener.refused,
        }

    def _engines(self) -> Sequence[Engine]:
        return [self._engine]

    def _tensors(self) -> dict[str, State]:
        own = {"anchor": self._anchor, "next_sync": {"step": self._next_sync}}
        # While the server runs its model may change at any time.
        if self._server is not None and self._follower is not None:
            return {**own, "server": self._server.snapshot()}
        return {**own, "server": self._server_model}

    def _common(self) -> Mapping[str, Tensor]:
        # Workers have synchronised at different times, and have different models.
        return {}

    def _make_engine(self, compressor: Compressor | str) -> Engine:
        chosen = compressor_of(compressor)
        if not isinstance(chosen, OneRound):
            raise ConfigError(
                f"AsyncQsparseLocalSGD: {format_spec(chosen)} communicates with all workers in "
                "several rounds; use a method that sends one message"
            )
        rank, size, tensors = self._workers.rank, self._workers.size, self.parameters
        name = type(self).__name__
        plan = drift_plan(name, chosen, Residual(), "gather", tensors.values(), size)
        # With any policy but "ignore" a message that was not sent leaves the residual as it was.
        return Engine(plan, tensors, rank, size, self.seed, "raise")


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


def _restart(lane: Lane, step: int) -> None:
    """Empties a lane's memory, and continues at a step."""
    lane.memory_state = lane.memory.state(lane.ctx.numel, lane.device)
    lane.ctx = lane.ctx._replace(step=step)
