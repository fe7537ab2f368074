"""Base of decentralised methods: after each step workers average with their neighbors alone.

Holds what all of them share: the topology, engines for the messages, statistics, state, and the
consensus model. Models of workers differ between steps.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base import Aggregator, Compressor, MultiRound, OneRound
from gradwire.comm.meter import ring_bytes
from gradwire.decentralized.gossip import Gossip, PublicCopies, wide_copies
from gradwire.decentralized.mixing import Mixing
from gradwire.decentralized.topology import Topology, topology_of
from gradwire.engine.engine import Engine
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.exchange.gather import GatherExchange
from gradwire.local.base import LocalMethod, LocalNanPolicy, check_nan_policy
from gradwire.local.workers import Group
from gradwire.memory.none import NoMemory
from gradwire.policies import MethodSpec, find_policies
from gradwire.spec import ExchangeConfig, compressor_of, format_spec
from gradwire.types import State

log = logging.getLogger("gradwire")


class DecentralizedMethod(LocalMethod):
    """A context in which each optimiser step is followed by an exchange with neighbors."""

    takes_shards: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        topology: Topology | str,
        sync_every: int,
        nan_policy: LocalNanPolicy,
        group: Group,
        seed: int,
        broadcast: bool,
    ) -> None:
        method = type(self).__name__
        check_nan_policy(method, nan_policy)
        chosen = topology_of(topology)
        LocalMethod.__init__(self, model, optimizer, sync_every, group, seed, broadcast)
        self.mixing = Mixing(chosen, self._workers.size)
        self._nan_policy: LocalNanPolicy = nan_policy
        self._consensus_distance: float | None = None
        self._own_stats = self._mixing_stats
        level = logging.INFO if self._workers.rank == 0 else logging.DEBUG
        log.log(level, "%s: %s", method, self.mixing.describe())

    @property
    def spectral_gap(self) -> float:
        """The share of their distance to the mean that workers lose when they average once."""
        return self.mixing.spectral_gap

    @property
    @abstractmethod
    def gossip(self) -> Gossip:
        """The exchange of this worker with its neighbors."""

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Gives the model the mean of all workers' parameters and buffers, as `averaged` does.

        Called on all workers; notes this worker's distance from the mean for `stats()`.
        """
        own = wide_copies(self.parameters)
        with self.averaged():
            yield
            mean = wide_copies(self.parameters)
            squares = [(mean[name] - copy).square().sum() for name, copy in own.items()]
            self._consensus_distance = float(torch.stack(squares).sum().sqrt())

    def planned_ratio(self) -> float:
        """Returns the bytes of a ring all-reduce at every step over those of the messages."""
        dense = ring_bytes(sum(p.nbytes for p in self.parameters.values()), self._workers.size)
        sent = self.mixing.mean_degree(self._workers.rank) * self.gossip.message_bytes()
        return self.sync_every * dense / sent if sent else 1.0

    def _mixing_stats(self) -> Mapping[str, object]:
        """Returns what differs from other local methods, and how far apart workers are.

        `neighbor_distance` is that of the last exchange, between this worker's public copy and the
        weighted mean of its neighbors'; `consensus_distance` that to the mean of all workers, as
        the last `consensus()` has found it.
        """
        return {
            "exchange": "neighbors",
            "topology": type(self.mixing.topology).__name__,
            "spectral_gap": self.spectral_gap,
            "neighbors": self.mixing.mean_degree(self._workers.rank),
            "neighbor_distance": float(self.gossip.distance),
            "consensus_distance": self._consensus_distance,
        }

    def _engines(self) -> Sequence[Engine]:
        return [copies.engine for copies in self.gossip.copies]

    def _common(self) -> Mapping[str, Tensor]:
        # Only at the start, where the base compares the whole models.
        return {}

    def _flat_parameters(self) -> State:
        """Returns the parameters as flat tensors, which are views unless not contiguous."""
        return {name: p.detach().reshape(-1) for name, p in self.parameters.items()}

    def _write_back(self, vectors: Mapping[str, Tensor]) -> None:
        """Copies flat tensors to those parameters that are not contiguous."""
        for name, parameter in self.parameters.items():
            if vectors[name].data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(vectors[name].view(parameter.shape))

    def _make_gossip(self, copies: Sequence[PublicCopies], *, fixed_weights: bool = True) -> Gossip:
        if fixed_weights and self.mixing.period > 1:
            raise ConfigError(
                f"{type(self).__name__}: keeps one mean of its neighbors' copies, so that weights "
                f"must be the same at every step, got {type(self.mixing.topology).__name__}; use "
                "Exponential, or DSGD"
            )
        checks = self._nan_policy == "raise"
        return Gossip(copies, self.mixing, self._workers.rank, checks)

    def _make_engine(
        self, compressor: MethodSpec, seed: int, *, needs_contraction: bool = True
    ) -> Engine:
        """Returns the lanes of one message; refuses what cannot be sent to neighbors alone."""
        method, workers = type(self).__name__, self._workers
        for used in _compressors(compressor):
            check_compressor(method, used, needs_contraction)
        tensors = {name: _stand_in(p) for name, p in self.parameters.items()}
        plan = make_plan(compressor, "none", "auto", tensors, workers.size)
        for entry in plan.methods:
            if not isinstance(entry.memory, NoMemory):
                raise ConfigError(
                    f"{method}: public copies keep what {format_spec(entry.compressor)} does not "
                    f"send; leave memory {format_spec(entry.memory)!r} out of the policy"
                )
        plan = replace(plan, wrap=_only_encode)
        # Whether messages are finite is checked by the gossip.
        return Engine(plan, tensors, workers.rank, workers.size, seed, "ignore")


def check_compressor(method: str, compressor: Compressor, needs_contraction: bool) -> None:
    """Raises ConfigError unless a compressor's messages can be decoded one by one and added up."""
    spec, traits = format_spec(compressor), compressor.traits()
    if traits.is_vote:
        reason = "sends votes, of which all workers take the majority, and no length"
    elif isinstance(compressor, MultiRound):
        reason = "defines its own rounds among all workers"
    elif needs_contraction and not traits.contraction:
        why = traits.why_not or "it is none"
        reason = f"is needed as a contraction, or public copies diverge: {why}"
    else:
        return
    raise ConfigError(f"{method}: {spec} {reason}; use a method such as 'topk:ratio=0.01'")


def _compressors(method: MethodSpec) -> list[Compressor]:
    policies = find_policies(method)
    if policies is not None:
        return [policy.compressor for policy in policies.policies]
    assert isinstance(method, Compressor | str)
    return [compressor_of(method)]


def _only_encode(config: ExchangeConfig, compressor: Compressor) -> Aggregator:
    """Returns an aggregator without state: messages do not go through an exchange."""
    assert isinstance(compressor, OneRound)
    return GatherExchange(compressor)


def _stand_in(parameter: Tensor) -> Tensor:
    """Returns a float32 tensor of no memory for a float64 one, whose differences are float32."""
    if parameter.dtype != torch.float64:
        return parameter
    return torch.zeros((), device=parameter.device).expand(parameter.shape)
