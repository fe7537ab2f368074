"""ByzSGD in simulation: parameter servers are replicated; some of them, and workers, are Byzantine.

El-Mhamdi, Guerraoui, Guirguis, Hoang & Rouault 2022. No node is trusted: a worker takes the median
of the models of several servers, a server the gradients of several workers by minimum-diameter
averaging, and from time to time servers replace their models by medians of each other's
(distributed median contraction), which keeps them together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from gradwire.attacks import Attack, AttackContext, Attackers, attack_of
from gradwire.base.aggregation import aggregate
from gradwire.checks import check_number, check_whole
from gradwire.errors import ConfigError

Gradient: TypeAlias = Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]]
"""Computes the gradients of a worker, given by its number, at these parameters."""


@dataclass(frozen=True)
class Nodes:
    """Numbers of servers and workers, and how many of each may send anything.

    A node waits for a quorum, all but the faulty ones of the other kind, since these may be silent.
    """

    servers: int
    faulty_servers: int
    workers: int
    faulty_workers: int

    def __post_init__(self) -> None:
        for name in ("servers", "workers"):
            check_whole("byzsgd", name, getattr(self, name), 1)
            check_whole("byzsgd", f"faulty_{name}", getattr(self, f"faulty_{name}"), 0)
        # A single server and no faulty one is an ordinary parameter server.
        beyond = 1 if self.faulty_servers else 0
        _check_more("servers", self.servers, self.faulty_servers, beyond)
        _check_more("workers", self.workers, self.faulty_workers, 0)

    @property
    def model_quorum(self) -> int:
        return self.servers - self.faulty_servers

    @property
    def gradient_quorum(self) -> int:
        return self.workers - self.faulty_workers


class ByzSGD:
    """Servers with a model each, and workers with none; all in this process.

    `attacks` and `server_attacks` are those of workers and servers by number. A server may send
    other models to each node. Which nodes answer first, and so make a quorum, is random.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        nodes: Nodes,
        *,
        gather_every: int = 10,
        attacks: Mapping[int, Attack | str] | None = None,
        server_attacks: Mapping[int, Attack | str] | None = None,
        seed: int = 0,
    ) -> None:
        check_whole("byzsgd", "gather_every", gather_every, 1)
        if not parameters:
            raise ConfigError("byzsgd: there is no parameter to train")
        self.nodes, self.gather_every, self.seed = nodes, gather_every, seed
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        start = torch.cat([tensor.detach().flatten() for tensor in parameters.values()])
        self.models = start.repeat(nodes.servers, 1)
        """The models that servers hold, [servers, numel]."""
        self.steps = 0
        self.sent_bytes = 0
        """Bytes of all messages of all nodes that were part of a quorum."""
        self._liars = {s: attack_of(a) for s, a in (server_attacks or {}).items()}
        for server, attack in self._liars.items():
            check_whole("byzsgd: server_attacks", "server", server, 0, nodes.servers - 1)
            if attack.state(start):
                raise ConfigError(f"byzsgd: a server has no attack that keeps state, got {attack}")
        if len(self._liars) == nodes.servers:
            raise ConfigError(f"byzsgd: one of {nodes.servers} servers must be honest")
        self._attackers = Attackers(attacks or {}, nodes.workers, seed)

    @property
    def honest(self) -> list[int]:
        """The servers that are honest."""
        return [server for server in range(self.nodes.servers) if server not in self._liars]

    def step(self, gradient: Gradient, learning_rate: float) -> None:
        """Takes a step of all servers (scatter), and every `gather_every` steps a gather."""
        check_number("byzsgd", "learning_rate", learning_rate)
        generator = self._generator("scatter")
        found = []
        for worker in range(self.nodes.workers):
            model = self._median_model(generator, worker)
            grads = gradient(self._named(model), worker)
            if {name: tuple(grad.shape) for name, grad in grads.items()} != self._shapes:
                shapes = {name: tuple(grad.shape) for name, grad in grads.items()}
                raise ConfigError(f"byzsgd: worker {worker} has {shapes}, expected {self._shapes}")
            found.append([torch.cat([grads[name].flatten() for name in self._shapes])])
        self._attackers.forge(["model"], found)
        rows = torch.stack([own for (own,) in found])
        for server in range(self.nodes.servers):
            quorum = self._quorum(generator, self.nodes.workers, self.nodes.gradient_quorum)
            self.sent_bytes += rows[quorum].nbytes
            step = aggregate(rows[quorum], "diameter", self.nodes.faulty_workers)
            self.models[server] -= learning_rate * step
        self.steps += 1
        if self.steps % self.gather_every == 0:
            self.gather()

    def gather(self) -> None:
        """Replaces every model by the median of a quorum of models, its own among them."""
        generator = self._generator("gather")
        receivers = range(self.nodes.workers, self.nodes.workers + self.nodes.servers)
        self.models = torch.stack(
            [self._median_model(generator, r, own) for own, r in enumerate(receivers)]
        )

    def model(self) -> dict[str, Tensor]:
        """Returns the median of the honest servers' models, by name."""
        return self._named(aggregate(self.models[self.honest], "median"))

    def diameter(self) -> float:
        """Returns the largest distance between the models of two honest servers."""
        honest = self.models[self.honest].double()
        return float(torch.cdist(honest, honest).max())

    def state_dict(self) -> dict[str, object]:
        return {
            "models": self.models.clone(),
            "steps": torch.tensor(self.steps),
            "sent_bytes": torch.tensor(self.sent_bytes),
            "attackers": self._attackers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        models, attackers = state.get("models"), state.get("attackers")
        steps, sent_bytes = state.get("steps"), state.get("sent_bytes")
        if not isinstance(models, Tensor) or models.shape != self.models.shape:
            has = tuple(models.shape) if isinstance(models, Tensor) else type(models).__name__
            expected = tuple(self.models.shape)
            raise ConfigError(f"byzsgd: the state's models are {has}, expected {expected}")
        assert isinstance(steps, Tensor)
        assert isinstance(sent_bytes, Tensor)
        assert isinstance(attackers, Mapping)
        self.models, self.steps, self.sent_bytes = models.clone(), int(steps), int(sent_bytes)
        self._attackers.load_state_dict(attackers)

    def _median_model(
        self, generator: torch.Generator, receiver: int, own: int | None = None
    ) -> Tensor:
        """Returns the median of the models that a receiver gets; a server does not send its own."""
        quorum = self._quorum(generator, self.nodes.servers, self.nodes.model_quorum, own)
        sent = torch.stack(
            [self.models[s] if s == own else self._sent_model(s, receiver) for s in quorum]
        )
        self.sent_bytes += sent.nbytes - (0 if own is None else sent[0].nbytes)
        return aggregate(sent, "median")

    def _sent_model(self, server: int, receiver: int) -> Tensor:
        """Returns what a server sends to this receiver: its model, or a forged one."""
        own = self.models[server]
        if server not in self._liars:
            return own
        ctx = AttackContext(self.steps, server, self.seed * 2**20 + receiver)
        return self._liars[server].forge(own, self.models[self.honest], {}, ctx)

    def _quorum(
        self, generator: torch.Generator, nodes: int, size: int, own: int | None = None
    ) -> list[int]:
        """Returns which nodes answer first, in order of their numbers; `own` is always one."""
        order: list[int] = torch.randperm(nodes, generator=generator).tolist()
        if own is not None:
            order.remove(own)
            order.insert(0, own)
        return sorted(order[:size])

    def _generator(self, phase: str) -> torch.Generator:
        return torch.Generator().manual_seed(crc32(f"{phase} {self.seed} {self.steps}".encode()))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [prod(shape) for shape in self._shapes.values()]
        pairs = zip(self._shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in pairs}


def _check_more(kind: str, total: int, faulty: int, beyond: int) -> None:
    """Raises ConfigError unless there are more nodes than three times the faulty, plus `beyond`."""
    if total <= 3 * faulty + beyond:
        rule = f"3 * {faulty} + 1" if beyond else f"3 * {faulty}"
        raise ConfigError(
            f"byzsgd: faulty_{kind}={faulty} needs {kind} > {rule} = {3 * faulty + beyond}, "
            f"got {total}"
        )
