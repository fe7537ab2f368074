"""Methods of handles that are called at odd times, on real processes."""

import handle_jobs as jobs
import pytest
import torch

import gradwire
from gradwire.integrations.fsdp import Shards
from processes import Ranks

ANY_TIME = {"metrics", "passes", "stats"}


def public_methods(cls: type) -> set[str]:
    found = {name for name in dir(cls) if not name.startswith("_")}
    return {name for name in found if callable(getattr(cls, name))}


def test_every_public_method_is_among_those_tested() -> None:
    known = set(jobs.calls(gradwire.Link, {}))
    assert public_methods(gradwire.Link) == known
    assert public_methods(Shards) == known
    assert public_methods(gradwire.Reducer) == known | {"reduce", "reduce_before"}


def expected_inside_backward(method: str) -> str:
    if method in ANY_TIME:
        return "nothing was raised"
    return (
        f"ConfigError: {method}: a backward pass is under way; call it between backward and the "
        "next forward pass"
    )


@pytest.fixture(scope="module")
def undisturbed(four_ranks: Ranks) -> torch.Tensor:
    weights: torch.Tensor = four_ranks.run(jobs.during_backward_job, "", False)[0][1]
    return weights


@pytest.mark.parametrize("thread", [False, True], ids=["hook", "thread"])
@pytest.mark.parametrize("method", sorted(jobs.calls(gradwire.Link, {})))
def test_a_call_in_the_middle_of_backward_is_refused_and_does_no_harm(
    four_ranks: Ranks, undisturbed: torch.Tensor, method: str, thread: bool
) -> None:
    for text, weights, steps in four_ranks.run(jobs.during_backward_job, method, thread):
        assert text == expected_inside_backward(method)
        assert torch.equal(weights, undisturbed)
        assert steps == 4


@pytest.mark.parametrize("when", ["attached", "detached"])
@pytest.mark.parametrize("how", jobs.COPIES)
def test_a_copied_model_is_plain_ddp_and_the_original_goes_on(
    four_ranks: Ranks, how: str, when: str
) -> None:
    for found in four_ranks.run(jobs.copied_job, how, when):
        assert all(found.values()), found


def test_a_copied_loop_goes_on(four_ranks: Ranks) -> None:
    assert all(four_ranks.run(jobs.copied_loop_job))


@pytest.mark.parametrize("nan_policy", ["propagate", "ignore"])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])
@pytest.mark.parametrize("none", [False, True], ids=["zero", "none"])
def test_nothing_is_lost_of_parameters_that_no_rank_used(
    four_ranks: Ranks, nan_policy: str, view: bool, none: bool
) -> None:
    ddp = {"gradient_as_bucket_view": view}
    results = four_ranks.run(jobs.conservation_job, ddp, nan_policy, none)
    got, left, given = (torch.stack(tensors) for tensors in zip(*results, strict=True))
    assert all(torch.equal(row, got[0]) for row in got)
    assert left.any()
    torch.testing.assert_close(got[0] + left.mean(0), given.mean(0))


def test_a_call_inside_backward_of_a_sharded_model_is_refused_and_does_no_harm(
    four_ranks: Ranks,
) -> None:
    expected = four_ranks.run(jobs.shards_in_backward_job, False)[0][1]
    for found, weights in four_ranks.run(jobs.shards_in_backward_job, True):
        assert found.keys() == jobs.calls(gradwire.Link, {}).keys()
        assert found == {method: expected_inside_backward(method) for method in found}
        assert torch.equal(weights, expected)


def test_a_reducer_exchanges_nothing_in_backward_and_may_be_changed_there(
    four_ranks: Ranks,
) -> None:
    for found in four_ranks.run(jobs.reducer_in_backward_job):
        assert set(found.values()) == {"nothing was raised"}, found


def test_nothing_is_lost_where_a_pass_with_unused_parameters_overflows(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.conservation_job, {}, "propagate", True, 3)
    got, left, given = (torch.stack(tensors) for tensors in zip(*results, strict=True))
    torch.testing.assert_close(got[0] + left.mean(0), given.mean(0))


def test_ranks_that_have_joined_count_the_same_steps(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.unused_in_join_job)
    assert all(torch.equal(weights, results[0][0]) for weights, _ in results)
    assert all(steps == results[0][1] for _, steps in results)


@pytest.mark.parametrize("layer", [0, 3], ids=["last bucket", "first bucket"])
def test_an_overflow_undoes_all_of_a_step_with_reentrant_checkpoints(
    four_ranks: Ranks, layer: int
) -> None:
    expected = four_ranks.run(jobs.checkpointed_job, False)
    for (same, counts, weights), other in zip(
        four_ranks.run(jobs.reentrant_job, layer), expected, strict=True
    ):
        assert same
        assert counts == (2, 1)
        assert torch.equal(weights, other)


def test_reentrant_checkpoints_change_nothing(four_ranks: Ranks) -> None:
    expected = four_ranks.run(jobs.checkpointed_job, False)
    assert torch.equal(four_ranks.run(jobs.checkpointed_job, True)[0], expected[0])


def test_a_pass_that_a_hook_interrupts_leaves_no_trace(four_ranks: Ranks) -> None:
    for text, same, detached in four_ranks.run(jobs.interrupted_job):
        assert text == "ValueError: a hook of the user"
        assert same
        assert detached == "nothing was raised"


def test_two_models_that_overflow_in_one_pass_both_raise(four_ranks: Ranks) -> None:
    expected = "NonFiniteError: a gradient of step 1 is not finite on some rank"
    for first, second, third, fourth in four_ranks.run(jobs.late_error_job):
        assert first == fourth == "nothing was raised"
        assert second.startswith(expected)
        assert third.startswith(expected)


def test_a_failed_attach_returns_its_group_unless_a_collective_failed_in_it(
    four_ranks: Ranks,
) -> None:
    for failures, threads in four_ranks.run(jobs.failed_attach_job):
        assert failures == {"ValueError: x": True, "WireError: x": True, "PeerError: x": False}
        assert threads == 0


@pytest.mark.parametrize("catches", [True, False])
def test_a_rank_that_calls_at_another_time_waits_no_longer_than_the_timeout(catches: bool) -> None:
    with Ranks(2) as ranks:
        first, other = ranks.run(jobs.different_times_job, catches)
    assert first.startswith("ConfigError: switch: a backward pass is under way")
    assert other.startswith("PeerError: gather among 2 ranks failed on rank 1 after 3.")
