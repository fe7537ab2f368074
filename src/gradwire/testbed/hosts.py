"""Emulates hosts on one machine: network namespaces joined by a switch, with shaped links."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from gradwire.errors import ConfigError, MissingExtra
from gradwire.testbed.links import LinkShape, NetworkPlan, plan_network
from gradwire.testbed.namespace import Namespace
from gradwire.testbed.shaping import Impairment, Shape, impair_link, shape_link

if TYPE_CHECKING:
    from pyroute2 import IPRoute

# RFC 2544 reserves 198.18.0.0/15 for network benchmarks: no real host uses it.
_NETWORK = "198.18.0"
_PREFIX_BITS = 24
_MAX_WORKERS = 254
_INTERFACE = "eth0"
_LOOPBACK_INDEX = 1
_IPV6_NO_ADDRESSES = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """One emulated machine: its namespace, and the address by which others reach it."""

    name: str
    namespace: Namespace
    address: str
    interface: str


class Testbed:
    """`workers` hosts on one switch; each link carries `rate` up and `rate` down, or is unshaped.

    A context manager. Nothing appears in the machine's own network: the switch is in a namespace
    too, and the kernel removes everything when the context or this process ends.
    """

    __test__: ClassVar = False  # pytest would take the class for a test

    def __init__(self, workers: int, rate: str | None, plan: NetworkPlan | None = None) -> None:
        """With a `plan` links may differ and stand between islands; `rate` is None then."""
        if not 1 <= workers <= _MAX_WORKERS:
            raise ConfigError(f"testbed: workers must be in [1, {_MAX_WORKERS}], got {workers}")
        Shape.parse(rate)
        if plan is None:
            plan = plan_network(workers, {} if rate is None else {"rate": rate}, None)
        self.workers = workers
        self.rate = rate
        self._islands, self._between = plan.islands, plan.between
        self._links = [*plan.links]
        for link in (*self._links, self._between):
            _shapes(link)
        self.hosts: tuple[Host, ...] = ()
        self._resources = ExitStack()

    @staticmethod
    def reason_unavailable() -> str | None:
        """Returns why no testbed can be created here, or None; tries a small one (20 ms)."""
        if sys.platform != "linux":
            return f"network namespaces need Linux, this is {sys.platform}"
        try:
            with Testbed(workers=1, rate="1gbit"):
                return None
        except MissingExtra as error:
            return str(error)
        except PermissionError as error:
            return f"network namespaces need root (or CAP_SYS_ADMIN): {error.strerror}"
        except Exception as error:  # netlink errors have no common base in all versions
            return f"the kernel refused namespaces, veth, bridge or tbf: {error}"

    def __enter__(self) -> Testbed:
        if find_spec("pyroute2") is None:
            raise MissingExtra("the testbed", "pyroute2", "bench")
        with ExitStack() as resources:
            self._switch = _create_namespace(resources)
            self.hosts = tuple(
                Host(f"host{i}", _create_namespace(resources), f"{_NETWORK}.{i + 1}", _INTERFACE)
                for i in range(self.workers)
            )
            _run_in(self._switch, self._build_switch)
            for host in self.hosts:
                _run_in(host.namespace, partial(_build_host, host=host))
            self._apply()
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hosts = ()
        self._resources.close()

    def set_rate(self, rate: str | None) -> None:
        """Changes the rate of both directions of every link, also while they are in use."""
        Shape.parse(rate)
        self.change({"rate": rate}, range(self.workers))
        self.rate = rate

    def change(self, options: Mapping[str, object], workers: Iterable[int]) -> None:
        """Changes the links of some workers, also while they are in use."""
        for worker in workers:
            link = self._links[worker].with_options(options)
            _shapes(link)
            self._links[worker] = link
        if self.hosts:
            self._apply()

    def cut(self, host: int) -> None:
        """Disconnects `host` at the switch; packets in transit are lost."""
        self._set_port(host, "down")

    def restore(self, host: int) -> None:
        """Reconnects `host`, with its link shaped as before."""
        self._set_port(host, "up")

    def enter(self, rank: int, port: int) -> None:
        """Moves this process to the host of a rank, with the environment that torchrun would set.

        For a child process that has one thread. The store is on the first host, at `port`.
        """
        host = self.hosts[rank]
        host.namespace.enter()
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": host.interface,
        }

    def _set_port(self, host: int, state: str) -> None:
        port = _port(self.hosts[host])
        _run_in(
            self._switch,
            lambda netlink: netlink.link("set", index=_index(netlink, port), state=state),
        )

    def _apply(self) -> None:
        for host, link in zip(self.hosts, self._links, strict=True):
            _run_in(host.namespace, partial(_send_up, interface=_INTERFACE, link=link))
        _run_in(self._switch, self._shape_ports)

    def _shape_ports(self, netlink: IPRoute) -> None:
        for host, link in zip(self.hosts, self._links, strict=True):
            _send_down(netlink, _port(host), link)
        for number in range(len(self._islands)):
            _send_up(netlink, f"out{number}", self._between)
            _send_down(netlink, f"in{number}", self._between)

    def _build_switch(self, netlink: IPRoute) -> None:
        core = _add_bridge(netlink, "switch")
        masters = [core] * self.workers
        for number, island in enumerate(self._islands):
            bridge = _add_bridge(netlink, f"island{number}")
            netlink.link("add", ifname=f"out{number}", kind="veth", peer={"ifname": f"in{number}"})
            for name, master in ((f"out{number}", bridge), (f"in{number}", core)):
                port = _index(netlink, name)
                netlink.link("set", index=port, master=master)
                _up(netlink, port)
            for worker in island:
                masters[worker] = bridge
        for host, switch in zip(self.hosts, masters, strict=True):
            # The peer interface is created directly inside the host's namespace.
            far_end = {"ifname": _INTERFACE, "net_ns_fd": host.namespace.fd}
            netlink.link("add", ifname=_port(host), kind="veth", peer=far_end)
            port = _index(netlink, _port(host))
            netlink.link("set", index=port, master=switch)
            _up(netlink, port)


def _shapes(link: LinkShape) -> tuple[Shape | None, Shape | None]:
    """Returns the shapes of both directions; raises ConfigError if a rate cannot be shaped."""
    up, down = (None if b is None else Shape(b) for b in (link.up_bits, link.down_bits))
    return up, down


def _send_up(netlink: IPRoute, interface: str, link: LinkShape) -> None:
    """Shapes what an interface sends away from the workers, with delay and loss."""
    index, (up, _) = _index(netlink, interface), _shapes(link)
    shape_link(netlink, index, up)
    parts = (link.delay_s, link.jitter_s, link.loss)
    impairment = Impairment(*parts) if any(parts) else None
    impair_link(netlink, index, impairment, below_tbf=up is not None)


def _send_down(netlink: IPRoute, interface: str, link: LinkShape) -> None:
    """Shapes what an interface sends towards the workers."""
    shape_link(netlink, _index(netlink, interface), _shapes(link)[1])


def _add_bridge(netlink: IPRoute, name: str) -> int:
    netlink.link("add", ifname=name, kind="bridge", br_mcast_snooping=0)
    index = _index(netlink, name)
    _up(netlink, index)
    return index


def _build_host(netlink: IPRoute, host: Host) -> None:
    netlink.link("set", index=_LOOPBACK_INDEX, state="up")
    index = _index(netlink, host.interface)
    _up(netlink, index)
    netlink.addr("add", index=index, address=host.address, prefixlen=_PREFIX_BITS)


def _create_namespace(resources: ExitStack) -> Namespace:
    namespace = Namespace.create()
    resources.callback(namespace.close)
    return namespace


def _run_in(namespace: Namespace, work: Callable[[IPRoute], T]) -> T:
    from pyroute2 import IPRoute

    def run() -> T:
        with IPRoute() as netlink:
            return work(netlink)

    return namespace.run(run)


def _port(host: Host) -> str:
    return f"to-{host.name}"


def _index(netlink: IPRoute, interface: str) -> int:
    [index] = netlink.link_lookup(ifname=interface)
    return int(index)


def _up(netlink: IPRoute, index: int) -> None:
    # Without IPv6 addresses an idle interface sends nothing, so counters count the workers only.
    mode = {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", _IPV6_NO_ADDRESSES]]}
    netlink.link("set", index=index, IFLA_AF_SPEC={"attrs": [["AF_INET6", mode]]})
    netlink.link("set", index=index, state="up")
