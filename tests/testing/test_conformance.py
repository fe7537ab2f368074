"""The conformance suite fails by name what does not conform.

That it passes for what does is tested with the whole catalogue, in tests/base.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.compressors.int4 import Int4
from gradwire.compressors.natural import Natural
from gradwire.compressors.topk import TopK
from gradwire.control.base import ControllerState, StateDict
from gradwire.control.schedule import Schedule
from gradwire.exchange.gather import GatherExchange
from gradwire.memory.residual import Residual
from gradwire.plugins import (
    Compressor,
    EFInput,
    EncodeContext,
    Parts,
    Rounds,
    State,
    Traits,
    memoized,
)
from gradwire.registry import EXCHANGES
from gradwire.testing import ConformanceError, check, properties


@dataclass(frozen=True)
class Louder(TopK):
    """Decodes entries as 1 % larger on rank 1."""

    def decode_add(
        self, out: Tensor, messages: Sequence[Parts], weight: float, ctx: EncodeContext
    ) -> None:
        TopK.decode_add(self, out, messages, weight * (1 + 0.01 * ctx.rank), ctx)


@dataclass(frozen=True)
class Fresh(TopK):
    """Makes its traits anew at every call."""

    def traits(self) -> Traits:
        return TopK.traits(self)._replace()


@dataclass(frozen=True)
class Boaster(Int4):
    """Claims to be unbiased."""

    @memoized
    def traits(self) -> Traits:
        return Int4.traits(self)._replace(unbiased=True)


@dataclass(frozen=True)
class Global(Natural):
    """Draws from torch's generator."""

    def compress(self, x: Tensor, ctx: EncodeContext) -> Parts:
        torch.rand(1)
        return Natural.compress(self, x, ctx)


@dataclass(frozen=True)
class Short(TopK):
    """Says that its messages have a byte less."""

    def nbytes(self, shape: Sequence[int]) -> int:
        return max(0, TopK.nbytes(self, shape) - 1)


@dataclass(frozen=True)
class Leaky(Residual):
    """Forgets a tenth of what was not sent."""

    def before(self, grad: Tensor, state: State, pending: State) -> EFInput:
        return Residual.before(self, grad, {"residual": state["residual"] * 0.9}, pending)


@pytest.mark.parametrize(
    ("compressor", "name", "found"),
    [
        (Louder(ratio=0.1), "ranks_agree", "rank 1 has another mean than rank 0"),
        (Fresh(ratio=0.1), "traits_and_layouts_are_computed_once", "mark it @memoized"),
        (Boaster(), "unbiased_is_exact_on_average", "times four standard errors"),
        (Global(), "same_seed_same_result", "torch's global generator was used"),
        (Short(ratio=0.1), "nbytes_is_what_is_sent", "bytes, not"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else "",
)
def test_the_property_that_fails_is_named(compressor: Compressor, name: str, found: str) -> None:
    with pytest.raises(ConformanceError) as refused:
        check(compressor)
    lines = str(refused.value).splitlines()
    assert "does not conform: " + name in lines[0]
    assert gradwire.format_spec(compressor) in lines[0]
    assert lines[1].startswith("  property: ")
    assert found in lines[2]


def test_an_error_of_the_method_is_reported_with_its_cause() -> None:
    @dataclass(frozen=True)
    class Broken(TopK):
        """Cannot encode."""

        def encode_fused(self, ef: EFInput, ctx: EncodeContext) -> Parts:
            raise RuntimeError("no room")

    with pytest.raises(ConformanceError, match="found: RuntimeError: no room") as refused:
        check(Broken(ratio=0.1))
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_memories_are_checked_with_compressors_of_all_kinds() -> None:
    """A memory that is no `Residual` may lose what it likes, but must resume and agree."""
    found = list(properties(Leaky()))
    assert {one.name for one in found} >= {"ranks_agree", "resumes_bitwise"}
    compressors = {one.subject.partition("-")[0].partition(":")[0] for one in found}
    assert len(compressors) > 4
    for one in found[:7]:
        one()


@dataclass(frozen=True)
class Uneven(GatherExchange):
    """Gives every rank another mean."""

    def rounds(self, ef: EFInput, state: State, ctx: EncodeContext) -> Rounds:
        mean = yield from GatherExchange.rounds(self, ef, state, ctx)
        return mean * (1 + 0.01 * ctx.rank)


def test_exchanges_are_checked_once_they_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXCHANGES, "_registered", {})
    with pytest.raises(gradwire.ConfigError, match="the exchange Uneven has no name; "):
        check(Uneven)
    gradwire.register(Uneven)
    with pytest.raises(ConformanceError, match=r"uneven does not conform: ranks_agree"):
        check(Uneven)


@dataclass(frozen=True)
class Forgetful(Schedule):
    """Does not save what it has decided."""

    def create_state(self, *args: object) -> ControllerState:  # type: ignore[override]
        state = Schedule.create_state(self, *args)  # type: ignore[arg-type]

        def load_state_dict(saved: StateDict) -> None:
            pass

        state.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
        return state


def test_controllers_resume_with_their_decisions() -> None:
    check(Schedule(last=0.1, after=15))
    with pytest.raises(ConformanceError, match="does not conform: resumes_with_its_decisions"):
        check(Forgetful(last=0.1, after=15))


def test_other_objects_are_refused() -> None:
    with pytest.raises(gradwire.ConfigError, match="check: expected an instance of a compressor"):
        check(TopK)  # type: ignore[arg-type]
