"""The conformance suite: what the library relies on, one function for each property."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import getdoc
from typing import Any, NamedTuple, TypeAlias

from gradwire.base import Compressor, Exchange, Memory
from gradwire.control.base import Controller
from gradwire.errors import ConfigError
from gradwire.registry import EXCHANGES
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.testing import controllers, exchanges, messages
from gradwire.testing.case import (
    Case,
    ConformanceError,
    combinations,
    exchange_examples,
    usual_case,
)

Item: TypeAlias = Compressor | Memory | Controller | type[Exchange] | str
"""What can be checked: an instance, a registered exchange's class, or the spec of a compressor."""


class Property(NamedTuple):
    """A property of an item that the library relies on; calling it raises ConformanceError."""

    name: str
    subject: str
    """The item, with what it is combined with."""
    statement: str
    run: Callable[[], None]

    def __call__(self) -> None:
        try:
            self.run()
        except Exception as error:
            kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
            raise ConformanceError(
                f"{self.subject} does not conform: {self.name}\n"
                f"  property: {self.statement}\n"
                f"  found: {kind}{error}"
            ) from error

    def __str__(self) -> str:
        return f"{self.name}-{self.subject}"


def check(item: Item) -> None:
    """Checks a compressor, memory, exchange or controller; raises ConformanceError if it fails.

    The text names the property. Compressors, memories and controllers are given as instances; a
    compressor as a spec, too; an exchange as its class, which must be registered.
    """
    for one in properties(item):
        one()


def properties(item: Item) -> Iterator[Property]:
    """Yields the properties that `check` checks, with everything the item may be combined with."""
    if isinstance(item, str):
        item = parse(item)
    if isinstance(item, Compressor):
        yield from _of_compressor(item)
    elif isinstance(item, Memory):
        cases = [c for codec in _one_per_kind() for c in combinations(codec, [item])]
        yield from _of_cases(cases, exchanges.ALWAYS)
    elif isinstance(item, Controller):
        for check_one in controllers.PROPERTIES:
            yield _property(check_one, item, format_spec(item))
    elif isinstance(item, type) and issubclass(item, Exchange):
        yield from _of_exchange(item)
    else:
        raise ConfigError(
            "check: expected an instance of a compressor, memory or controller, or the class of a "
            f"registered exchange, got {item!r}"
        )


def _of_compressor(compressor: Compressor) -> Iterator[Property]:
    for check_one in messages.PROPERTIES:
        yield _property(check_one, compressor, format_spec(compressor))
    usual = usual_case(compressor)
    for check_usual in exchanges.USUAL:
        yield _property(check_usual, usual, str(usual))
    yield from _of_cases(combinations(compressor), exchanges.COMBINED)


def _of_exchange(cls: type[Exchange]) -> Iterator[Property]:
    name = EXCHANGES.name_of(cls) or next(
        (name for name, known in EXCHANGES.own().items() if known is cls), None
    )
    if name is None:
        raise ConfigError(
            f"check: the exchange {cls.__name__} has no name; gradwire.register it before"
        )
    tried = exchange_examples(name, cls)
    cases = [c for codec in _one_per_kind() for c in combinations(codec, exchanges=tried)]
    yield from _of_cases(cases, exchanges.ALWAYS)


def _of_cases(
    cases: Iterable[Case], functions: Iterable[Callable[[Case], None]]
) -> Iterator[Property]:
    """Yields properties of the cases that are legal."""
    for case in cases:
        if case.why_not() is None:
            for function in functions:
                yield _property(function, case, str(case))


def _property(function: Callable[[Any], None], item: object, subject: str) -> Property:
    statement = (getdoc(function) or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
    return Property(function.__name__, subject, statement, partial(function, item))


def _one_per_kind() -> list[Compressor]:
    """Returns a compressor of each family and of each of its kinds of messages."""
    found: dict[object, Compressor] = {}
    for cls in compressor_classes().values():
        usual = cls(**cls.examples[0])
        traits = usual.traits()
        kind = cls.family, traits.summable, traits.contraction, traits.is_vote
        found.setdefault(kind, usual)
    return list(found.values())
