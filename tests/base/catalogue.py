"""All classes of the catalogue folders as cases for the contract tests. No method is named here."""

from functools import cache
from itertools import product

import pytest

from gradwire.compressors._sparsifier import Sparsifier
from gradwire.errors import ConfigError
from gradwire.spec import compressor_classes, format_spec, memory_classes, parse
from gradwire.testing.case import Case, combinations, usual_case


def singles() -> list[str]:
    """Returns every method with every one of its example settings."""
    return [
        format_spec(cls(**example))
        for cls in compressor_classes().values()
        for example in cls.examples
    ]


def usual_specs() -> list[str]:
    """Returns every method in its usual setting."""
    return [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]


@cache
def pipelines() -> list[str]:
    """Returns every sparsifier followed by every quantiser, each in its usual setting."""
    found = []
    for one, two in product(usual_specs(), usual_specs()):
        try:
            found.append(format_spec(parse(f"{one} | {two}")))
        except ConfigError:
            continue
    return found


def memories() -> list[str]:
    return [format_spec(cls(**e)) for cls in memory_classes().values() for e in cls.examples]


def nested() -> list[str]:
    """Returns pipelines of three stages: every kind of selection in either place."""
    pairs = zip(usual_sparsifiers(), reversed(usual_sparsifiers()), strict=True)
    return [format_spec(parse(f"{one} | {two} | fp16")) for one, two in pairs]


def usual_sparsifiers() -> list[str]:
    return [spec for spec in usual_specs() if isinstance(parse(spec), Sparsifier)]


@cache
def usual_cases() -> list[Case]:
    """Returns every setting of every method, and every pipeline, as `attach` would use it."""
    return [usual_case(parse(spec)) for spec in all_specs()]


@cache
def all_cases() -> list[Case]:
    """Returns every method in its usual setting with every memory and exchange."""
    return [case for spec in usual_specs() for case in combinations(parse(spec))]


@cache
def legal_cases() -> list[Case]:
    return [case for case in all_cases() if case.why_not() is None]


def illegal_cases() -> list[Case]:
    return [case for case in all_cases() if case.why_not() is not None]


def every_usual_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", usual_cases(), ids=str)


def every_legal_case() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", legal_cases(), ids=str)


def all_specs() -> list[str]:
    return singles() + pipelines() + nested()


def every_compressor() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", all_specs())
