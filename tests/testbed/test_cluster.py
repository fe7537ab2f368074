import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from counted import counters

from deadlines import scaled
from gradwire.errors import ConfigError
from gradwire.testbed.cluster import (
    Cluster,
    LoopbackCluster,
    TestbedCluster,
    open_cluster,
    run_on_testbed,
)
from gradwire.testbed.hosts import Testbed
from gradwire.testbed.links import plan_network

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank()))
dist.all_reduce(x)
print(x.sum().item())
dist.destroy_process_group()
"""
SHOW_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def environments(cluster: Cluster, **extra_env: str) -> list[dict[str, str]]:
    lines: dict[int, str] = {}
    command = [sys.executable, "-S", "-c", SHOW_ENVIRONMENT]
    assert cluster.launch(command, on_line=lines.__setitem__, extra_env=extra_env) == 0
    return [json.loads(lines[rank]) for rank in range(cluster.workers)]


def gone(*pids: int) -> bool:
    """Returns whether the processes have ended, after waiting for up to 5 s."""
    deadline_s = time.monotonic() + scaled(5)
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_loopback_gives_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, second = environments(LoopbackCluster(2), FLAVOUR="mint")
    assert {**second, "RANK": "0", "LOCAL_RANK": "0"} == first
    assert (
        second
        | {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "FLAVOUR": "mint",
        }
        == second
    )
    assert int(second["MASTER_PORT"]) > 0


def test_testbed_gives_every_worker_a_machine(two_hosts: Testbed) -> None:
    _, second = environments(TestbedCluster(two_hosts))
    assert (
        second
        | {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": "1",
            "MASTER_ADDR": two_hosts.hosts[0].address,
            "GLOO_SOCKET_IFNAME": two_hosts.hosts[1].interface,
        }
        == second
    )


def test_threads_are_the_callers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    [worker] = environments(LoopbackCluster(1))
    assert worker["OMP_NUM_THREADS"] == "7"


def test_lines_arrive_as_they_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, str]] = []
    command = ["sh", "-c", "echo one; echo two $RANK; echo three >&2"]
    assert (
        LoopbackCluster(2).launch(command, on_line=lambda rank, line: seen.append((rank, line)))
        == 0
    )
    assert [line for rank, line in seen if rank == 1] == ["one", "two 1"]
    output = capfd.readouterr()
    assert output.out == ""
    assert sorted(output.err.splitlines()) == ["[0] three", "[1] three"]


def test_lines_are_marked_with_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    assert LoopbackCluster(2).launch(["sh", "-c", "printf unfinished"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] unfinished", "[1] unfinished"]


def test_a_worker_that_dies_ends_the_others(two_hosts: Testbed) -> None:
    seen: list[str] = []
    script = "if [ $RANK = 1 ]; then sleep 0.2; exit 7; fi; sleep 50 & echo $$ $!; wait"
    start_s = time.monotonic()
    code = TestbedCluster(two_hosts).launch(
        ["sh", "-c", script], on_line=lambda rank, line: seen.append(line)
    )
    assert code == 7
    assert time.monotonic() - start_s < scaled(4)
    assert gone(*map(int, seen[0].split()))


def test_a_worker_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.testbed.processes.GRACE_S", 0.3)
    script = (
        'if [ $RANK = 0 ]; then sleep 0.2; exit 3; fi; trap "" TERM; while :; do sleep 0.1; done'
    )
    start_s = time.monotonic()
    assert LoopbackCluster(2).launch(["sh", "-c", script]) == 3
    assert time.monotonic() - start_s < scaled(4)


def test_a_signal_is_reported_as_a_shell_does() -> None:
    assert LoopbackCluster(1).launch(["sh", "-c", "kill -SEGV $$"]) == 128 + signal.SIGSEGV


def test_a_child_that_holds_the_pipe_ends_with_its_worker() -> None:
    seen: list[str] = []
    script = "sleep 50 & echo $!"
    assert (
        LoopbackCluster(1).launch(["sh", "-c", script], on_line=lambda _, line: seen.append(line))
        == 0
    )
    assert gone(int(seen[0]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_workers(number: signal.Signals) -> None:
    pids: list[int] = []

    def interrupt(rank: int, line: str) -> None:
        pids.append(int(line))
        if len(pids) == 2:
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        LoopbackCluster(2).launch(["sh", "-c", "echo $$; exec sleep 50"], on_line=interrupt)
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert gone(*pids)


def test_an_error_in_the_callback_ends_the_workers() -> None:
    pids: list[int] = []

    def fail(rank: int, line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("no more lines, please")

    with pytest.raises(RuntimeError, match="no more lines"):
        LoopbackCluster(1).launch(["sh", "-c", "echo $$; exec sleep 50"], on_line=fail)
    assert gone(pids[0])


def test_launches_from_another_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(LoopbackCluster(1).launch(["false"])))
    thread.start()
    thread.join()
    assert codes == [1]


def test_a_missing_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="command: cannot run 'no-such-program': No such file"):
        LoopbackCluster(2).launch(["no-such-program"])
    with pytest.raises(ConfigError, match="command: expected a program to run, got nothing"):
        LoopbackCluster(2).launch([])


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster: workers must be at least 1, got 0"):
        LoopbackCluster(0)


def test_a_testbed_that_is_not_open_is_refused() -> None:
    with pytest.raises(ConfigError, match="launch needs an open testbed"):
        TestbedCluster(Testbed(2, None)).launch(["true"])


def test_gloo_reduces_over_four_hosts(emulated: None) -> None:
    sums: list[str] = []
    with Testbed(workers=4, rate="1gbit") as testbed:
        code = TestbedCluster(testbed).launch(
            [sys.executable, "-c", ALL_REDUCE],
            on_line=lambda rank, line: sums.append(line),
            extra_env=QUIET_TORCH,
        )
        assert all(counters(host).sent_bytes > 6000 for host in testbed.hosts)
    assert code == 0
    assert sums == ["6000.0"] * 4


def test_open_cluster_shapes_the_links_where_it_can(emulated: None) -> None:
    with open_cluster(2, "100mbit") as cluster:
        assert (cluster.workers, cluster.shaped, cluster.note) == (2, True, None)
        assert cluster.interface == "eth0"
        assert cluster.launch(["true"]) == 0


def test_open_cluster_notes_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Testbed, "reason_unavailable", staticmethod(lambda: "no root"))
    with open_cluster(2, "100mbit") as cluster:
        assert (cluster.workers, cluster.shaped, cluster.interface) == (2, False, None)
        assert cluster.note == "links are not shaped: no root"
        assert cluster.launch(["true"]) == 0
    with pytest.raises(ConfigError, match="rate: expected"), open_cluster(2, "fast"):
        pass
    with pytest.raises(ConfigError, match="net: no emulated hosts here: no root"):
        run_on_testbed(["true"], plan_network(2, {}, None))
