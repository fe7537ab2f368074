"""Every method and pipeline of the folders, under every exchange that can carry it."""

from collections.abc import Iterator
from itertools import product
from typing import get_args

import torch

from laconic.aggregate import Aggregation
from laconic.bench.fuzz.decoder import Decoder
from laconic.bench.fuzz.listener import SHAPE, Listener
from laconic.bench.fuzz.target import DECODE, Case, Target
from laconic.contract import OneRound
from laconic.errors import ConfigError
from laconic.plan import make_plan
from laconic.spec import compressor_classes, exchange_classes, format_spec, parse


def all_specs() -> list[str]:
    """Single methods in all their example settings, pipelines in the usual one of each half."""
    singles = [
        format_spec(method(**example))
        for method in compressor_classes().values()
        for example in method.examples
    ]
    return [*singles, *_pipelines()]


def cases_of(spec: str) -> list[Case]:
    """The decoder alone, where one message is all; then every legal exchange."""
    ways = _exchanges()
    if "|" not in spec:
        ways += [f"gather:aggregate={name}" for name in get_args(Aggregation) if name != "mean"]
    cases = [case for way in ways if _legal(case := Case(spec, way))]
    return [Case(spec, DECODE), *cases] if isinstance(parse(spec), OneRound) else cases


def open_target(case: Case) -> Target:
    if case.exchange != DECODE:
        return Listener(case)
    codec = parse(case.spec)
    assert isinstance(codec, OneRound)
    return Decoder(codec)


def _exchanges() -> list[str]:
    return [
        name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
        for name, cls in exchange_classes().items()
        for example in cls.examples
    ]


def _pipelines() -> Iterator[str]:
    usual = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]
    for one, two in product(usual, usual):
        try:
            yield format_spec(parse(f"{one} | {two}"))
        except ConfigError:
            continue


def _legal(case: Case) -> bool:
    try:
        make_plan(case.spec, None, case.exchange, [torch.zeros(SHAPE)], case.ranks)
    except ConfigError:
        return False
    return True
