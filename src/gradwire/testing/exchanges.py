"""Properties of a compressor in its lane: with a memory and an exchange, among simulated ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.base import Compressor
from gradwire.compressors._nested import NestedSelection
from gradwire.compressors._sparsifier import Pipeline, Sparsifier
from gradwire.engine.nonfinite import NonFiniteGuard
from gradwire.engine.step import Lane, lane_rounds
from gradwire.memory.residual import Residual
from gradwire.testing.case import Case, expect, gradients, mean_unsent, run_step
from gradwire.types import State

SHAPES = [(0,), (1,), (1, 1), (7,), (3, 5), (130, 9), (2, 3, 4, 5)]
SMALL = (30, 20)
MIDDLE = (24, 18)
LARGE = (40, 33)
BAD = [float("nan"), float("inf"), float("-inf")]


def expect_equal(outs: Sequence[Tensor], where: str) -> None:
    """Raises ConformanceError unless all ranks have the same bits, and finite ones."""
    for rank, out in enumerate(outs):
        expect(torch.equal(out, outs[0]), f"{where}: rank {rank} has another mean than rank 0")
    expect(bool(outs[0].isfinite().all()), f"{where}: the mean has non-finite entries")


def ranks_agree(case: Case) -> None:
    """All ranks receive bitwise the same finite mean, for tensors of any size, 0 and 1 included."""
    for shape in SHAPES:
        lanes = case.lanes(torch.zeros(shape))
        for step in range(3):
            outs = run_step(lanes, gradients(shape, step, ranks=case.ranks))
            expect_equal(outs, f"shape {shape}, step {step}")


def nothing_is_lost(case: Case) -> None:
    """With error feedback, what was sent plus what is kept is the sum of all gradients."""
    if case.memory != Residual():
        return
    lanes = case.lanes(torch.zeros(LARGE))
    sent = total = torch.zeros(LARGE)
    for step in range(5):
        grads = gradients(LARGE, step, ranks=case.ranks)
        outs = run_step(lanes, grads)
        sent, total = sent + outs[0], total + torch.stack(grads).mean(0)
    missing = (sent + mean_unsent(case, lanes).view(LARGE) - total).abs()
    limit = 1e-4 + 1e-4 * total.abs()
    expect(bool((missing <= limit).all()), f"an entry is off by {float(missing.max()):.3g}")


def resumes_bitwise(case: Case) -> None:
    """A run that continues from a copy of its state, all tensors, has bitwise the same means."""
    lanes = case.lanes(torch.zeros(MIDDLE))
    for step in range(3):
        outs = run_step(lanes, gradients(MIDDLE, step, ranks=case.ranks))
        expect_equal(outs, f"step {step}")
    again = resumed(lanes, case.lanes(torch.zeros(MIDDLE)))
    for step in range(3, 5):
        grads = gradients(MIDDLE, step, ranks=case.ranks)
        here, there = run_step(lanes, grads), run_step(again, grads)
        expect(torch.equal(here[0], there[0]), f"step {step} differs after loading")


def resumed(lanes: Sequence[Lane], fresh: list[Lane]) -> list[Lane]:
    """Returns fresh lanes with a copy of the state of others, as a checkpoint would have it."""
    for lane, new in zip(lanes, fresh, strict=True):
        new.ctx = new.ctx._replace(step=lane.ctx.step)
        new.memory_state = _copied(lane.memory_state)
        new.aggregator_state = _copied(lane.aggregator_state)
    return fresh


def _copied(state: State) -> State:
    for key, tensor in state.items():
        expect(isinstance(tensor, Tensor), f"state {key!r} is a {type(tensor).__name__}")
    return {key: tensor.clone() for key, tensor in state.items()}


def zeros_give_zeros(case: Case) -> None:
    """The mean of zeros is zero, and a step of zeros does not blind the method to what follows."""
    lanes = case.lanes(torch.zeros(SMALL))
    for step in range(2):
        outs = run_step(lanes, [torch.zeros(SMALL)] * case.ranks)
        expect(not outs[0].any(), f"step {step}: the mean of zeros is not zero")
    outs = run_step(lanes, gradients(SMALL, ranks=case.ranks))
    expect(bool(outs[0].any()), "after steps of zeros nothing is sent")


def half_precision_in_and_out(case: Case) -> None:
    """Gradients in bfloat16 and float16 are replaced by a finite mean of their own type."""
    for dtype in (torch.bfloat16, torch.float16):
        lanes = case.lanes(torch.zeros(LARGE, dtype=dtype))
        outs = run_step(lanes, gradients(LARGE, dtype=dtype, ranks=case.ranks))
        expect(outs[0].dtype == dtype, f"{dtype} became {outs[0].dtype}")
        expect_equal(outs, str(dtype))


def strides_do_not_matter(case: Case) -> None:
    """A gradient that is not contiguous gives what its contiguous copy gives."""
    grads = gradients(MIDDLE, ranks=case.ranks)
    plain = run_step(case.lanes(torch.zeros(MIDDLE)), grads)
    strided = [g.t().contiguous().t() for g in grads]
    assert not strided[0].is_contiguous()
    outs = run_step(case.lanes(torch.zeros(MIDDLE)), strided)
    expect(torch.equal(outs[0], plain[0]), "the mean of strided gradients is another")


def same_seed_same_result(case: Case) -> None:
    """Random numbers depend on the context alone: not on torch's generator, which is not used."""
    grads = gradients(LARGE, ranks=case.ranks)
    before = torch.random.get_rng_state()
    one = run_step(case.lanes(torch.zeros(LARGE)), grads)
    used = not torch.equal(torch.random.get_rng_state(), before)
    expect(not used, "torch's global generator was used; use kernels.on(...).uniform with a key")
    torch.rand(7)
    two = run_step(case.lanes(torch.zeros(LARGE)), grads)
    torch.random.set_rng_state(before)
    expect(torch.equal(one[0], two[0]), "two runs with the same seed differ")


def every_rank_matters(case: Case) -> None:
    """The gradient of each rank has a part in the mean."""
    for rank in range(case.ranks):
        grads = [torch.zeros(LARGE) for _ in range(case.ranks)]
        grads[rank] = gradients(LARGE)[0]
        outs = run_step(case.lanes(torch.zeros(LARGE)), grads)
        expect(bool(outs[0].any()), f"what rank {rank} alone sends has no effect")


def constants_are_sent(case: Case) -> None:
    """A constant gradient is sent within three steps, unless it is too small for the method."""
    for value in (-0.7, 3e-39):
        lanes = case.lanes(torch.zeros(SMALL))
        sent = 0
        for step in range(3):
            outs = run_step(lanes, [torch.full(SMALL, value)] * case.ranks)
            expect_equal(outs, f"constant {value}, step {step}")
            sent += int(outs[0].count_nonzero())
        expect(bool(sent) or value == 3e-39, f"of the constant {value} nothing is sent")


def one_huge_entry(case: Case) -> None:
    """With an entry of -1e30 all others stay finite, and equal on all ranks."""
    lanes = case.lanes(torch.zeros(SMALL))
    for step in range(3):
        grads = gradients(SMALL, step, ranks=case.ranks)
        if step == 0:
            grads[1].view(-1)[-1] = -1e30
        expect_equal(run_step(lanes, grads), f"step {step}")


def nonfinite_entries_are_not_dropped(case: Case) -> None:
    """NaN or infinity appears in the mean of all ranks, or waits in the residual, or has no vote.

    Only a random selection without a memory may miss it.
    """
    for bad, place in ((torch.nan, 0), (torch.inf, 311), (-torch.inf, 599)):
        lanes = case.lanes(torch.zeros(SMALL))
        grads = gradients(SMALL, ranks=case.ranks)
        grads[1].view(-1)[place] = bad
        outs = run_step(lanes, grads)
        same = all(torch.equal(o.nan_to_num(7.0), outs[0].nan_to_num(7.0)) for o in outs)
        expect(same, f"{bad} at {place}: ranks have different means")
        appears = not bool(outs[0].isfinite().all())
        if case.compressor.traits().is_vote:
            expect(not appears, f"{bad} at {place}: a vote is not finite")
            expect(bool(outs[0].any()), f"{bad} at {place}: the votes of others are lost")
        elif not selects_at_random(case.compressor):
            expect(appears, f"{bad} at {place} is not in the mean")
        elif case.memory == Residual():
            expect(appears or keeps_nonfinite(lanes, place), f"{bad} at {place} is dropped")


def selects_at_random(compressor: Compressor) -> bool:
    """Returns whether it selects entries without reading them."""
    first = compressor.sparsifier if isinstance(compressor, Pipeline) else compressor
    if isinstance(first, NestedSelection):
        return selects_at_random(first.outer) or selects_at_random(first.inner)
    return isinstance(first, Sparsifier) and not first.sends_indices


def keeps_nonfinite(lanes: Sequence[Lane], place: int) -> bool:
    """Returns whether a rank keeps a non-finite entry at this position, to send it later."""
    kept = [lane.memory.unsent(lane.memory_state) for lane in lanes]
    return any(w is not None and not bool(w[place].isfinite()) for w in kept)


def first_message_shows_nonfinite(case: Case) -> None:
    """With the trait `propagates_nonfinite`, the first message is not finite iff an entry is."""
    shape = (61, 40)
    lanes = case.lanes(torch.zeros(shape))
    if not lanes[0].aggregator.propagates_nonfinite:
        return
    run_step(lanes, gradients(shape, ranks=case.ranks))
    for base in (gradients(shape, 9)[0], torch.zeros(shape)):
        expect(not is_flagged(lanes[1], base), "a finite gradient is taken for a non-finite one")
        for grad, text in _with_bad_entries(base):
            expect(is_flagged(lanes[1], grad), f"{text} is not in the first message")


def _with_bad_entries(base: Tensor) -> list[tuple[Tensor, str]]:
    found = []
    for number, bad in enumerate(BAD):
        for place in (number, base.numel() // 2, base.numel() - 1):
            grad = base.clone()
            grad.view(-1)[place] = bad
            found.append((grad, f"{bad} at {place}"))
    mixed = base.clone()
    mixed.view(-1)[5:8] = torch.tensor(BAD)
    return [*found, (mixed, "a mixture"), (torch.full_like(base, BAD[0]), "a tensor of NaN")]


def is_flagged(lane: Lane, grad: Tensor) -> bool:
    """Returns whether a guard that checks the first message only raises its flag."""
    guard = NonFiniteGuard([grad], [lane])
    guard.begin()
    guard.requests({0: next(lane_rounds(grad.clone(), lane))})
    lane.discard()
    return bool(guard.flag)


USUAL = (
    ranks_agree,
    zeros_give_zeros,
    half_precision_in_and_out,
    strides_do_not_matter,
    same_seed_same_result,
    every_rank_matters,
    constants_are_sent,
    one_huge_entry,
    nonfinite_entries_are_not_dropped,
    first_message_shows_nonfinite,
)
"""Properties of a compressor with the memory and the exchange that it usually has."""

COMBINED = (nothing_is_lost, resumes_bitwise)
"""Properties of every legal combination."""

ALWAYS = (
    ranks_agree,
    zeros_give_zeros,
    half_precision_in_and_out,
    strides_do_not_matter,
    same_seed_same_result,
    *COMBINED,
)
"""Properties of a memory or an exchange with every compressor that it goes with."""
