import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from counted import Counters, counters

from deadlines import scaled
from gradwire.errors import ConfigError
from gradwire.testbed import hosts as testbed_module
from gradwire.testbed.hosts import Host, Testbed

MEGABYTE = 10**6
PORT = 5000


def receive_all(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while connection.recv(MEGABYTE):
            pass


def send_all(sender: Host, receiver: Host, port: int, size_bytes: int) -> None:
    target = (receiver.address, port)
    with sender.namespace.run(lambda: socket.create_connection(target)) as connection:
        connection.sendall(bytes(size_bytes))


def listen(host: Host, port: int) -> socket.socket:
    return host.namespace.run(lambda: socket.create_server((host.address, port)))


def transfer_s(pairs: Sequence[Sequence[Host]], size_bytes: int) -> float:
    """Returns seconds until every (sender, receiver) pair has moved `size_bytes` at once."""
    servers = [listen(receiver, PORT + i) for i, (_, receiver) in enumerate(pairs)]
    start_s = time.monotonic()
    with ThreadPoolExecutor(max_workers=2 * len(pairs)) as pool:
        jobs = [pool.submit(receive_all, server) for server in servers]
        jobs += [
            pool.submit(send_all, sender, receiver, PORT + i, size_bytes)
            for i, (sender, receiver) in enumerate(pairs)
        ]
        for job in jobs:
            job.result()
    for server in servers:
        server.close()
    return time.monotonic() - start_s


def held_namespaces() -> set[str]:
    """Returns the network namespaces that this process is in or has open.

    Nothing else can hold an anonymous one; and inode numbers are reused at once, so the same
    number in another process may be another testbed.
    """
    links = set()
    for pattern in ("task/*/ns/net", "fd/*"):
        for path in Path("/proc/self").glob(pattern):
            with suppress(OSError):
                links.add(os.readlink(path))
    return links


def let_go(namespaces: set[str]) -> bool:
    """Returns whether none is held any more, after waiting up to 5 s for threads to end."""
    deadline_s = time.monotonic() + scaled(5)
    while namespaces & held_namespaces():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def identities(testbed: Testbed) -> set[str]:
    namespaces = [testbed._switch, *(host.namespace for host in testbed.hosts)]
    return {
        namespace.run(lambda: os.readlink("/proc/thread-self/ns/net")) for namespace in namespaces
    }


def test_hosts_reach_each_other_and_themselves(two_hosts: Testbed) -> None:
    first, second = two_hosts.hosts
    assert (first.name, second.name) == ("host0", "host1")
    assert first.address != second.address
    transfer_s([(first, second), (second, first), (first, first)], 1000)
    with first.namespace.run(lambda: socket.create_server(("127.0.0.1", 0))) as server:
        assert server.getsockname()[1] > 0


def test_the_machine_does_not_see_the_testbed(emulated: None) -> None:
    before = set(os.listdir("/sys/class/net"))
    with Testbed(workers=2, rate=None) as first, Testbed(workers=2, rate=None) as second:
        assert set(os.listdir("/sys/class/net")) == before
        assert not identities(first) & identities(second)


def test_a_link_carries_its_rate_and_no_more(two_hosts: Testbed) -> None:
    ideal_s = 4 * MEGABYTE * 8 / 100e6
    took_s = transfer_s([two_hosts.hosts], 4 * MEGABYTE)
    assert 0.8 * ideal_s < took_s < 3 * ideal_s


def test_both_directions_are_shaped(emulated: None) -> None:
    ideal_s = 2 * MEGABYTE * 8 / 100e6
    with Testbed(workers=3, rate="100mbit") as testbed:
        a, b, c = testbed.hosts
        assert transfer_s([(a, b), (a, c)], MEGABYTE) > 0.8 * ideal_s
        assert transfer_s([(b, a), (c, a)], MEGABYTE) > 0.8 * ideal_s
        assert transfer_s([(a, b), (b, a)], 2 * MEGABYTE) < 1.8 * ideal_s


def test_a_short_message_after_a_pause_is_not_free(two_hosts: Testbed) -> None:
    time.sleep(0.1)
    ideal_s = 125_000 * 8 / 100e6
    assert transfer_s([two_hosts.hosts], 125_000) > 0.8 * ideal_s


def test_the_rate_changes_live(two_hosts: Testbed) -> None:
    shaped_s = transfer_s([two_hosts.hosts], 4 * MEGABYTE)
    two_hosts.set_rate(None)
    assert two_hosts.rate is None
    assert transfer_s([two_hosts.hosts], 4 * MEGABYTE) < shaped_s / 3
    two_hosts.set_rate("50mbit")
    assert transfer_s([two_hosts.hosts], 4 * MEGABYTE) > 1.6 * shaped_s


def test_an_idle_interface_is_silent(two_hosts: Testbed) -> None:
    time.sleep(0.5)
    assert [counters(host) for host in two_hosts.hosts] == [Counters(0, 0)] * 2


def test_counters_count_the_bytes(two_hosts: Testbed) -> None:
    transfer_s([two_hosts.hosts], 2 * MEGABYTE)
    sender, receiver = map(counters, two_hosts.hosts)
    assert 1.0 < sender.sent_bytes / (2 * MEGABYTE) < 1.06
    assert receiver.received_bytes == sender.sent_bytes
    assert sender.received_bytes < 0.06 * MEGABYTE


def test_closing_leaves_nothing_behind(emulated: None) -> None:
    with Testbed(workers=3, rate="1gbit") as testbed:
        made = identities(testbed)
        assert len(made) == 4
        assert made <= held_namespaces()
    assert let_go(made)


def test_an_exception_leaves_nothing_behind(emulated: None) -> None:
    made: set[str] = set()

    def fail_inside() -> None:
        with Testbed(workers=2, rate=None) as testbed:
            made.update(identities(testbed))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert made
    assert let_go(made)


def test_a_failed_start_leaves_nothing_behind(
    emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no shaping today")

    monkeypatch.setattr(testbed_module, "shape_link", refuse)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no shaping today"), Testbed(workers=2, rate="1gbit"):
        pass
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert "no shaping today" in str(Testbed.reason_unavailable())


def test_a_cut_link_works_again_when_restored(two_hosts: Testbed) -> None:
    first, second = two_hosts.hosts
    two_hosts.cut(1)
    with pytest.raises(OSError, match=r"timed out|No route to host"):
        first.namespace.run(lambda: socket.create_connection((second.address, PORT), timeout=0.3))
    two_hosts.restore(1)
    ideal_s = 2 * MEGABYTE * 8 / 100e6
    # As slow as before: a port that comes up again keeps its shape.
    assert transfer_s([two_hosts.hosts], 2 * MEGABYTE) > 0.8 * ideal_s


@pytest.mark.parametrize("workers", [0, 255])
def test_invalid_numbers_of_workers_are_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=rf"workers must be in \[1, 254\], got {workers}"):
        Testbed(workers, None)


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert Testbed.reason_unavailable() == "network namespaces need Linux, this is darwin"
    monkeypatch.undo()
    monkeypatch.setattr(testbed_module, "find_spec", lambda name: None)
    assert "pip install 'gradwire[bench]'" in str(Testbed.reason_unavailable())
