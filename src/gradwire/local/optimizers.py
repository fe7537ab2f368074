"""Optimisers of a local method: which parameters they train, and when all of them have stepped.

Several optimisers, such as Muon for matrices and AdamW for all other parameters, count as one: a
step of the method is one step of each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias
from weakref import ReferenceType, ref

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from gradwire.errors import ConfigError

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""The optimiser of a model, or several that share its trainable parameters."""

_MOST_NAMES = 3
"""Number of parameters that an error names."""

# Weak on both sides, as for parameters: an entry must not prolong the life of either.
_owners = WeakIdKeyDictionary()


def optimizer_list(model: nn.Module, given: Optimizers) -> list[Optimizer]:
    """Returns the optimisers; raises ConfigError if these are no model and its optimisers."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    if not isinstance(model, nn.Module) or not all(isinstance(o, Optimizer) for o in found):
        kinds = ", ".join(type(o).__name__ for o in found)
        raise ConfigError(
            "expected a model and its optimiser, in this order, got "
            f"{type(model).__name__} and {kinds}"
        )
    if not found:
        raise ConfigError("expected a model and its optimisers, got an empty list of them")
    return [o for o in found if isinstance(o, Optimizer)]


def trained_parameters(
    method: str, model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters by name, in the model's order.

    Raises ConfigError unless every one of them is in exactly one optimiser, and no other is in any.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    covered = {id(p): p for p in trainable_of(optimizers)}
    known = {id(p) for p in trainable.values()}
    outside = [f"one of shape {tuple(p.shape)}" for key, p in covered.items() if key not in known]
    if outside:
        raise ConfigError(
            f"{method}: {len(outside)} trainable parameters of the optimiser are not in the "
            f"model: {first_names(outside)}; pass the model that has them"
        )
    missing = [name for name, p in trainable.items() if id(p) not in covered]
    if missing:
        raise ConfigError(
            f"{method}: {len(missing)} trainable parameters of the model are not in the "
            f"optimiser: {first_names(missing)}; they would differ between workers. Pass an "
            "optimiser that covers them, or freeze them with requires_grad_(False)"
        )
    if not trainable:
        raise ConfigError(f"{method}: the model has no trainable parameter")
    _check_partition(method, trainable, optimizers)
    return trainable


def _check_partition(
    method: str, trainable: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> None:
    """Raises ConfigError if optimisers share a parameter, or one of them trains none."""
    owner: dict[int, int] = {}
    names = {id(p): name for name, p in trainable.items()}
    for number, optimizer in enumerate(optimizers):
        own = {id(p) for p in trainable_of([optimizer])}
        if not own:
            raise ConfigError(
                f"{method}: {_title(optimizers, number)} has no trainable parameter of the model; "
                "leave it out"
            )
        for key in own:
            if key in owner:
                both = f"{_title(optimizers, owner[key])} and {_title(optimizers, number)}"
                raise ConfigError(
                    f"{method}: parameter {names[key]!r} is in {both}; each parameter must be in "
                    "one optimiser"
                )
            owner[key] = number


def check_unchanged(
    method: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    start: Mapping[str, nn.Parameter],
) -> None:
    """Raises ConfigError if the optimisers' trainable parameters have changed since the start."""
    current = {id(p) for p in trainable_of(optimizers)}
    initial = {id(p): name for name, p in start.items()}
    if current == initial.keys():
        return
    gone = sorted(initial[key] for key in initial.keys() - current)
    names = {id(p): name for name, p in model.named_parameters()}
    new = sorted(names.get(key, "one outside the model") for key in current - initial.keys())
    what = [f"frozen or removed: {gone}"] * bool(gone) + [f"added or unfrozen: {new}"] * bool(new)
    raise _changed(method, "; ".join(what))


def check_covered(method: str, model: nn.Module, start: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError if the model has trainable parameters that it had not at the start."""
    known = {id(p) for p in start.values()}
    if all(id(p) in known for p in model.parameters() if p.requires_grad):
        return
    named = model.named_parameters()
    new = [name for name, p in named if p.requires_grad and id(p) not in known]
    raise _changed(method, f"trainable but not in the optimiser: {first_names(new)}")


def _changed(method: str, what: str) -> ConfigError:
    return ConfigError(
        f"{method}: parameters have changed since the start ({what}); end this context on all "
        "workers and begin another"
    )


def first_names(names: Sequence[str]) -> str:
    """Returns a text with the first names and the number of the others."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def trainable_of(optimizers: Sequence[Optimizer]) -> Iterator[nn.Parameter]:
    """Yields the trainable parameters of all optimisers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (p for p in group["params"] if p.requires_grad)


def learning_rate(optimizers: Sequence[Optimizer]) -> float:
    """Returns the largest learning rate of all groups of parameters."""
    return max(float(group["lr"]) for one in optimizers for group in one.param_groups)


def _title(optimizers: Sequence[Optimizer], number: int) -> str:
    return f"optimiser {number} ({type(optimizers[number]).__name__})"


class StepFollower:
    """Calls functions before and after each step of all optimisers, until `end`.

    The step of an optimiser that has stepped already, while another one has not, is refused before
    it happens: the two would train by different numbers of steps.
    """

    def __init__(
        self,
        owner: object,
        optimizers: Sequence[Optimizer],
        after_step: Callable[[], None],
        before_step: Callable[..., None] | None = None,
    ) -> None:
        self._method = type(owner).__name__
        self._optimizers = list(optimizers)
        self._after_step, self._before_step = after_step, before_step
        self._stepped: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for number, optimizer in enumerate(self._optimizers):
            _owners[optimizer] = ref(owner)
            self._handles += self._follow(number, optimizer)

    def _follow(self, number: int, optimizer: Optimizer) -> list[RemovableHandle]:
        def before(*arguments: object) -> None:
            self._check_turn(number)
            if not self._stepped and self._before_step is not None:
                self._before_step(*arguments)

        def after(*_: object) -> None:
            self._stepped.add(number)
            if len(self._stepped) == len(self._optimizers):
                self._stepped.clear()
                self._after_step()

        return [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def _check_turn(self, number: int) -> None:
        if number in self._stepped:
            raise ConfigError(
                f"{self._method}: {_title(self._optimizers, number)} steps again before "
                f"{self._late()}, but one step of the method is one step of each; call step() of "
                "all optimisers once before the next of any"
            )

    def check_complete(self, action: str) -> None:
        """Raises ConfigError if some optimisers have stepped and others have not."""
        if self._stepped:
            raise ConfigError(f"{self._method}: {action} before {self._late()}")

    def _late(self) -> str:
        late = [i for i in range(len(self._optimizers)) if i not in self._stepped]
        return f"{_title(self._optimizers, late[0])} has stepped"

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            _owners.pop(optimizer, None)


def check_not_shared(method: str, optimizers: Sequence[Optimizer]) -> None:
    """Raises ConfigError if an optimiser is in the context of another method already."""
    for number, optimizer in enumerate(optimizers):
        owner: ReferenceType[object] | None = _owners.get(optimizer)
        other = None if owner is None else owner()
        if other is not None:
            raise ConfigError(
                f"{method}: {_title(optimizers, number)} is in the context of a "
                f"{type(other).__name__} already; end that context first, or give this one an "
                "optimiser of its own"
            )
