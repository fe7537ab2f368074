"""Inputs of all kinds: every method has a defined result for each, and none stops a run."""

from typing import Any

import numpy as np
import pytest
import torch
from catalogue import RANKS, Case, every_usual_case, run_step
from torch import Tensor

from gradwire.base import Compressor
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.engine.step import Lane
from gradwire.errors import ConfigError, WireError
from gradwire.spec import compressor_classes
from gradwire.types import Payload

SHAPE = (30, 20)
MANY = 1_000_003
"""Odd, and no multiple of any bucket, block or chunk."""


def selects_at_random(compressor: Compressor) -> bool:
    """Returns whether it selects entries without reading them."""
    first = compressor.sparsifier if isinstance(compressor, Pipeline) else compressor
    return isinstance(first, Sparsifier) and not first.sends_indices


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def keeps_nonfinite(lanes: list[Lane], place: int) -> bool:
    """Returns whether a rank keeps a non-finite entry at this position, to send it later."""
    kept = [lane.memory.unsent(lane.memory_state) for lane in lanes]
    return any(w is not None and not bool(w[place].isfinite()) for w in kept)


@pytest.mark.parametrize("cls", compressor_classes().values(), ids=lambda cls: cls.__name__)
def test_a_million_entries_and_three(cls: type[Compressor]) -> None:
    compressor = cls(**cls.examples[0])
    x = normal(MANY)
    payload = compressor.encode(x)
    decoded = compressor.decode(payload)
    assert decoded.shape == x.shape
    assert decoded.isfinite().all()
    assert decoded.count_nonzero() > 0
    if not compressor.traits().variable_length:
        assert payload.nbytes == compressor.nbytes((MANY,))
    if compressor.traits().contraction:
        assert (decoded - x).norm() < x.norm()


@pytest.mark.parametrize("cls", compressor_classes().values(), ids=lambda cls: cls.__name__)
def test_a_message_of_another_method_is_refused(cls: type[Compressor]) -> None:
    """Kernels trust lengths: what does not have the form of a message must not reach them."""
    compressor = cls(**cls.examples[0])
    x = normal(100, 10)
    own = compressor.encode(x)
    refused = 0
    for other in compressor_classes().values():
        payload = other(**other.examples[0]).encode(x)
        if [(p.dtype, p.shape) for p in payload.parts] != [(p.dtype, p.shape) for p in own.parts]:
            try:
                compressor.decode(payload)
            except WireError:
                refused += 1
            else:
                assert compressor.traits().variable_length
    assert refused > len(compressor_classes()) // 2
    with pytest.raises(WireError):
        compressor.decode(Payload((*own.parts, torch.zeros(1)), own.ctx, own.nbytes))
    with pytest.raises(ConfigError, match="expected what encode returns"):
        compressor.decode(x)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [[1.0, 2.0], np.ones(8), None])
@pytest.mark.parametrize("cls", compressor_classes().values(), ids=lambda cls: cls.__name__)
def test_an_input_that_is_no_tensor_is_refused(cls: type[Compressor], given: Any) -> None:
    kind = type(given).__name__
    with pytest.raises(ConfigError, match=f"a tensor is needed, got {kind}: torch.as_tensor"):
        cls(**cls.examples[0]).encode(given)


@every_usual_case()
def test_constant(case: Case) -> None:
    """It is sent within three steps, unless it is too small for the method."""
    for value in (-0.7, 3e-39):
        lanes = case.lanes(torch.zeros(SHAPE))
        sent = 0
        for _ in range(3):
            outs, _ = run_step(lanes, [torch.full(SHAPE, value)] * RANKS)
            assert all(torch.equal(out, outs[0]) for out in outs)
            assert outs[0].isfinite().all()
            sent += int(outs[0].count_nonzero())
        assert sent or value == 3e-39


@every_usual_case()
def test_one_huge_entry(case: Case) -> None:
    """All entries stay finite, and equal on all ranks."""
    lanes = case.lanes(torch.zeros(SHAPE))
    grads = [normal(*SHAPE) for _ in range(RANKS)]
    grads[1].view(-1)[-1] = -1e30
    for _ in range(3):
        outs, _ = run_step(lanes, grads)
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert outs[0].isfinite().all()
        grads = [normal(*SHAPE) for _ in range(RANKS)]


@every_usual_case()
def test_a_non_finite_entry_appears_or_stays_in_the_residual_or_has_no_vote(case: Case) -> None:
    """All ranks have the same result. Only a random selection without a memory may miss it."""
    for bad, place in ((torch.nan, 0), (torch.inf, 311), (-torch.inf, 599)):
        lanes = case.lanes(torch.zeros(SHAPE))
        grads = [normal(*SHAPE) for _ in range(RANKS)]
        grads[1].view(-1)[place] = bad
        outs, _ = run_step(lanes, grads)
        assert all(torch.equal(out.nan_to_num(7.0), outs[0].nan_to_num(7.0)) for out in outs)
        propagates_nonfinite = not bool(outs[0].isfinite().all())
        if case.compressor().traits().is_vote:
            assert not propagates_nonfinite
            assert outs[0].count_nonzero() > 0
        elif not selects_at_random(case.compressor()):
            assert propagates_nonfinite
        elif case.memory == "residual":
            assert propagates_nonfinite or keeps_nonfinite(lanes, place)
