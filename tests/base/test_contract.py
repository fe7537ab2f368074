"""The contract of every method: the conformance suite, with every memory and exchange it goes with.

The properties are functions of `gradwire.testing`, so that methods outside the package are held to
the same.
"""

from collections.abc import Callable

import pytest
from catalogue import (
    every_compressor,
    every_legal_case,
    every_usual_case,
    illegal_cases,
    legal_cases,
    memories,
)

from gradwire.base import Compressor
from gradwire.memory.residual import Residual
from gradwire.spec import compressor_classes, format_spec, parse
from gradwire.testing.case import Case
from gradwire.testing.exchanges import COMBINED, USUAL, nothing_is_lost, resumes_bitwise
from gradwire.testing.messages import PROPERTIES, many_entries

ALONE = [function for function in PROPERTIES if function is not many_entries]
"""Properties of messages that every setting and every pipeline is tested for."""

RESIDUAL_CASES = [case for case in legal_cases() if case.memory == Residual()]


@pytest.mark.parametrize("function", USUAL, ids=lambda function: function.__name__)
@every_usual_case()
def test_usual_cases_have(case: Case, function: Callable[[Case], None]) -> None:
    function(case)


@pytest.mark.parametrize("function", ALONE, ids=lambda function: function.__name__)
@every_compressor()
def test_messages_have(spec: str, function: Callable[[Compressor], None]) -> None:
    function(parse(spec))


@pytest.mark.parametrize("cls", compressor_classes().values(), ids=lambda cls: cls.__name__)
def test_a_million_entries_and_three(cls: type[Compressor]) -> None:
    many_entries(cls(**cls.examples[0]))


@pytest.mark.parametrize("case", RESIDUAL_CASES, ids=str)
def test_sent_plus_left_is_given(case: Case) -> None:
    nothing_is_lost(case)


@every_legal_case()
def test_every_combination_agrees_and_resumes_bitwise(case: Case) -> None:
    resumes_bitwise(case)


def test_the_suite_of_combinations_is_all_run_here() -> None:
    assert set(COMBINED) == {nothing_is_lost, resumes_bitwise}
    assert RESIDUAL_CASES


@pytest.mark.parametrize("memory", memories())
def test_illegal_combinations_give_the_reason(memory: str) -> None:
    cases = [case for case in illegal_cases() if format_spec(case.memory) == memory]
    assert cases
    for case in cases:
        reason = case.why_not()
        assert reason is not None, case
        assert case.spec in reason
        assert "does not go with" in reason
