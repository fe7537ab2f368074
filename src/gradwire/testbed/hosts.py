"""Emulates hosts on one machine: network namespaces joined by a switch, with shaped links."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from gradwire.errors import ConfigError, MissingExtra
from gradwire.testbed.namespace import Namespace
from gradwire.testbed.shaping import Shape, shape_link

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

    def __init__(self, workers: int, rate: str | None) -> None:
        if not 1 <= workers <= _MAX_WORKERS:
            raise ConfigError(f"testbed: workers must be in [1, {_MAX_WORKERS}], got {workers}")
        Shape.parse(rate)
        self.workers = workers
        self.rate = rate
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
            self._apply(Shape.parse(self.rate))
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
        shape = Shape.parse(rate)
        if self.hosts:
            self._apply(shape)
        self.rate = rate

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

    def _apply(self, shape: Shape | None) -> None:
        for host in self.hosts:
            _run_in(
                host.namespace,
                lambda netlink: shape_link(netlink, _index(netlink, _INTERFACE), shape),
            )
        _run_in(self._switch, lambda netlink: self._shape_ports(netlink, shape))

    def _shape_ports(self, netlink: IPRoute, shape: Shape | None) -> None:
        for host in self.hosts:
            shape_link(netlink, _index(netlink, _port(host)), shape)

    def _build_switch(self, netlink: IPRoute) -> None:
        netlink.link("add", ifname="switch", kind="bridge", br_mcast_snooping=0)
        switch = _index(netlink, "switch")
        _up(netlink, switch)
        for host in self.hosts:
            # The peer interface is created directly inside the host's namespace.
            far_end = {"ifname": _INTERFACE, "net_ns_fd": host.namespace.fd}
            netlink.link("add", ifname=_port(host), kind="veth", peer=far_end)
            port = _index(netlink, _port(host))
            netlink.link("set", index=port, master=switch)
            _up(netlink, port)


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
