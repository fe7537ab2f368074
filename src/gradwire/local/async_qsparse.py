"""Asynchronous Qsparse-local-SGD: every worker syncs with a server at its own times.

Basu, Data, Karakus & Diggavi 2019, arXiv:1906.02367, the asynchronous algorithm.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from threading import Timer
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base import Compressor, OneRound, encode_with_feedback
from gradwire.comm.base import Collective, CollectiveProgram
from gradwire.comm.tcp import Listener, connect, own_host
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.local.base import LocalMethod, drift_plan, message_ratio
from gradwire.local.server import MessageFormat, Reply, Server, reply_bytes
from gradwire.local.server_protocol import RemoteServer, ServerEndpoint, serve
from gradwire.local.state import float_copies
from gradwire.local.workers import Group, SimulatedWorker
from gradwire.memory.residual import Residual
from gradwire.spec import compressor_of, format_spec
from gradwire.types import Parts, State, mix

_ADDRESS_BYTES = 256
"""Length of the buffer in which worker 0 broadcasts the server's address."""

CONNECT_TIMEOUT_S = 90.0
"""A worker that has not connected this long after the broadcast of the address is lost."""


class AsyncQsparseLocalSGD(LocalMethod):
    """Sends C(m + anchor - x) to a server at each worker's own times, and gets the model from it.

    The server is a thread of worker 0. It subtracts each message, divided by the number of workers
    that are connected, and answers with what the others have sent since. No worker waits for
    another: a slow one syncs rarely, and a lost one is reported in worker 0's log and no longer
    counted. Gaps between a worker's syncs are `sync_every` steps, or with `gaps="random"` anything
    from 1 to that. Worker 0 leaves the context when all have. The server listens at `host`, by
    default at the address by which worker 0 reaches the process group's store.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: Compressor | str = "topk:ratio=0.01 | qsgd:bits=4",
        *,
        sync_every: int,
        gaps: Literal["fixed", "random"] = "fixed",
        process_group: Group = None,
        host: str | None = None,
        seed: int = 0,
        broadcast: bool = False,
    ) -> None:
        LocalMethod.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        if gaps not in ("fixed", "random"):
            raise ConfigError(f"gaps must be 'fixed' or 'random', got {gaps!r}")
        self.gaps, self._host, self._group = gaps, host, process_group
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

    def settings(self) -> dict[str, object]:
        return {**self._engine.plan.describe(), "gaps": self.gaps}

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

    def _gap(self, sync: int) -> int:
        if self.gaps == "fixed":
            return self.sync_every
        return 1 + mix(self.seed, 3, self._workers.rank, sync) % self.sync_every

    def _sync(self) -> None:
        assert self._endpoint is not None
        step = next(iter(self._engine.lanes.values())).ctx.step
        message = self._format.pack(self._encode_drifts())
        reply = self._endpoint.sync(self._workers.rank, step, message)
        self._workers.meter.all_to_all(message.numel(), reply_bytes(reply))
        self._apply(reply)

    def _encode_drifts(self) -> list[Parts]:
        """Encodes the drifts of all parameters; the rest stays in the residuals."""
        drifts = {name: self._drift(name, p) for name, p in self.parameters.items()}
        # Checked before the first is encoded, so that no residual changes if nothing is sent.
        for name, drift in drifts.items():
            if not drift.isfinite().all():
                raise NonFiniteError(f"parameter {name!r} is not finite; nothing is sent")
        messages = []
        for name, drift in drifts.items():
            lane = self._engine.lanes[name]
            pending, _ = lane.begin_step()
            ef = lane.memory.before(drift, lane.memory_state, pending)
            assert isinstance(lane.compressor, OneRound)
            messages.append(encode_with_feedback(lane.compressor, ef, lane.ctx))
            lane.commit()
        return messages

    def _drift(self, name: str, parameter: Tensor) -> Tensor:
        start = self._anchor[name].to(parameter.dtype).to(torch.float32, copy=True)
        return start.sub_(parameter.detach().reshape(-1))

    def _apply(self, reply: Reply) -> None:
        """Brings the anchor to the server's model, and the parameters to the anchor."""
        if isinstance(reply, dict):
            for name, tensor in reply.items():
                self._anchor[name].copy_(tensor)
        else:
            for update in reply:
                self._format.apply(self._anchor, update)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._anchor[name].view(parameter.shape))

    def _connect_server(self) -> CollectiveProgram[None]:
        """Starts the server on worker 0, and connects all workers to it."""
        first = self._workers.rank == 0
        if first:
            self._server = Server(self._server_model, self._format, self._workers.size)
            if self.steps:
                self._server.resend_model()
        if isinstance(self._group, SimulatedWorker):
            self._endpoint = self._group.share("server", self._server)
            return
        yield from self._connect_over_tcp()

    def _connect_over_tcp(self) -> CollectiveProgram[None]:
        text = b""
        if self._server is not None:
            server, token = self._server, secrets.token_bytes(16)
            host = own_host() if self._host is None else self._host
            self._listener = Listener(host, token, lambda connection: serve(server, connection))
            text = json.dumps([*self._listener.address, token.hex()]).encode()
        address = torch.frombuffer(bytearray(text.ljust(_ADDRESS_BYTES)), dtype=torch.uint8)
        [received] = yield Collective("broadcast", [address.to(self.device)])
        host, port, key = json.loads(bytes(received.tolist()))
        connection = connect((host, port), bytes.fromhex(key))
        self._endpoint = RemoteServer(connection, self._workers.rank, self._anchor)
        if self._server is not None:
            self._connect_timer = Timer(CONNECT_TIMEOUT_S, self._server.drop_unconnected)
            self._connect_timer.daemon = True
            self._connect_timer.start()

    def _leave_server(self, failed: bool) -> None:
        if self._endpoint is not None:
            self._endpoint.leave(self._workers.rank)
        if self._server is not None and self._listener is not None:
            if not failed:
                self._server.wait_until_all_left()
            self._listener.close()
        if self._connect_timer is not None:
            self._connect_timer.cancel()

    def _engines(self) -> Sequence[Engine]:
        return [self._engine]

    def _tensors(self) -> dict[str, State]:
        own = {"anchor": self._anchor, "next_sync": {"step": self._next_sync}}
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
        return Engine(plan, tensors, rank, size, self.seed, "ignore")
