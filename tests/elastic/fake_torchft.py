"""A torchft Manager without torchft: replicas are threads, quorums are scripted, gloo is real."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from itertools import count
from threading import Condition
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deadlines import scaled

T = TypeVar("T")


class FakeGroup:
    """A gloo group that is made anew for each quorum; notes the bytes that it is given."""

    def __init__(self) -> None:
        self._rank = 0
        self._group: dist.ProcessGroup | None = None
        self.given_bytes: list[tuple[str, int]] = []
        self.calls_until_broken: int | None = None
        """Collectives until this replica loses its connections; None means never."""

    def configure(self, store: dist.Store, rank: int, size: int) -> None:
        self.abort()
        self._rank = rank
        self._group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._group._set_default_backend(gloo)
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=scaled(20)))
        self._group._register_backend(torch.device("cpu"), gloo, backend)

    def size(self) -> int:
        return self._open().size()

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def allreduce(self, tensors: list[Tensor], opts: object) -> Any:
        return self._call("allreduce", tensors[0]).allreduce(tensors, opts)

    def allgather(self, outputs: Any, tensors: list[Tensor], opts: object) -> Any:
        return self._call("allgather", tensors[0]).allgather(outputs, tensors, opts)

    def alltoall_base(self, output: Tensor, sent: Tensor, *sizes: Any) -> Any:
        return self._call("alltoall", sent).alltoall_base(output, sent, *sizes)

    def broadcast(self, tensors: list[Tensor], opts: object) -> Any:
        return self._call("broadcast", tensors[0]).broadcast(tensors, opts)

    def _call(self, kind: str, tensor: Tensor) -> Any:
        if self.calls_until_broken is not None:
            if self.calls_until_broken == 0:
                self.calls_until_broken = None
                raise RuntimeError("Connection closed by peer")
            self.calls_until_broken -= 1
        self.given_bytes.append((kind, tensor.nbytes))
        return self._open()

    def _open(self) -> dist.ProcessGroup:
        assert self._group is not None, "process group not initialized"
        return self._group


class FakeManager:
    """Has the methods and attributes of torchft's Manager that are used, and its order of calls."""

    def __init__(self, cluster: "Cluster", use_async_quorum: bool = True) -> None:
        self._pg = FakeGroup()
        self._quorum_id = -1
        self._use_async_quorum = use_async_quorum
        self._load_state_dict_fns: dict[str, Callable[[Any], None]] = {}
        self._user_state_dicts: dict[str, Callable[[], Any]] = {}
        self._cluster = cluster
        self._step = 0
        self._error: Exception | None = None
        self._pending: dict[str, Any] | None = None
        self._healing = False
        self.refuses_commit = self.is_shut_down = False

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self._load_state_dict_fns[key] = load_state_dict
        self._user_state_dicts[key] = state_dict

    def start_quorum(self) -> None:
        self._error, self._healing = None, False
        store, rank, size, quorum_id, donor_state, step = self._cluster.join(self)
        if quorum_id != self._quorum_id:
            self._quorum_id = quorum_id
            self._pg.configure(store, rank, size)
        if donor_state is not None:
            self._pending, self._healing, self._step = donor_state, True, step
            if not self._use_async_quorum:
                self._apply()
                self._healing = False

    def wait_quorum(self) -> None:
        pass

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        if self._healing:
            self._apply()
        committed = self._error is None and not self.refuses_commit
        self.refuses_commit = False
        if committed:
            self._step += 1
        else:
            self._cluster.commit_failed = True
        return committed

    def report_error(self, e: Exception) -> None:
        self._error = e

    def errored(self) -> Exception | None:
        return self._error

    def is_participating(self) -> bool:
        return not self._healing

    def current_step(self) -> int:
        return self._step

    def shutdown(self, wait: bool = True) -> None:
        self.is_shut_down = True
        self._cluster.leave(self)

    def state(self) -> dict[str, Any]:
        """Returns what a donor hands over."""
        return {key: deepcopy(save()) for key, save in self._user_state_dicts.items()}

    def _apply(self) -> None:
        assert self._pending is not None
        for key, load in self._load_state_dict_fns.items():
            load(self._pending[key])
        self._pending = None


class Cluster:
    """Forms a quorum when all expected replicas have asked for one.

    It has a new number if its members changed, or if a commit failed.
    """

    def __init__(self) -> None:
        self._ids = count()
        self._quorum: tuple[int, list[FakeManager], dist.Store] | None = None
        self._states: dict[int, dict[str, Any]] = {}
        self._expected: list[FakeManager] = []
        self._most, self._formed = 0, 0
        self._waiting: set[int] = set()
        self._condition = Condition()
        self.commit_failed = False

    def run(self, members: Sequence[FakeManager], step: Callable[[int], T]) -> list[T | Exception]:
        """Runs `step(number)` of these replicas, each in a thread; returns results or errors."""
        self._expected = list(members)

        def one(number: int) -> T | Exception:
            try:
                return step(number)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(members)) as threads:
            return list(threads.map(one, range(len(members)), timeout=scaled(40)))

    def join(self, manager: FakeManager) -> tuple[Any, int, int, int, Any, int]:
        """Waits for the others; returns the quorum, and the state to load if there is one."""
        with self._condition:
            self._waiting.add(id(manager))
            before = self._formed
            if len(self._waiting) == len(self._expected):
                self._form()
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: self._formed > before, scaled(20)):
                raise TimeoutError("no quorum")
            assert self._quorum is not None
            quorum_id, members, store = self._quorum
            state = self._states.get(id(manager))
            return store, members.index(manager), len(members), quorum_id, state, self._most

    def leave(self, manager: FakeManager) -> None:
        """Expects this replica no longer; the others may have waited for it."""
        with self._condition:
            self._expected = [other for other in self._expected if other is not manager]
            if self._expected and len(self._waiting) == len(self._expected):
                self._form()
                self._condition.notify_all()

    def _form(self) -> None:
        members = self._expected
        if self._quorum is None or self._quorum[1] != members or self.commit_failed:
            self._quorum = next(self._ids), members, dist.HashStore()
        self.commit_failed = False
        self._waiting.clear()
        self._formed += 1
        self._most = max(m.current_step() for m in members)
        ahead = [m for m in members if m.current_step() == self._most]
        behind = [m for m in members if m.current_step() < self._most]
        if self._most == 0:
            # As torchft's init_sync: all begin with the state of the first.
            behind = members[1:]
        self._states = {id(m): ahead[0].state() for m in behind}
