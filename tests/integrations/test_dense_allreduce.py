"""Dense gradients are averaged directly: the same bits, bytes and guards as by programs."""

import math
import re

import ddp_jobs
import dense_allreduce_jobs as jobs
import pytest
import torch

from deadlines import scaled
from processes import Ranks


def test_two_ranks_do_what_plain_ddp_does(two_ranks: Ranks) -> None:
    plain = two_ranks.run(ddp_jobs.plain, 4)
    ours = two_ranks.run(ddp_jobs.trained, "none", 4, {"bucket_cap_mb": 0.01}, {})
    assert all(torch.equal(weights, plain[0]) for weights in ours)


@pytest.mark.parametrize("option", ["static_graph", "gradient_as_bucket_view"])
def test_options_of_ddp(two_ranks: Ranks, option: str) -> None:
    plain = two_ranks.run(ddp_jobs.plain, 4)
    ours = two_ranks.run(ddp_jobs.trained, "none", 4, {"bucket_cap_mb": 0.01, option: True}, {})
    assert all(torch.equal(weights, plain[0]) for weights in ours)


def test_three_ranks_do_what_plain_ddp_does(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(jobs.three_of_four_job))


def test_a_loop_gets_the_plain_mean(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(jobs.loop_job))


def test_gradients_of_any_strides(two_ranks: Ranks) -> None:
    assert two_ranks.run(jobs.strides_job) == [(True, True)] * 2


@pytest.mark.parametrize("integration", ["ddp", "ddp with a hook", "loop", "fsdp"])
def test_the_dense_path_counts_what_programs_count(two_ranks: Ranks, integration: str) -> None:
    dense = two_ranks.run(jobs.counts_job, integration, False)
    by_programs = two_ranks.run(jobs.counts_job, integration, True)
    for (counts, timed), (metered, metered_timed) in zip(dense, by_programs, strict=True):
        assert counts == metered
        assert counts[0] == 3
        assert all(counts)
        # Nobody measures what DDP's own reducer does.
        assert timed == (integration != "ddp")
        assert metered_timed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_seen_on_all_ranks(two_ranks: Ranks, bad: float) -> None:
    results = two_ranks.run(jobs.not_finite_job, bad)
    for grads, same, steps in results:
        assert not any(g.isfinite().all() for g in grads.values())
        assert same
        assert steps == 1


def test_switch_to_a_method_and_back(two_ranks: Ranks) -> None:
    results = two_ranks.run(jobs.switched_job)
    for weights, seen, plain_at_last in results:
        assert torch.equal(weights, results[0][0])
        assert seen == [(2, "none", False), (4, "topk:ratio=0.1", True), (6, "none", False)]
        assert plain_at_last


def test_resume_is_bitwise(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(ddp_jobs.resume_job, "none"))


def test_drift_is_detected(two_ranks: Ranks) -> None:
    for text in two_ranks.run(jobs.drift_job):
        assert text.startswith("PeerError: parameters have drifted apart:")
        assert "0.weight" in text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        # DDP's own reducer raises torch's own error.
        ({}, r"RuntimeError: (?!.*hook)"),
        ({"check_every": 1000}, r"PeerError: mean among 2 ranks failed on rank 0 after [1-9]"),
    ],
    ids=["native", "hook"],
)
def test_an_absent_rank_is_an_error(
    two_ranks: Ranks, options: dict[str, object], error: str
) -> None:
    found = two_ranks.run(jobs.absent_job, options)[0]
    first, second = found["backward"]
    # gloo names the timeout in one of several ways.
    assert re.match(error + r".*(Timed out|timeout|Connection closed)", first, re.DOTALL), first
    assert re.match(error, second), second
    # The first pass waits for the group's timeout, the second finds its connections closed.
    assert jobs.TIMEOUT_S <= found["waited_s"] < jobs.TIMEOUT_S + scaled(jobs.TIMEOUT_S)
    assert found["steps"] == 2
    assert found["saved"] == ["rank0"]
    assert re.match(r"PeerError: gather among 2 ranks failed on rank 0", found["switch"])


def test_a_dense_plan_registers_no_hook(two_ranks: Ranks) -> None:
    for found in two_ranks.run(jobs.hooks_job):
        assert found["dense"] is None
        assert found["checksum"] is None
        for needs_hook in ("raise", "check_every", "gather", "least_bytes", "group"):
            assert found[needs_hook] == "ddp_hook", needs_hook
        assert found["controller"] in ("ddp_hook", "refused")
        for option in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            assert found[option] == (None, 3), option


def test_methods_that_take_turns_with_dense_steps(four_ranks: Ranks) -> None:
    ours = four_ranks.run(jobs.phases_job, False)
    metered = four_ranks.run(jobs.phases_job, True)
    for (weights, seen, hooks), (expected, counted, _) in zip(ours, metered, strict=True):
        assert torch.equal(weights, expected)
        assert seen == counted
        assert hooks == [None, "ddp_hook", "ddp_hook", "ddp_hook"]


def test_a_method_continues_as_after_a_fresh_attach(two_ranks: Ranks) -> None:
    [(weights, _, _), _] = two_ranks.run(jobs.phases_job, False)
    for restarted in two_ranks.run(jobs.restarted_job):
        assert torch.equal(restarted, weights)


def test_only_passes_that_ddp_exchanges_are_counted(two_ranks: Ranks) -> None:
    ours = two_ranks.run(jobs.accumulation_job, False)
    assert ours == two_ranks.run(jobs.accumulation_job, True)
    for first, second, _ in ours:
        assert first == second == (2, 0)


def test_steps_of_parameters_that_no_rank_used(two_ranks: Ranks) -> None:
    native, metered = (two_ranks.run(jobs.branches_job, metered) for metered in (False, True))
    for (steps, weights), (expected_steps, expected) in zip(native, metered, strict=True):
        assert steps == expected_steps
        assert [steps["first.weight"], steps["second.weight"]] == [5, 3]
        # Which entries are sent depends on the step of each parameter.
        assert torch.equal(weights, expected)
        assert torch.equal(weights, native[0][1])


def test_ranks_agree_on_the_step_after_an_uneven_join(four_ranks: Ranks) -> None:
    switched = four_ranks.run(jobs.joined_job, False)
    resumed = four_ranks.run(jobs.joined_job, True)
    assert [steps for steps, _ in switched] == [[5, 5], *[[3, 5]] * 3]
    assert [steps for steps, _ in resumed] == [[5, 5, 5], *[[3, 5, 5]] * 3]
    for _, weights in switched + resumed:
        assert torch.equal(weights, switched[0][1])


def test_uneven_means_are_those_of_plain_ddp(two_ranks: Ranks) -> None:
    assert two_ranks.run(jobs.divided_job, True) == [(True, True)] * 2
    # A hook has no part in how DDP divides: it averages over all ranks.
    assert two_ranks.run(jobs.divided_job, False) == [(True, False)] * 2


@pytest.mark.parametrize("loads", [False, True], ids=["switch", "load_state_dict"])
def test_a_slot_that_one_rank_has_taken(four_ranks: Ranks, loads: bool) -> None:
    results = four_ranks.run(jobs.refused_job, loads)
    requester = "load_state_dict" if loads else "switch"
    for rank, found in enumerate(results):
        assert f"{requester}: the model's only hook slot is taken by _some_hook" in found["text"]
        assert found["text"].startswith("ConfigError")
        assert (found["steps"], found["spec"]) == (3, "none")
        assert found["hook"] == ("_some_hook" if rank == 3 else None)


def test_a_slot_that_is_taken_later_is_reported(two_ranks: Ranks) -> None:
    for found in two_ranks.run(jobs.taken_job):
        assert "hook slot was taken by _some_hook since" in found["forward"]
        assert "switch: the model's only hook slot is taken by _some_hook" in found["switch"]
        assert found["spec"] == "none"
        assert "attach: the model's only hook slot is taken by _some_hook" in found["attach"]


def test_copies_of_a_dense_model_are_plain(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(jobs.copies_job))


def test_a_dense_model_is_freed(two_ranks: Ranks) -> None:
    assert all(two_ranks.run(jobs.freed_job))
