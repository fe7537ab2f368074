"""Attacks of Byzantine workers, for simulations: what they send in place of their gradients.

Attackers are omniscient: they know the gradients of all honest workers of the step, and collude.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from gradwire.checks import check_number, check_whole
from gradwire.errors import ConfigError
from gradwire.spec import from_settings, read_settings
from gradwire.types import State


class AttackContext(NamedTuple):
    """Facts about the step: its number, the attacking rank, and a seed per run and tensor."""

    step: int
    rank: int
    seed: int


class Attack(ABC):
    """Forges the gradient of a worker; the configuration is immutable, the state separate."""

    @abstractmethod
    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        """Returns what is sent for one tensor; writes into `state`, but not into the others.

        `own` is the gradient that the worker computed, `honest` those of all honest workers,
        [workers, *shape].
        """

    def state(self, own: Tensor) -> State:
        """Returns the initial state for one tensor; empty for most attacks."""
        return {}


@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends minus `scale` times the worker's own gradient."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("sign_flip", "scale", self.scale)

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        return own * -self.scale


@dataclass(frozen=True)
class Noise(Attack):
    """Sends normal noise of standard deviation `scale`."""

    scale: float = 10.0

    def __post_init__(self) -> None:
        _check_positive("noise", "scale", self.scale)

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        # On the CPU, so that all devices get the same numbers.
        seed = (ctx.seed * 1_000_003 + ctx.step) * 4093 + ctx.rank
        generator = torch.Generator().manual_seed(seed % 2**63)
        noise = torch.randn(own.shape, generator=generator)
        return (self.scale * noise).to(own)


@dataclass(frozen=True)
class Alie(Attack):
    """Sends the honest mean minus `z` standard deviations, entry by entry (Baruch et al. 2019).

    A little is enough: among the honest gradients it is no outlier.
    """

    z: float = 1.5

    def __post_init__(self) -> None:
        check_number("alie", "z", self.z)

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        deviation, mean = torch.std_mean(honest, dim=0, correction=0)
        return mean - self.z * deviation


@dataclass(frozen=True)
class InnerProduct(Attack):
    """Sends minus `eps` times the honest mean (Xie, Koyejo & Gupta 2019).

    With a small `eps` it is near the honest gradients, and only shortens or turns the step.
    """

    eps: float = 0.5

    def __post_init__(self) -> None:
        _check_positive("inner_product", "eps", self.eps)

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        return honest.mean(dim=0) * -self.eps


@dataclass(frozen=True)
class Nan(Attack):
    """Sends NaN in every entry."""

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        return torch.full_like(own, float("nan"))


@dataclass(frozen=True)
class Replay(Attack):
    """Sends the worker's own gradient of `delay` steps ago, and zeros before there is one."""

    delay: int = 10

    def __post_init__(self) -> None:
        check_whole("replay", "delay", self.delay, 1)

    def state(self, own: Tensor) -> State:
        return {"past": own.new_zeros(self.delay, *own.shape)}

    def forge(self, own: Tensor, honest: Tensor, state: State, ctx: AttackContext) -> Tensor:
        slot = state["past"][ctx.step % self.delay]
        old = slot.clone()
        slot.copy_(own)
        return old


ATTACKS: Mapping[str, type[Attack]] = {
    "alie": Alie,
    "inner_product": InnerProduct,
    "nan": Nan,
    "noise": Noise,
    "replay": Replay,
    "sign_flip": SignFlip,
}


def attack_of(attack: Attack | str) -> Attack:
    """Returns the attack itself, or the one that a spec such as "alie:z=1.5" describes."""
    if isinstance(attack, Attack):
        return attack
    if not isinstance(attack, str):
        raise ConfigError(f"attack: expected a spec or an attack, got {attack!r}")
    name, settings = read_settings(attack)
    if name not in ATTACKS:
        raise ConfigError(f"no attack named {name!r}; there are {', '.join(ATTACKS)}")
    return from_settings(name, ATTACKS[name], settings)


def _check_positive(name: str, key: str, value: float) -> None:
    check_number(name, key, value)
    if value <= 0:
        raise ConfigError(f"{name}: {key} must be above 0, got {value!r}")


class Attackers:
    """The attacking workers of a simulation, by rank, with their states."""

    def __init__(self, attacks: Mapping[int, Attack | str], workers: int, seed: int) -> None:
        for rank in attacks:
            check_whole("attacks", "rank", rank, 0, workers - 1)
        if len(attacks) >= workers:
            raise ConfigError(f"attacks: one of {workers} workers must be honest, got {attacks}")
        self.attacks = {rank: attack_of(attack) for rank, attack in sorted(attacks.items())}
        self._honest = [rank for rank in range(workers) if rank not in attacks]
        self._seed, self._step = seed, 0
        self._states: dict[tuple[int, str], State] = {}

    def forge(self, names: Sequence[str], gradients: Sequence[Sequence[Tensor]]) -> None:
        """Overwrites the gradients of attackers, [worker][name], by what they send."""
        for index, name in enumerate(names):
            honest = torch.stack([gradients[rank][index] for rank in self._honest])
            for rank, attack in self.attacks.items():
                own = gradients[rank][index]
                state = self._states.setdefault((rank, name), attack.state(own))
                ctx = AttackContext(self._step, rank, self._seed * 2**32 + crc32(name.encode()))
                own.copy_(attack.forge(own, honest, state, ctx))
        self._step += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the number of steps, and all states by rank, key and name of the tensor."""
        found = {
            f"{rank}/{key}/{name}": tensor.clone()
            for (rank, name), state in self._states.items()
            for key, tensor in state.items()
        }
        return {"step": torch.tensor(self._step), **found}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._step, self._states = int(state["step"]), {}
        for path, tensor in state.items():
            if path != "step":
                rank, key, name = path.split("/", 2)
                self._states.setdefault((int(rank), name), {})[key] = tensor.clone()
