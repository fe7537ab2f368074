"""The contract of every method, with every memory and exchange that it may go with."""

import io
import json
from dataclasses import replace

import pytest
import torch
from catalogue import (
    RANKS,
    Case,
    all_specs,
    every_compressor,
    every_legal_case,
    every_usual_case,
    illegal_cases,
    legal_cases,
    mean_residual,
    memories,
    run_step,
)

from gradwire.engine.step import Lane
from gradwire.spec import format_spec, parse
from gradwire.types import EncodeContext
from gradwire.wire.layout import pack, unpack

SHAPES = [(0,), (1,), (1, 1), (7,), (3, 5), (130, 9), (2, 3, 4, 5)]


def gradients(
    shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32, ranks: int = RANKS
):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(ranks)]


def resumed(lanes: list[Lane], fresh: list[Lane]) -> list[Lane]:
    """Returns fresh lanes with the state of others, saved to a file and loaded."""
    file = io.BytesIO()
    torch.save([(lane.ctx.step, lane.memory_state, lane.aggregator_state) for lane in lanes], file)
    file.seek(0)
    for lane, (step, memory_state, aggregator_state) in zip(
        fresh, torch.load(file, weights_only=True), strict=True
    ):
        lane.ctx, lane.memory_state, lane.aggregator_state = (
            lane.ctx._replace(step=step),
            memory_state,
            aggregator_state,
        )
    return fresh


@every_usual_case()
def test_ranks_agree_bitwise_and_stay_finite(case: Case) -> None:
    for shape in SHAPES:
        lanes = case.lanes(torch.zeros(shape))
        for step in range(3):
            outs, _ = run_step(lanes, gradients(shape, step))
            assert all(torch.equal(out, outs[0]) for out in outs), (shape, step)
            assert outs[0].isfinite().all(), (shape, step)


RESIDUAL_CASES = [case for case in legal_cases() if case.memory == "residual"]


@pytest.mark.parametrize("case", RESIDUAL_CASES, ids=str)
def test_sent_plus_left_is_given(case: Case) -> None:
    shape = (40, 33)
    lanes = case.lanes(torch.zeros(shape))
    sent = given = torch.zeros(shape)
    for step in range(5):
        grads = gradients(shape, step, ranks=case.ranks)
        outs, _ = run_step(lanes, grads)
        sent, given = sent + outs[0], given + sum(grads) / case.ranks
    residual = mean_residual(case, lanes).view(shape)
    torch.testing.assert_close(sent + residual, given, rtol=1e-4, atol=1e-4)


@every_legal_case()
def test_every_combination_agrees_and_resumes_bitwise(case: Case) -> None:
    shape = (24, 18)
    lanes = case.lanes(torch.zeros(shape))
    for step in range(3):
        outs, _ = run_step(lanes, gradients(shape, step, ranks=case.ranks))
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert outs[0].isfinite().all()
    again = resumed(lanes, case.lanes(torch.zeros(shape)))
    for step in range(3, 5):
        grads = gradients(shape, step, ranks=case.ranks)
        here, _ = run_step(lanes, grads)
        there, _ = run_step(again, grads)
        assert torch.equal(here[0], there[0])


@every_usual_case()
def test_zeros_give_zeros(case: Case) -> None:
    lanes = case.lanes(torch.zeros(30, 20))
    for _ in range(2):
        outs, _ = run_step(lanes, [torch.zeros(30, 20)] * RANKS)
        assert torch.equal(outs[0], torch.zeros(30, 20))
    # A zero step must not blind the method to what follows.
    outs, _ = run_step(lanes, gradients((30, 20)))
    assert outs[0].count_nonzero() > 0


@every_usual_case()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_in_and_out(case: Case, dtype: torch.dtype) -> None:
    like = torch.zeros(40, 33, dtype=dtype)
    lanes = case.lanes(like)
    outs, _ = run_step(lanes, gradients((40, 33), dtype=dtype))
    assert outs[0].dtype == dtype
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs)


@every_usual_case()
def test_strided_gradients_give_the_same(case: Case) -> None:
    grads = gradients((24, 18))
    plain, _ = run_step(case.lanes(torch.zeros(24, 18)), grads)
    strided = [g.t().contiguous().t() for g in grads]
    assert not strided[0].is_contiguous()
    outs, _ = run_step(case.lanes(torch.zeros(24, 18)), strided)
    assert torch.equal(outs[0], plain[0])


@every_usual_case()
def test_same_seed_same_result(case: Case) -> None:
    grads = gradients((40, 33))
    torch.manual_seed(1)
    one, _ = run_step(case.lanes(torch.zeros(40, 33)), grads)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    two, _ = run_step(case.lanes(torch.zeros(40, 33)), grads)
    assert torch.equal(one[0], two[0])
    torch.manual_seed(1)
    run_step(case.lanes(torch.zeros(40, 33)), grads)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"


@every_usual_case()
def test_input_of_other_ranks_matters(case: Case) -> None:
    """Each rank's gradient has a part in the result."""
    for rank in range(RANKS):
        grads = [torch.zeros(40, 33) for _ in range(RANKS)]
        grads[rank] = gradients((40, 33))[0]
        outs, _ = run_step(case.lanes(torch.zeros(40, 33)), grads)
        assert outs[0].count_nonzero() > 0


@pytest.mark.parametrize("memory", memories())
def test_illegal_combinations_give_the_reason(memory: str) -> None:
    cases = [case for case in illegal_cases() if case.memory == memory]
    assert cases
    for case in cases:
        reason = case.why_not()
        assert reason is not None, case
        assert format_spec(parse(case.spec)) in reason
        assert "does not go with" in reason


@every_compressor()
def test_traits_and_layouts_are_computed_once(spec: str) -> None:
    """Steps ask for them over and over; equal settings share one result."""
    compressor, equal = parse(spec), parse(spec)
    assert compressor.traits() is equal.traits()
    if hasattr(compressor, "layout"):
        assert compressor.layout(1000) is equal.layout(1000)


@every_compressor()
def test_nbytes_is_what_is_sent(spec: str) -> None:
    compressor = parse(spec)
    for numel in (0, 1, 7, 130, 5000):
        x = torch.randn(numel, 1, generator=torch.Generator().manual_seed(0))
        payload = compressor.encode(x)
        if not compressor.traits().variable_length:
            assert payload.nbytes == compressor.nbytes((numel, 1)), numel
        if hasattr(compressor, "layout"):
            layout = compressor.layout(numel)
            assert pack([payload.parts], [layout]).numel() == payload.nbytes, numel


@every_compressor()
def test_packed_and_unpacked_decodes_to_the_same(spec: str) -> None:
    compressor = parse(spec)
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    payload = compressor.encode(x)
    decoded = compressor.decode(payload)
    assert decoded.shape == x.shape
    if hasattr(compressor, "layout"):
        layout = compressor.layout(x.numel())
        [parts] = unpack(pack([payload.parts], [layout]), [layout])
        again = compressor.decode(replace(payload, parts=parts))
        assert torch.equal(decoded, again)


@every_compressor()
def test_same_context_same_bytes(spec: str) -> None:
    compressor = parse(spec)
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    ctx = EncodeContext((50, 40), rank=1, world_size=3, seed=7, lane_id=5, step=2)
    one, two = compressor.encode(x, ctx), compressor.encode(x, ctx)
    assert all(torch.equal(a, b) for a, b in zip(one.parts, two.parts, strict=True))


@pytest.mark.parametrize("spec", [s for s in all_specs() if parse(s).traits().contraction])
def test_contraction_means_closer_than_zero(spec: str) -> None:
    compressor = parse(spec)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for step in range(20):
        x = torch.randn(64, 32, generator=generator)
        decoded = compressor.decode(compressor.encode(x, EncodeContext((64, 32), step=step)))
        errors.append(float((x - decoded).square().sum() / x.square().sum()))
    assert sum(errors) / len(errors) < 1


@pytest.mark.parametrize("spec", [s for s in all_specs() if parse(s).traits().unbiased])
def test_unbiased_means_exact_on_average(spec: str) -> None:
    compressor = parse(spec)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, generator=generator)
    draws = torch.stack(
        [
            compressor.decode(compressor.encode(x, EncodeContext((300,), step=step)))
            for step in range(1000)
        ]
    )
    # Sums over entries are close to normal, where one entry's rounding need not be.
    directions = torch.stack([x, torch.ones(300), *torch.randn(8, 300, generator=generator)], dim=1)
    sums = draws @ directions
    error = (sums.mean(dim=0) - x @ directions).abs()
    assert (error <= 4 * sums.std(dim=0) / sums.shape[0] ** 0.5 + 1e-4).all()


@every_compressor()
def test_spec_and_json_round_trip(spec: str) -> None:
    assert parse(format_spec(parse(spec))) == parse(spec)
    assert parse(json.loads(json.dumps(format_spec(parse(spec))))) == parse(spec)
