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
from gradwire.comm.tcp import PostOffice, connect, own_host
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigError, NonFiniteError
from gradwire.local.base import LocalSteps, drift_plan, message_ratio
from gradwire.local.server import Form, News, Server, news_bytes
from gradwire.local.server_protocol import Correspondence, Counter, serve
from gradwire.local.state import float_copies
from gradwire.local.workers import Group, Seat
from gradwire.memory.residual import Residual
from gradwire.spec import compressor_of, format_spec
from gradwire.types import Parts, State, mix

_LETTER = 256
"""Bytes in which worker 0 tells where the server is."""

ARRIVAL_S = 90.0
"""Who has not reached the server by then, counted from its address on, is lost."""


class AsyncQsparseLocalSGD(LocalSteps):
    """At its own times a worker tells the server C(m + anchor - x), and takes the model from there.

    The server is a thread beside worker 0. It subtracts what arrives, divided by the workers that
    are there, and answers with what the others have said since. Nobody waits for anybody else: a
    slow worker comes rarely, and one that is lost is reported in worker 0's log and no longer
    counted. Gaps between a worker's visits are `sync_every` steps, or with `gaps="random"` anything
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
        LocalSteps.__init__(self, model, optimizer, sync_every, process_group, seed, broadcast)
        if gaps not in ("fixed", "random"):
            raise ConfigError(f"gaps must be 'fixed' or 'random', got {gaps!r}")
        self.gaps, self._host, self._group = gaps, host, process_group
        self._drift_lanes = self._open(compressor)
        self._form = Form(self._drift_lanes.lanes)
        self._anchor = float_copies(self.parameters)
        # On the CPU, where letters come from and go to.
        self._server_model = float_copies(self.parameters, "cpu") if self._peers.rank == 0 else {}
        self._next = torch.tensor(self._gap(0))
        self._counter: Counter | None = None
        self._server: Server | None = None
        self._office: PostOffice | None = None
        self._patience: Timer | None = None
        self._meet, self._leave = self._meet_server, self._leave_server

    def settings(self) -> dict[str, object]:
        return {**self._drift_lanes.plan.describe(), "gaps": self.gaps}

    def planned_ratio(self) -> float:
        mean_gap = self.sync_every if self.gaps == "fixed" else (1 + self.sync_every) / 2
        return mean_gap * message_ratio(self._drift_lanes)

    def workers(self) -> list[int]:
        """Who is still there, as the server knows on worker 0."""
        if self._server is None:
            raise ConfigError("the server is beside worker 0, which alone knows who is there")
        return self._server.alive()

    def _begin(self) -> None:
        for name, copy in float_copies(self.parameters).items():
            for known in (self._anchor, self._server_model):
                if name in known:
                    known[name].copy_(copy)

    def _step(self) -> None:
        if self.steps >= int(self._next):
            self.syncs += 1
            self._next.fill_(self.steps + self._gap(self.syncs))
            self._tell()

    def _gap(self, visit: int) -> int:
        if self.gaps == "fixed":
            return self.sync_every
        return 1 + mix(self.seed, 3, self._peers.rank, visit) % self.sync_every

    def _tell(self) -> None:
        assert self._counter is not None
        step = next(iter(self._drift_lanes.lanes.values())).ctx.step
        message = self._form.pack(self._messages())
        news = self._counter.visit(self._peers.rank, step, message)
        self._peers.meter.scatter(message.numel(), news_bytes(news))
        self._take_up(news)

    def _messages(self) -> list[Parts]:
        """What this worker says; the rest stays in its residuals."""
        drifts = {name: self._drift(name, p) for name, p in self.parameters.items()}
        # All before the first is taken: what is not told must stay in no residual.
        for name, drift in drifts.items():
            if not drift.isfinite().all():
                raise NonFiniteError(f"parameter {name!r} is not finite; the server is not told")
        messages = []
        for name, drift in drifts.items():
            lane = self._drift_lanes.lanes[name]
            then, _ = lane.begin()
            given = lane.memory.before(drift, lane.memory_state, then)
            assert isinstance(lane.compressor, OneRound)
            messages.append(encode_with_feedback(lane.compressor, given, lane.ctx))
            lane.keep()
        return messages

    def _drift(self, name: str, parameter: Tensor) -> Tensor:
        start = self._anchor[name].to(parameter.dtype).to(torch.float32, copy=True)
        return start.sub_(parameter.detach().reshape(-1))

    def _take_up(self, news: News) -> None:
        """Brings the anchor to where the server is, and the parameters to the anchor."""
        if isinstance(news, dict):
            for name, tensor in news.items():
                self._anchor[name].copy_(tensor)
        else:
            for said in news:
                self._form.apply(self._anchor, said)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._anchor[name].view(parameter.shape))

    def _meet_server(self) -> CollectiveProgram[None]:
        """Worker 0 opens the server, and tells the others where."""
        first = self._peers.rank == 0
        if first:
            self._server = Server(self._server_model, self._form, self._peers.size)
            if self.steps:
                self._server.catch_up()
        if isinstance(self._group, Seat):
            self._counter = self._group.share("server", self._server)
            return
        yield from self._exchange_addresses()

    def _exchange_addresses(self) -> CollectiveProgram[None]:
        where = b""
        if self._server is not None:
            server, token = self._server, secrets.token_bytes(16)
            host = own_host() if self._host is None else self._host
            self._office = PostOffice(host, token, lambda box: serve(server, box))
            where = json.dumps([*self._office.address, token.hex()]).encode()
        letter = torch.frombuffer(bytearray(where.ljust(_LETTER)), dtype=torch.uint8)
        [told] = yield Collective("broadcast", [letter.to(self.device)])
        host, port, key = json.loads(bytes(told.tolist()))
        box = connect((host, port), bytes.fromhex(key))
        self._counter = Correspondence(box, self._peers.rank, self._anchor)
        if self._server is not None:
            self._patience = Timer(ARRIVAL_S, self._server.give_up_waiting)
            self._patience.daemon = True
            self._patience.start()

    def _leave_server(self, failed: bool) -> None:
        if self._counter is not None:
            self._counter.leave(self._peers.rank)
        if self._server is not None and self._office is not None:
            if not failed:
                self._server.wait_until_all_left()
            self._office.close()
        if self._patience is not None:
            self._patience.cancel()

    def _lanes(self) -> Sequence[Engine]:
        return [self._drift_lanes]

    def _tensors(self) -> dict[str, State]:
        own = {"anchor": self._anchor, "next": {"visit": self._next}}
        return {**own, "server": self._server_model}

    def _common(self) -> Mapping[str, Tensor]:
        # Workers have come at different times, and know different models.
        return {}

    def _open(self, compressor: Compressor | str) -> Engine:
        chosen = compressor_of(compressor)
        if not isinstance(chosen, OneRound):
            raise ConfigError(
                f"AsyncQsparseLocalSGD: {format_spec(chosen)} talks with all workers in rounds; "
                "use a method whose message says it all"
            )
        rank, size, tensors = self._peers.rank, self._peers.size, self.parameters
        name = type(self).__name__
        plan = drift_plan(name, chosen, Residual(), "gather", tensors.values(), size)
        return Engine(plan, tensors, rank, size, self.seed, "ignore")
