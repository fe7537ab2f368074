"""All options in pairs: a pair trains with equal weights on all ranks, or is refused on all."""

from dataclasses import fields
from itertools import product
from typing import Any

import option_pairs_jobs as jobs
import pytest

from gradwire.control.base import CONTROLLERS
from gradwire.integrations.settings import Settings
from gradwire.spec import exchange_classes, format_spec, memory_classes
from processes import Ranks

BASE: dict[str, Any] = {"compressor": "topk:ratio=0.1"}

SAMPLES: dict[str, list[Any]] = {
    "compressor": ["powersgd", "dgc:ratio=0.1", "signsgd", "int4", "none"],
    "memory": [format_spec(cls(**cls.examples[0])) for cls in memory_classes().values()],
    "exchange": [
        name + (":" if example else "") + ",".join(f"{k}={v}" for k, v in example.items())
        for name, cls in exchange_classes().items()
        for example in cls.examples
    ],
    "seed": [7],
    "nan_policy": ["raise", "ignore"],
    "check_every": [1],
    "checksum": [True],
    "controller": [
        "autopilot",
        "gravac",
        "gravac-paper",
        "accordion:low=0.2,high=0.1",
        "schedule:last=0.1",
    ],
    "cuda_graphs": [False],
    "least_bytes": [100_000],
    "chunk_bytes": [8192],
    "scaler": [True],
}
"""Values other than the default of every option of `attach`."""

NEUTRAL = {"check_every", "checksum", "cuda_graphs"}
"""Options that change no result. (A sum's rounding depends on whether a flag travels with it.)"""

METHOD = {"compressor", "memory", "exchange"}
"""The contract tests combine these."""

SINGLES = [{name: value} for name, values in SAMPLES.items() for value in values]


def pairs(name: str) -> list[dict[str, Any]]:
    """Returns the pairs of this option's values with those of all options that come later."""
    later = [*SAMPLES][[*SAMPLES].index(name) + 1 :]
    others = [other for other in later if not {name, other} <= METHOD]
    return [
        {name: one, other: two}
        for other in others
        for one, two in product(SAMPLES[name], SAMPLES[other])
    ]


def key(options: dict[str, Any]) -> str:
    return str(sorted(options.items()))


@pytest.fixture(scope="module")
def alone(four_ranks: Ranks) -> dict[str, jobs.Run]:
    """Runs every option alone, by its value."""
    settings = [{}, *SINGLES]
    results = four_ranks.run(jobs.runs_job, [BASE | one for one in settings])
    check_ranks(settings, results)
    return {key(one): run for one, run in zip(settings, results[0], strict=True)}


def check_ranks(settings: list[dict[str, Any]], results: list[list[jobs.Run]]) -> None:
    """Asserts that ranks agree: on the error, or on finite weights after all steps."""
    for options, *runs in zip(settings, *results, strict=True):
        assert len(set(runs)) == 1, (options, runs)
        assert runs[0].refused or (runs[0].steps, runs[0].finite) == (jobs.STEPS, True), options


def test_every_option_has_samples() -> None:
    assert {*SAMPLES} == {f.name for f in fields(Settings)} | {"scaler"}
    controllers = CONTROLLERS.own()
    assert {str(sample).split(":")[0] for sample in SAMPLES["controller"]} == {*controllers}


def test_every_option_works_alone(alone: dict[str, jobs.Run]) -> None:
    refused = {one: run.refused for one, run in alone.items() if run.refused}
    # A sum of top-k messages would mix up their indices.
    assert all("exchange" in one and "'mean'" in str(text) for one, text in refused.items()), (
        refused
    )


@pytest.mark.parametrize("name", [name for name in SAMPLES if pairs(name)])
def test_options_work_in_pairs(four_ranks: Ranks, alone: dict[str, jobs.Run], name: str) -> None:
    settings = pairs(name)
    results = four_ranks.run(jobs.runs_job, [BASE | one for one in settings])
    check_ranks(settings, results)
    refused = 0
    for options, run in zip(settings, results[0], strict=True):
        values = [alone[key({name: value})] for name, value in options.items()]
        if run.refused is not None:
            refused += 1
            continue
        assert all(one.refused is None for one in values), options
        if NEUTRAL & options.keys() and "controller" not in options:
            # Its partner's result, whatever that is.
            rest = {name: value for name, value in options.items() if name not in NEUTRAL}
            assert run.weights == alone[key(rest)].weights, options
    assert refused <= len(settings) / 2


def test_checksums_change_no_result_of_messages_of_variable_length(four_ranks: Ranks) -> None:
    """Their sizes are exchanged first, between nodes too, and have a checksum themselves."""
    plain = [{"compressor": "dgc:ratio=0.1", "exchange": x} for x in SAMPLES["exchange"]]
    settings = [one | {"checksum": checksum} for one in plain for checksum in (False, True)]
    results = four_ranks.run(jobs.runs_job, settings)
    check_ranks(settings, results)
    runs = results[0]
    assert runs[::2] == runs[1::2]
    assert sum(run.refused is None for run in runs) >= len(runs) / 2
