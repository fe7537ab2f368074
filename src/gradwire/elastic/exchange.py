"""Two-phase exchange: averages tensors over the replicas of a quorum, for a step that may fail.

New residuals stay pending until the Manager decides. If the step is not committed, residuals are
what they were before.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.comm.base import run_program
from gradwire.comm.meter import Meter
from gradwire.elastic.managed_comm import ManagedComm
from gradwire.elastic.manager import Manager
from gradwire.elastic.membership import Membership
from gradwire.engine.engine import Engine
from gradwire.engine.nonfinite import Verdict
from gradwire.engine.plan import Plan
from gradwire.errors import ConfigError, NonFiniteError, PeerError, WireError

log = logging.getLogger("gradwire")

Message: TypeAlias = tuple[Sequence[str], Sequence[Tensor]]
"""The names of some parameters, and the tensors of theirs to average."""


class TwoPhaseExchange:
    """Runs an engine's exchange inside the steps of a Manager, and regroups it after each quorum.

    A replica keeps its residuals while it is present. Those of a lost replica are gone with it; one
    that receives its state from a peer begins with zeros, and so does all state that replicas
    share (warm starts, means that a memory keeps, residuals of shards) after each new quorum.
    """

    def __init__(
        self,
        manager: Manager,
        engine: Engine,
        make_plan: Callable[[int], Plan],
        settings: Callable[[Plan], Mapping[str, object]],
        checksum: bool,
    ) -> None:
        self._manager, self._engine = manager, engine
        self._make_plan, self._settings = make_plan, settings
        self._comm, self._aux_comm = ManagedComm(manager, checksum), ManagedComm(manager)
        self._device = next(iter(engine.tensors.values())).device
        self._membership = Membership()
        self._quorum_id: int | None = None
        self._joined = False
        self._is_open = False
        self._verdict: Verdict | None = None
        self.commits = self.rollbacks = self.received_states = 0
        self.dropped_norm = 0.0
        self.nonfinite: NonFiniteError | None = None
        """The error of the last step if a value was not finite on some replica."""

    @property
    def meter(self) -> Meter:
        """Counts the bytes of the method, without those of introductions."""
        return self._comm.meter

    def state_received(self) -> None:
        """Begins with zero residuals: this replica has received its state from a peer.

        With an asynchronous quorum that happens after the exchange of the step, in which the
        replica was silent, and which has begun with zeros already.
        """
        self.received_states += 1
        if not self._is_open:
            self._joined = True
            self._drop_residuals()

    def average(self, messages: Iterable[Message], *, silent: bool) -> bool:
        """Replaces tensors by their mean over all replicas that are not `silent`.

        The tensors of a silent replica must be zeros. After a failure, which is reported to the
        Manager, it returns False, and the tensors must not be used. Raises ConfigError on a replica
        that is set up differently from those that were there before, which leaves the quorum.
        """
        self._is_open, self._verdict, self.nonfinite = True, None, None
        try:
            self._manager.wait_quorum()
            self._follow_quorum(silent)
            step = self._manager.current_step()
            self._engine.set_steps(dict.fromkeys(self._engine.tensors, step))
            averaged: list[Tensor] = []
            for names, tensors in messages:
                run_program(self._engine.bucket_program(names, tensors), self._comm)
                averaged += tensors
            return self._check(averaged)
        except (PeerError, WireError) as error:
            self._fail(error)
            return False
        except ConfigError:
            self._leave()
            raise

    def finish(self, *, committed: bool) -> None:
        """Ends a step, also one without an exchange, as the Manager has decided."""
        if self._is_open:
            # Of a step that was interrupted some flags are left, which are no longer needed.
            verdict = self._verdict or self._engine.check_step()
            self._engine.settle_step(counts=committed and not verdict.nonfinite)
        self._is_open = self._joined = False
        if committed:
            self.commits += 1
            self._membership.step_committed(self._comm.size)
        else:
            self.rollbacks += 1

    def stats(self) -> dict[str, object]:
        """Returns the engine's statistics, and those of the quorums."""
        return {**self._engine.stats(self._comm.meter), **self.counts()}

    def counts(self) -> dict[str, object]:
        """Returns the statistics of quorums and steps."""
        members = self._membership
        return {
            "auxiliary_bytes": self._aux_comm.meter.sent_bytes,
            "replicas": self._comm.size,
            "quorums": members.quorums,
            "joined_replicas": members.joined,
            "lost_replicas": members.lost,
            "commits": self.commits,
            "rollbacks": self.rollbacks,
            "received_states": self.received_states,
            "dropped_norm": self.dropped_norm,
        }

    def _follow_quorum(self, silent: bool) -> None:
        """Introduces this replica to those of a new quorum, and regroups the engine."""
        if (error := self._manager.errored()) is not None:
            raise PeerError(f"the quorum could not be formed: {error}")
        if silent and self._quorum_id == self._manager._quorum_id:
            raise PeerError("this replica is silent in a quorum that counts on it")
        if self._quorum_id == self._manager._quorum_id:
            return
        self._comm.update()
        self._aux_comm.update()
        rank, size = self._comm.rank, self._comm.size
        plan = self._make_plan(size)
        gone = self._membership.introduce(
            self._aux_comm,
            self._device,
            self._settings(plan),
            joined=self._joined or silent,
            silent=silent,
        )
        self._engine.regroup(plan, rank, size)
        if silent:
            self._drop_residuals()
        if gone:
            norm = self._engine.errors()["residual_norm"]
            log.warning(
                "%d replicas have left with their residuals; %d are present, and the residuals of "
                "this one have norm %.3g",
                gone,
                size,
                norm,
            )
        self._quorum_id = self._manager._quorum_id

    def _check(self, averaged: list[Tensor]) -> bool:
        """Returns whether all tensors are means; corrects the divisor for silent replicas."""
        self._verdict = verdict = self._engine.check_step()
        if verdict.corrupted:
            raise WireError("a message is not finite, but was when it was sent")
        if verdict.nonfinite and self._engine.nan_policy == "raise":
            step = self._manager.current_step()
            self.nonfinite = NonFiniteError(self._engine.skipped.add(step))
            # All replicas found it, so none of them waits for another.
            self._manager.report_error(self.nonfinite)
            return False
        if verdict.nonfinite:
            self._engine.skipped.add(self._manager.current_step())
        if self._membership.contributors != self._comm.size:
            torch._foreach_mul_(averaged, self._comm.size / self._membership.contributors)
        return True

    def _fail(self, error: Exception) -> None:
        """Reports an error, so that the step is not committed, and frees those who wait for us."""
        log.warning("a step of %d replicas failed: %s", self._comm.size, error)
        self._manager.report_error(error)
        self._manager._pg.abort()

    def _leave(self) -> None:
        """Leaves the quorum for good: nobody waits for this replica, even if its process lives."""
        self._manager._pg.abort()
        self._manager.shutdown(wait=False)

    def _drop_residuals(self) -> None:
        norm = self._engine.restart()
        if norm:
            log.warning("this replica continues from a peer; residuals of norm %.3g end", norm)
        self.dropped_norm += norm
