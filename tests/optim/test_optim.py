"""Compressed optimisers on real ranks: DDP's buckets, checkpoints, skipped steps, wrong uses."""

from pathlib import Path

import optim_jobs as jobs
import pytest
import torch

from processes import Ranks


def assert_equal(weights: list[torch.Tensor]) -> None:
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert weights[0].isfinite().all()


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "int4", "powersgd:rank=2", "efsign"])
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Muon"])
def test_parameters_stay_bitwise_equal(four_ranks: Ranks, kind: str, spec: str) -> None:
    assert_equal(four_ranks.run(jobs.trained, kind, spec, {}, {}))


@pytest.mark.parametrize(
    "ddp",
    [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
)
def test_ddp_options(four_ranks: Ranks, ddp: dict[str, bool]) -> None:
    plain = four_ranks.run(jobs.trained, "AdamW", "topk:ratio=0.05", {}, {})
    ours = four_ranks.run(jobs.trained, "AdamW", "topk:ratio=0.05", ddp, {})
    assert_equal([*ours, plain[0]])


def test_large_parameters_are_cut_into_chunks(four_ranks: Ranks) -> None:
    assert_equal(four_ranks.run(jobs.trained, "AdamW", "int4", {}, {"chunk_bytes": 16384}))


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}], ids=["", "views"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("kind", jobs.KINDS)
def test_no_compression_is_the_dense_optimiser(
    four_ranks: Ranks, kind: str, clip: float, ddp: dict[str, bool]
) -> None:
    results = four_ranks.run(jobs.beside_dense, kind, clip, ddp)
    assert_equal([ours for ours, _ in results])
    if kind in ("Adam", "AdamW") and not clip:
        assert torch.equal(*results[0])
    # The limit of a norm multiplies or divides, and learning rates are applied in other orders.
    torch.testing.assert_close(*results[0], rtol=1e-5, atol=1e-6)


def test_a_switch_to_and_from_the_dense_optimiser_keeps_moments(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.switched_to_dense)
    assert [flags for *flags, _ in results] == [[True] * 4] * 4
    assert_equal([weights for *_, weights in results])


def test_rate_and_weight_decay_are_outside_the_residual(four_ranks: Ranks) -> None:
    constant = four_ranks.run(jobs.residual_with_rates, [0.1] * 4, 0.0)
    changing = four_ranks.run(jobs.residual_with_rates, [0.1, 1.0, 0.0, 1e-3], 0.5)
    for one, other in zip(constant, changing, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert float(constant[0]["residual"].norm()) > 0


def test_parameter_groups_have_options_of_their_own(four_ranks: Ranks) -> None:
    assert four_ranks.run(jobs.grouped) == [(True, True)] * 4


@pytest.mark.parametrize("way", ["state_dict", "dcp"])
@pytest.mark.parametrize(
    ("kind", "spec"), [("AdamW", "topk:ratio=0.05"), ("Muon", "powersgd:rank=2"), ("Lion", "none")]
)
def test_a_resumed_run_continues_bitwise(
    four_ranks: Ranks, tmp_path: Path, kind: str, spec: str, way: str
) -> None:
    folder = str(tmp_path) if way == "dcp" else None
    assert four_ranks.run(jobs.resumed, kind, spec, folder) == [True] * 4


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.05"])
def test_a_nonfinite_step_is_undone_on_all_ranks(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.with_nonfinite_step, spec)
    assert_equal([spoilt for spoilt, _, _ in results] + [clean for _, clean, _ in results])
    assert all(undone for _, _, undone in results)


def test_gradients_accumulate_under_no_sync(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.accumulated)
    assert_equal([weights for weights, _ in results])
    assert "2 backward passes were exchanged since the last step" in results[0][1]


def test_a_switch_keeps_the_moments(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.switched)
    assert all(kept for kept, _ in results)
    assert_equal([weights for _, weights in results])


ERRORS = {
    "not ddp": "AdamW: expected a DistributedDataParallel, got Sequential",
    "attached": "this model has a link already",
    "hook": "the model's only hook slot is taken by",
    "twice": "this model has a link already",
    "attach": "this model has a link already",
    "wrap": "already",
    "added group": "AdamW: groups cannot be added",
    "foreign state": "AdamW: the state has no moments of this rank",
    "no link.switch": "AdamW: memory 'ef21' keeps momentum or a target",
    "betas": "AdamW: an option of the update has changed in param_groups",
    "detached": "AdamW: its link is detached",
    "ef21": "AdamW: memory 'ef21' keeps momentum or a target",
    "momentum": "AdamW: memory 'momentum' keeps momentum or a target",
    "controller": "AdamW: controller",
    "missing": "AdamW: no group has ['0.bias'",
    "rate": "AdamW: lr must be at least 0, got -1.0",
    "adam decay": "Adam: weight_decay must be 0",
    "spec": "no compressor named 'top_k'",
    "dtypes": "AdamW: parameters must have one dtype, got ['torch.bfloat16', 'torch.float32']",
    "devices": "AdamW: parameters must be on one device, got ['cpu', 'meta']",
    "sparse": "attach: 0 has sparse=True; use dense gradients",
}


def test_wrong_uses_are_refused_by_name(four_ranks: Ranks) -> None:
    for found in four_ranks.run(jobs.refusals):
        assert found.keys() == ERRORS.keys()
        wrong = {key: found[key] for key, text in ERRORS.items() if text not in found[key]}
        assert not wrong
