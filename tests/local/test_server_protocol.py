"""The protocol of the remote server: messages are decoded as encoded, or refused.

A connection speaks for one rank, each message counts once, and no client disturbs another.
"""

import random
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from local_workers import plain_sgd, small_model, take_step
from torch import nn
from torch.distributed import HashStore

from deadlines import scaled
from gradwire.comm.tcp import Connection, Listener, connect, encode_address
from gradwire.compressors.none import NoCompression
from gradwire.engine.make_plan import open_lane
from gradwire.errors import ConfigError, NonFiniteError, PeerError, WireError
from gradwire.local import AsyncQsparseLocalSGD, RejoinedWorker
from gradwire.local.rejoin import SERVER_KEY
from gradwire.local.server import UPDATE_HEADER, MessageFormat, Server, Update
from gradwire.local.server_protocol import (
    _HELLO,
    RemoteServer,
    ServerAddress,
    _answer,
    _decode_reply,
    _encode_reply,
    _welcome,
    serve,
)
from gradwire.local.state import float_copies
from gradwire.memory.none import NoMemory
from gradwire.types import EncodeContext

LIKE = {"a": torch.arange(5.0), "b": torch.arange(3.0) - 7}
UPDATES = [
    Update(2, 9, 0.25, torch.arange(40, dtype=torch.uint8)),
    Update(0, 4, 0.5, torch.empty(0, dtype=torch.uint8)),
    Update(1, 1 << 40, 1 / 3, torch.full((7,), 255, dtype=torch.uint8)),
]
TOKEN = b"0123456789abcdef"
SETTINGS = bytes(range(32))


def test_updates_are_decoded_as_encoded() -> None:
    read = _decode_reply(_encode_reply(UPDATES), LIKE, 3)
    assert isinstance(read, list)
    for one, other in zip(read, UPDATES, strict=True):
        assert one[:3] == other[:3]
        assert torch.equal(one.message, other.message)
    assert _decode_reply(_encode_reply([]), LIKE, 3) == []


def test_a_model_is_decoded_as_encoded() -> None:
    read = _decode_reply(_encode_reply(LIKE), LIKE, 3)
    assert isinstance(read, dict)
    assert all(torch.equal(read[name], LIKE[name]) for name in LIKE)


@pytest.mark.parametrize("length", [-UPDATE_HEADER.size, -1, 41, 1 << 40, -(1 << 62)])
def test_invalid_lengths_are_refused(length: int) -> None:
    """One of them would make the decoder read the same header forever."""
    data = b"\0" + struct.pack("<iqdq", 2, 9, 0.25, length) + bytes(40)
    with pytest.raises(WireError, match=f"a message of {length} bytes where 40 are left"):
        _decode_reply(data, LIKE, 3)


@pytest.mark.parametrize("data", [b"", b"\3abc", b"\1abc", b"\0abc", b"\2abc"])
def test_invalid_replies_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="the server"):
        _decode_reply(data, LIKE, 3)


@pytest.mark.parametrize(
    ("rank", "step", "weight"),
    [(3, 0, 0.5), (-1, 0, 0.5), (0, -1, 0.5), (0, 0, torch.nan), (0, 0, torch.inf), (0, 0, 2.0)],
)
def test_updates_of_impossible_senders_are_refused(rank: int, step: int, weight: float) -> None:
    data = b"\0" + struct.pack("<iqdq", rank, step, weight, 0)
    with pytest.raises(WireError, match=f"an update of rank {rank}, step {step}"):
        _decode_reply(data, LIKE, 3)


def test_a_model_that_is_not_finite_is_refused() -> None:
    with pytest.raises(WireError, match="a model in which 'b' is not finite"):
        _decode_reply(_encode_reply({**LIKE, "b": torch.full((3,), torch.nan)}), LIKE, 3)


def test_hostile_replies_are_decoded_or_refused() -> None:
    rng, counts = random.Random(0), [0, 0]
    for number in range(20_000):
        data = bytearray(_encode_reply(UPDATES if number % 2 else LIKE))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if number % 3 == 0:
            del data[rng.randrange(len(data)) :]
        try:
            _decode_reply(bytes(data), LIKE, 3)
            counts[0] += 1
        except WireError:
            counts[1] += 1
    assert min(counts) > 1000


def dense_server(workers: int) -> Server:
    """Returns a server of eight zeros, to which messages of ones are sent."""
    ctx = EncodeContext((8,))
    lane = open_lane("w", NoCompression(), NoMemory(), "gather", ctx, torch.device("cpu"))
    return Server({"w": torch.zeros(8)}, MessageFormat({"w": lane}), workers)


ONES = torch.ones(8).view(torch.uint8)


@contextmanager
def serving(server: Server, timeout_s: float = 5.0, answer: Any = serve) -> Iterator[Listener]:
    def answer_one(connection: Connection) -> None:
        answer(server, connection, SETTINGS)

    listener = Listener("127.0.0.1", TOKEN, answer_one, timeout_s)
    try:
        yield listener
    finally:
        server.close()
        listener.close()


def remote_of(
    listener: Listener, settings: bytes = SETTINGS, timeout_s: float = 5.0
) -> RemoteServer:
    where = ServerAddress(listener.address, TOKEN, settings)
    return RemoteServer(where, {"w": torch.zeros(8)}, 2, timeout_s)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + scaled(5)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_is_gone_is_named() -> None:
    with serving(dense_server(2)) as listener:
        remote = remote_of(listener)
        remote.join(1, 0)
    start = time.monotonic()
    with pytest.raises(PeerError, match="the server on worker 0 is gone: nobody answers"):
        remote.sync(1, 0, ONES)
    assert time.monotonic() - start < scaled(2)
    remote.leave(1)


def test_a_server_that_does_not_answer_is_noticed_by_the_deadline() -> None:
    def silent(server: Server, connection: Connection, settings: bytes) -> None:
        assert _welcome(server, connection, settings) == 1
        time.sleep(1)

    with serving(dense_server(2), answer=silent) as listener:
        remote = remote_of(listener, timeout_s=0.4)
        remote.join(1, 0)
        start = time.monotonic()
        with pytest.raises(PeerError, match="the server on worker 0 is gone: no complete message"):
            remote.sync(1, 0, ONES)
        assert 0.3 < time.monotonic() - start < scaled(0.9)
        remote.leave(1, failed=True)


@pytest.mark.parametrize(
    ("rank", "settings", "reason"),
    [
        (2, SETTINGS, "rank must be 0 to 1, got 2"),
        (-1, SETTINGS, "rank must be 0 to 1, got -1"),
        (1, bytes(32), "rank 1 has other settings"),
    ],
)
def test_a_worker_that_does_not_belong_is_refused(rank: int, settings: bytes, reason: str) -> None:
    server = dense_server(2)
    with serving(server) as listener:
        remote = remote_of(listener, settings)
        with pytest.raises(PeerError, match=f"worker 0 refuses worker {rank}: {reason}"):
            remote.join(rank, 0)
    assert server.alive() == [0, 1]


def test_a_rank_has_one_connection_at_a_time() -> None:
    server = dense_server(2)
    with serving(server) as listener:
        first, second = remote_of(listener), remote_of(listener, timeout_s=0.3)
        first.join(1, 0)
        with pytest.raises(PeerError, match="refuses worker 1: worker 1 is connected already"):
            second.join(1, 0)
        first.sync(1, 0, ONES)
        first._disconnect()
        # It waits until the server has noticed that the first is gone.
        assert second.join(1, 0) == 1
        second.leave(1)
    assert (server.lost, server.rejoined) == (1, 1)


def test_a_silent_worker_is_lost_by_the_deadline_and_a_slow_one_is_not() -> None:
    """A worker that takes steps sends pings between its syncs."""
    server = dense_server(2)
    with serving(server, timeout_s=0.4) as listener:
        silent, slow = remote_of(listener), remote_of(listener)
        silent.join(0, 0)
        slow.join(1, 0)
        start = time.monotonic()
        while time.monotonic() - start < 1:
            slow.ping(1)
            time.sleep(0.02)
        assert server.alive() == [1]
        slow.sync(1, 0, ONES)
        # The silent one comes back by itself, and its message counts once.
        silent.sync(0, 0, ONES)
        assert (silent.reconnects, slow.reconnects) == (1, 0)
        assert server.alive() == [0, 1]
        silent.leave(0)
        slow.leave(1)
        wait_for(lambda: not server.alive())
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 - 1 / 2))


def test_a_message_whose_reply_was_lost_counts_once() -> None:
    server, requests = dense_server(1), []

    def lose_first_reply(server: Server, connection: Connection, settings: bytes) -> None:
        rank = _welcome(server, connection, settings)
        if rank is None:
            return
        requests.append(rank)
        if len(requests) == 1:
            connection.send = lambda _: connection.close()  # type: ignore[method-assign]
        try:
            while _answer(server, rank, connection):
                pass
        except (PeerError, OSError) as error:
            server.drop(rank, error)

    with serving(server, answer=lose_first_reply) as listener:
        remote = remote_of(listener)
        remote.join(0, 0)
        model = remote.sync(0, 0, ONES)
        assert isinstance(model, dict)
        torch.testing.assert_close(model["w"], torch.full((8,), -1.0))
        remote.sync(0, 1, ONES)
        assert remote.reconnects == 1
        remote.leave(0)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -2.0))


def test_a_late_reply_is_not_taken_for_the_next_one() -> None:
    server = dense_server(1)

    def late(server: Server, connection: Connection, settings: bytes) -> None:
        rank = _welcome(server, connection, settings)
        if rank is not None:
            send = connection.send
            connection.send = lambda data: (time.sleep(0.5), send(data))  # type: ignore[assignment]
            with suppress(PeerError):
                _answer(server, rank, connection)
            server.drop(rank, "a test")

    with serving(server, answer=late) as listener:
        remote = remote_of(listener, timeout_s=0.2)
        remote.join(0, 0)
        with pytest.raises(PeerError, match="the server on worker 0 is gone: no complete"):
            remote.sync(0, 0, ONES)
        wait_for(lambda: not server.alive())
        # The message has counted, so another one of the same step must not.
        with pytest.raises(PeerError, match="expects message 1 of worker 0, not 0: rejoin"):
            remote.sync(0, 0, ONES)
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1.0))


def test_an_update_that_is_not_finite_is_refused_and_the_worker_continues() -> None:
    server = dense_server(1)
    with serving(server) as listener:
        remote = remote_of(listener)
        remote.join(0, 0)
        with pytest.raises(NonFiniteError, match="the server refused the update"):
            remote.sync(0, 0, torch.full((8,), torch.nan).view(torch.uint8))
        remote.sync(0, 0, ONES)
        remote.leave(0)
    assert server.refused_updates == 1
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1.0))


def frame(data: bytes) -> bytes:
    return struct.pack("<q", len(data)) + data


def sync_request(step: int, data: bytes = bytes(ONES.numpy())) -> bytes:
    return frame(b"\0" + struct.pack("<q", step) + data)


HELLO = frame(TOKEN) + frame(_HELLO.pack(1, 0, SETTINGS))

HOSTILE = {
    "nothing": b"",
    "noise": random.Random(0).randbytes(5000),
    "wrong token": frame(b"0123456789abcdeX") + HELLO,
    "token of 1 GiB": struct.pack("<q", 1 << 30) + bytes(25),
    "negative length": struct.pack("<q", -1),
    "no handshake": frame(TOKEN) + sync_request(0),
    "handshake of 1 GiB": frame(TOKEN) + struct.pack("<q", 1 << 30),
    "rank that does not exist": frame(TOKEN) + frame(_HELLO.pack(99, 0, SETTINGS)),
    "rank of another": frame(TOKEN) + frame(_HELLO.pack(0, 0, SETTINGS)) + sync_request(0),
    "step of a handshake": frame(TOKEN) + frame(_HELLO.pack(1, -5, SETTINGS)),
    "other settings": frame(TOKEN) + frame(_HELLO.pack(1, 0, bytes(32))),
    "request of 1 GiB": HELLO + struct.pack("<q", 1 << 30) + bytes(25),
    "jump": HELLO + sync_request(5),
    "negative step": HELLO + sync_request(-1),
    "short message": HELLO + sync_request(0, b"abc"),
    "long message": HELLO + sync_request(0, bytes(33)),
    "no step": HELLO + frame(b"\0abc"),
    "unknown request": HELLO + frame(b"\7"),
    "empty request": HELLO + frame(b""),
    "request with more": HELLO + frame(b"\2abc"),
    "half a request": HELLO + sync_request(0)[:-1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_clients_are_disconnected_and_disturb_nobody(name: str) -> None:
    server = dense_server(2)
    with serving(server, timeout_s=0.3) as listener:
        honest = remote_of(listener)
        honest.join(0, 0)
        tracemalloc.start()
        with socket.create_connection(listener.address) as client:
            client.sendall(HOSTILE[name])
            for step in range(3):
                honest.sync(0, step, ONES)
            client.settimeout(3)
            try:
                while client.recv(4096):
                    honest.ping(0)
            except ConnectionResetError:
                pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 << 20
        honest.sync(0, 3, ONES)
        honest.leave(0)
        wait_for(lambda: 0 not in server.alive())
    # Worker 0 alone has moved the model: by 1/2 with worker 1 in the count, else by 1.
    moved = -float(server.model["w"][0])
    assert 2 <= moved <= 4
    assert server.model["w"].eq(-moved).all()
    assert server.alive() == [1] or server.lost_ranks() == [1]


def test_a_replayed_message_counts_once() -> None:
    server = dense_server(2)
    with serving(server) as listener, socket.create_connection(listener.address) as client:
        client.sendall(HELLO + 3 * sync_request(0))
        wait_for(lambda: server.lost_ranks() == [1])
    torch.testing.assert_close(server.model["w"], torch.full((8,), -1 / 2))


def test_a_connection_speaks_for_its_own_rank_alone() -> None:
    """No request has a rank, so all of a connection count as messages of its worker."""
    server = dense_server(2)
    with serving(server) as listener:
        other, own = remote_of(listener), remote_of(listener)
        other.join(0, 0)
        own.join(1, 0)
        own.sync(0, 0, ONES)
        own.sync(0, 1, ONES)
        assert [worker.next_step for worker in server._workers] == [0, 2]
        own.leave(0)
        wait_for(lambda: server.alive() == [0])
        other.leave(1)


def test_a_broken_handshake_frees_the_rank() -> None:
    server = dense_server(2)
    with serving(server) as listener:
        connection = connect(listener.address, TOKEN, 5)
        connection.send(_HELLO.pack(1, 0, SETTINGS))
        connection.close()
        remote = remote_of(listener)
        assert remote.join(1, 0) == 0
        remote.leave(1)


SPEC = "topk:ratio=0.1"


@contextmanager
def rejoinable(model: nn.Module) -> Iterator[tuple[HashStore, Server]]:
    """Yields a store that knows a server with this model, and the server."""
    store = HashStore()
    like = AsyncQsparseLocalSGD(
        *(model, plain_sgd(model), SPEC), sync_every=2, process_group=RejoinedWorker(1, 2, store)
    )
    server = Server(float_copies(dict(model.named_parameters())), like._format, 2)
    digest = like._settings_digest()
    listener = Listener("127.0.0.1", TOKEN, lambda c: serve(server, c, digest), 5)
    store.set(SERVER_KEY, encode_address(listener.address, TOKEN))
    try:
        yield store, server
    finally:
        server.close()
        listener.close()


def rejoined(store: HashStore, seed: int = 0) -> tuple[nn.Sequential, Any, AsyncQsparseLocalSGD]:
    model = small_model()
    optimizer = plain_sgd(model)
    group = RejoinedWorker(1, 2, store)
    worker = AsyncQsparseLocalSGD(
        *(model, optimizer, SPEC), sync_every=2, process_group=group, seed=seed, timeout_s=5
    )
    return model, optimizer, worker


def test_a_new_process_takes_the_servers_model_and_continues() -> None:
    with rejoinable(small_model()) as (store, server):
        model, optimizer, worker = rejoined(store)
        with worker:
            for step in range(5):
                take_step(model, optimizer, step, 1)
        assert worker.syncs == 2
        model, optimizer, worker = rejoined(store)
        with worker:
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().view(-1), server.model[name])
            take_step(model, optimizer, 0, 1)
            take_step(model, optimizer, 1, 1)
            assert worker.syncs == 1
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.detach().view(-1), server.model[name])
            with pytest.raises(ConfigError, match="has rejoined is in no process group"):
                worker.averaged().__enter__()
        assert server.rejoined == 1
        assert server._workers[1].next_step == 3


@pytest.mark.parametrize("syncs_later", [0, 1])
def test_a_residual_is_kept_unless_later_messages_had_a_part_of_it(syncs_later: int) -> None:
    with rejoinable(small_model()) as (store, _):
        model, optimizer, worker = rejoined(store)
        with worker:
            take_step(model, optimizer, 0, 1)
            take_step(model, optimizer, 1, 1)
            state = worker.state_dict()
            for step in range(2 * syncs_later):
                take_step(model, optimizer, 2 + step, 1)
        model, optimizer, worker = rejoined(store)
        worker.load_state_dict(state)
        saved: Any = state
        residual = saved["rank1"]["engines"][0]["lanes"]["0.weight"]["memory"]["residual"]
        assert residual.any()
        with worker:
            lane = worker._engine.lanes["0.weight"]
            assert lane.ctx.step == 1 + syncs_later
            expected = torch.zeros_like(residual) if syncs_later else residual
            assert torch.equal(lane.memory_state["residual"], expected)
            take_step(model, optimizer, 2, 1)
            take_step(model, optimizer, 3, 1)


def test_a_worker_with_other_settings_cannot_rejoin() -> None:
    with rejoinable(small_model()) as (store, server):
        _, _, worker = rejoined(store, seed=1)
        with pytest.raises(PeerError, match="refuses worker 1: rank 1 has other settings"), worker:
            pass
        assert server.alive() == [0, 1]


def test_rejoining_needs_a_server() -> None:
    model = small_model()
    group = RejoinedWorker(1, 2, HashStore())
    worker = AsyncQsparseLocalSGD(
        *(model, plain_sgd(model), SPEC), sync_every=2, process_group=group, timeout_s=0.2
    )
    with pytest.raises(PeerError, match="the store knows no server to rejoin"), worker:
        pass
    with pytest.raises(ConfigError, match="RejoinedWorker: rank must be 1 to 1, got 0"):
        RejoinedWorker(0, 2, HashStore())
    with pytest.raises(ConfigError, match="store must be a torch store, got None"):
        RejoinedWorker(1, 2, None)  # type: ignore[arg-type]
