"""Descriptions of links: what is parsed, refused, sent to the kernel, simulated and changed."""

import json
import socket
import sys
from errno import ENOENT
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import sched_netem

from gradwire.bench.predictions.simulate import Links, links_of
from gradwire.errors import ConfigError
from gradwire.testbed.cluster import run_on_testbed
from gradwire.testbed.hosts import Testbed
from gradwire.testbed.links import LinkShape, NetworkPlan, plan_network
from gradwire.testbed.shaping import Impairment, impair_link

WAN = {
    "rate": "1gbit",
    "workers": {"2,3": {"up": "20mbit", "down": "100mbit"}},
    "islands": [[0, 1], [2, 3]],
    "between": {"rate": "200mbit", "delay": "40ms"},
    "changes": [
        {"at": "60s", "workers": [3], "up": "1mbit"},
        {"at": "30s", "rate": "500mbit"},
    ],
}


def described(content: object, folder: Path, workers: int = 4, **options: str) -> NetworkPlan:
    path = folder / "links.json"
    path.write_text(json.dumps(content))
    return plan_network(workers, options, path)


def test_a_file_describes_unlike_links_islands_and_changes(tmp_path: Path) -> None:
    plan = described(WAN, tmp_path)
    assert plan.links[0] == LinkShape(10**9, 10**9)
    assert plan.links[2] == plan.links[3] == LinkShape(20_000_000, 100_000_000)
    assert [plan.island_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert plan.between == LinkShape(200_000_000, 200_000_000, delay_s=0.04)
    assert [(change.at_s, change.workers) for change in plan.changes] == [
        (30.0, (0, 1, 2, 3)),
        (60.0, (3,)),
    ]


def test_the_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "testbed.md").read_text()
    content = json.loads(text.split('```json title="sites.json"')[1].split("```")[0])
    plan = described(content, tmp_path)
    assert plan.islands == ((0, 1), (2, 3))
    assert plan.links[3].up_bits == 50_000_000
    assert len(plan.changes) == 2


def test_options_replace_the_common_link_only(tmp_path: Path) -> None:
    plan = described(WAN, tmp_path, rate="50mbit", delay="5ms", jitter="1ms", loss="0.1%")
    assert plan.links[0] == LinkShape(50_000_000, 50_000_000, 0.005, 0.001, 0.001)
    assert plan.links[2].up_bits == 20_000_000


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"speed": "1gbit"}, "unknown ['speed']"),
        ({"rate": 5}, "rate must be a text such as '100mbit', got 5"),
        ({"loss": 1}, "loss: must be a share from 0 to below 1, got 1"),
        ({"loss": "much"}, "loss: expected a share such as 0.1% or 0.001, got 'much'"),
        ({"delay": "1ms", "jitter": "2ms"}, "jitter: must not exceed the delay of 1 ms, got 2 ms"),
        ({"workers": {"4": {}}}, "workers are numbers from 0 to 3, got 4"),
        ({"workers": {"a": {}}}, "workers are numbers from 0 to 3, got 'a'"),
        ({"islands": [[0, 1], [2]]}, "islands must name each worker from 0 to 3 once"),
        ({"between": {}}, "between needs islands"),
        ({"changes": [{"rate": "1gbit"}]}, "a change needs a time `at` and new settings"),
        ([], "must be an object, got []"),
    ],
)
def test_a_wrong_description_is_refused(content: object, error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        described(content, tmp_path)
    assert error in str(raised.value)


class Kernel:
    """Receives the requests of shaping in place of the kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.requests = error, list[tuple[Any, ...]]()

    def tc(self, *words: Any, **settings: Any) -> None:
        self.requests.append((*words, settings))
        if self.error is not None:
            raise self.error


def test_delay_and_loss_are_requested_inside_the_rate_limit() -> None:
    kernel = Kernel()
    impair_link(kernel, 7, Impairment(0.02, 0.002, 0.001), below_tbf=True)
    [(command, kind, index, handle, settings)] = kernel.requests
    assert (command, kind, index, handle) == ("replace", "netem", 7, 0x100000)
    assert settings.pop("parent") == 0x10001
    # What pyroute2 makes of it: microseconds in ticks of the kernel, and a share of 2^32.
    encoded = sched_netem.get_parameters(dict(settings))
    assert encoded["jitter"] * 10 == pytest.approx(encoded["delay"], rel=1e-3)
    assert encoded["loss"] / 2**32 == pytest.approx(0.001, rel=1e-3)
    assert encoded["limit"] == 100_000


def test_without_a_rate_netem_is_the_outermost_discipline() -> None:
    kernel = Kernel()
    impair_link(kernel, 7, Impairment(0.02, 0.0, 0.0), below_tbf=False)
    assert kernel.requests[0][3] == 0x10000
    assert kernel.requests[0][4]["parent"] == 0xFFFFFFFF


def test_a_kernel_without_netem_is_a_named_error() -> None:
    kernel = Kernel(NetlinkError(ENOENT, "No such file or directory"))
    with pytest.raises(ConfigError, match="need netem, which this kernel does not have"):
        impair_link(kernel, 7, Impairment(0.02, 0.0, 0.0), below_tbf=True)


def test_a_delay_is_there_end_to_end() -> None:
    if (reason := Testbed.reason_unavailable()) is not None:
        pytest.skip(reason)
    try:
        with Testbed(2, None, plan_network(2, {"delay": "30ms"}, None)):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
    plan = plan_network(2, {"delay": "30ms"}, None)
    assert run_on_testbed([sys.executable, "-c", TIMED], plan) == 0


TIMED = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(address).accept()
    connection.sendall(connection.recv(1))
else:
    time.sleep(1)
    with socket.create_connection(address) as connection:
        start = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
    assert time.perf_counter() - start > 0.055, "two delays of 30 ms"
"""


def test_islands_are_joined_and_links_change_while_in_use() -> None:
    if (reason := Testbed.reason_unavailable()) is not None:
        pytest.skip(reason)
    plan = NetworkPlan((LinkShape(),) * 4, ((0, 2), (1, 3)), LinkShape(10**8, 10**8), changes=())
    with Testbed(4, None, plan) as testbed:
        first, others = testbed.hosts[0], testbed.hosts[1:]
        server = first.namespace.run(lambda: socket.create_server((first.address, 6000)))
        with server:
            for host in others:
                host.namespace.run(
                    lambda: socket.create_connection((first.address, 6000), timeout=5).close()
                )
            testbed.change({"up": "5mbit"}, [0])
            with pytest.raises(ConfigError, match="to be shaped, got 1bit"):
                testbed.change({"rate": "1bit"}, [1])


def test_a_simulation_takes_the_slowest_link_of_a_description(tmp_path: Path) -> None:
    unlike = {"rate": "1gbit", "delay": "2ms", "workers": {"2": {"up": "20mbit"}}}
    assert links_of(described(unlike, tmp_path)) == Links(20_000_000, 0.002)
    islands = {key: WAN[key] for key in ("rate", "islands", "between")}
    # Two workers share the 200 Mbit/s of their island.
    assert links_of(described(islands, tmp_path)) == Links(100_000_000, 0.04, 10**9)
    with pytest.raises(ConfigError, match="jitter, loss and changes are not simulated"):
        links_of(described(WAN, tmp_path))
