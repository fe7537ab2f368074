"""Starts a command once per rank, with the environment variables that torchrun would set."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradwire.errors import ConfigError
from gradwire.testbed.namespace import Namespace
from gradwire.testbed.processes import OnLine, Process, run_together, spawn


@dataclass(frozen=True)
class WorkerPlacement:
    """The host of one worker; `group` numbers machines, local numbers count within one."""

    address: str
    interface: str
    namespace: Namespace | None
    group: int
    local_rank: int
    local_workers: int

    def start(self, command: Sequence[str], env: dict[str, str]) -> Process:
        if self.namespace is None:
            return spawn(command, env)
        return self.namespace.run(lambda: spawn(command, env))

    def free_port(self) -> int:
        if self.namespace is None:
            return _free_port(self.address)
        return self.namespace.run(lambda: _free_port(self.address))


def launch(
    placements: Sequence[WorkerPlacement],
    command: Sequence[str],
    on_line: OnLine | None,
    on_error_line: OnLine | None,
    extra_env: Mapping[str, str],
) -> int:
    """Runs `command` at every placement; the first one's host runs the rendezvous store."""
    if not command:
        raise ConfigError("command: expected a program to run, got nothing")
    rendezvous = {
        "MASTER_ADDR": placements[0].address,
        "MASTER_PORT": str(placements[0].free_port()),
        "WORLD_SIZE": str(len(placements)),
    }
    starts = [
        _starter(placement, command, _environment(placement, rank, {**rendezvous, **extra_env}))
        for rank, placement in enumerate(placements)
    ]
    return run_together(starts, on_line or _print_line, on_error_line or _print_error_line)


def _starter(
    placement: WorkerPlacement, command: Sequence[str], env: dict[str, str]
) -> Callable[[], Process]:
    def start() -> Process:
        try:
            return placement.start(command, env)
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(f"command: cannot run {command[0]!r}: {error.strerror}") from error

    return start


def _environment(
    placement: WorkerPlacement, rank: int, settings: Mapping[str, str]
) -> dict[str, str]:
    """Returns the caller's environment, overridden by torchrun's variables, over our defaults."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_workers),
        "GROUP_RANK": str(placement.group),
        "GLOO_SOCKET_IFNAME": placement.interface,
        "NCCL_SOCKET_IFNAME": placement.interface,
    }
    return {**defaults, **os.environ, **variables, **settings}


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


def _print_error_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr, flush=True)
