"""Loops without DDP, on four real processes."""

import optimizer_jobs as jobs
import pytest
import torch

from processes import Ranks

SPECS = ["none", "topk:ratio=0.1", "powersgd:rank=2", "qsgd:bits=4", "signum"]


def assert_equal(weights: list[torch.Tensor]) -> None:
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert weights[0].isfinite().all()


def test_parameters_trained_later_are_named(four_ranks: Ranks) -> None:
    for texts in four_ranks.run(jobs.later_job):
        for text in texts:
            assert text.startswith("ConfigError: reduce: 1 parameters are trained that were not")


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_stay_equal(four_ranks: Ranks, spec: str) -> None:
    assert_equal(four_ranks.run(jobs.trained, spec, 4, {"check_every": 2}))


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "efsign", "qsgd:bits=4"])
def test_a_loop_and_ddp_send_the_same(four_ranks: Ranks, spec: str) -> None:
    for same, as_many_bytes in four_ranks.run(jobs.against_link_job, spec):
        assert same
        assert as_many_bytes


def test_one_line_with_a_compiled_model(four_ranks: Ranks) -> None:
    eager = four_ranks.run(jobs.trained, "topk:ratio=0.1", 3, {})
    results = four_ranks.run(jobs.one_liner_job)
    assert torch.equal(results[0][0], eager[0])
    for found, steps, text, gone in results:
        assert torch.equal(found, results[0][0])
        assert steps == 3
        assert text.startswith("ConfigError: reduce_gradients: this model's reducer was made with")
        assert gone


@pytest.mark.parametrize("how", ["named", "model"])
def test_any_optimiser(four_ranks: Ranks, how: str) -> None:
    expected = four_ranks.run(jobs.trained, "topk:ratio=0.1", 3, {})
    assert_equal([*four_ranks.run(jobs.wrapped_job, how), expected[0]])


def test_a_wrapped_optimiser_is_the_same_object_with_a_handle_on_it(four_ranks: Ranks) -> None:
    for found in four_ranks.run(jobs.same_optimizer_job):
        assert all(found.values()), found


def test_a_missing_gradient_counts_as_zero(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.missing_job)
    assert all(none for none, _ in results)
    assert_equal([weights for _, weights in results])


def test_a_missing_gradient_is_named(four_ranks: Ranks) -> None:
    texts = four_ranks.run(jobs.missing_named_job)
    assert "no gradient for ['never.weight', 'never.bias'];" in texts[0]
    assert "no gradient for ['sometimes.weight', 'sometimes.bias', 'never.weight'" in texts[1]


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_resume_is_bitwise(four_ranks: Ranks, spec: str) -> None:
    assert all(same and kept for same, kept in four_ranks.run(jobs.resume_job, spec))


def test_an_overflow_is_raised_on_all_ranks(four_ranks: Ranks) -> None:
    for text, same in four_ranks.run(jobs.overflow_job):
        assert text.startswith("NonFiniteError: a gradient of step 2 is not finite")
        assert same


def test_a_mesh_selects_the_ranks(four_ranks: Ranks) -> None:
    a, b, c, d = four_ranks.run(jobs.mesh_job)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)


def test_refusals_name_thing_rule_and_value(four_ranks: Ranks) -> None:
    found = four_ranks.run(jobs.refusals_job)[0]
    assert "0.weight: its gradient goes through a Reducer already" in found["twice"]
    assert "its gradient goes through a Reducer already" in found["link"]
    assert "this reducer is detached" in found["detached"]
    assert "use gradwire.attach" in found["ddp"]
    assert "parameters have no names" in found["nameless"]
    assert "the optimiser's parameters have no names" in found["optimizer"]
    assert "are not among the model's" in found["strange"]
    assert "step has a closure" in found["closure"]
    assert "expected a mesh of one dimension, got 2 ('a', 'b')" in found["mesh"]
    assert found.pop("drift").startswith("PeerError: parameters have drifted apart")
    assert all(text.startswith("ConfigError") for text in found.values()), found


def test_arguments_of_wrong_types_are_refused_at_the_call(four_ranks: Ranks) -> None:
    found = four_ranks.run(jobs.wrong_types_job)[0]
    assert "its gradient goes through a Reducer already" in found.pop("other")
    assert found == {
        "model": "ConfigError: wrap_optimizer: expected a torch.optim.Optimizer, got Sequential",
        "handle": "ConfigError: wrap_optimizer: expected a torch.optim.Optimizer, got Reducer",
        "again": "ConfigError: wrap_optimizer: this optimiser is wrapped already; switch or detach "
        "its handle, optimizer.gradwire",
        "not wrapped": "ConfigError: handle_of: this SGD is not wrapped, or was detached since; "
        "call wrap_optimizer first",
        "no hooks": "ConfigError: wrap_optimizer: _Outer has no step hooks; wrap the optimiser "
        "inside it",
        "none": "ConfigError: expected a module or parameters with their names, got None",
        "names": "ConfigError: parameters have no names; pass the model or "
        "model.named_parameters(), got str",
        "seed": "ConfigError: seed must be a whole number, got 1.5",
        "group": "ConfigError: process_group: expected a ProcessGroup, got 'world'",
        "member": "ConfigError: process_group: rank 0 is not in this group; call on its ranks only",
    }


def test_messages_are_about_as_large_as_buckets() -> None:
    megabyte = (1 << 20) // 4
    lengths = [20 * megabyte, 5 * megabyte, megabyte, 60 * megabyte, megabyte]
    together = jobs.sizes_of(lengths)
    assert together == [lengths[:2], lengths[2:3], lengths[3:4], lengths[4:]]
    assert jobs.sizes_of([0, 3]) == [[0, 3]]


def test_a_message_that_is_sent_before_ranks_agree_changes_nothing(four_ranks: Ranks) -> None:
    ours, expected = (four_ranks.run(jobs.changing_job, early) for early in (True, False))
    # In passes 2 to 4 (where it is sent in vain), 6 to 8 (again) and not before two equal ones.
    assert [sent for _, _, sent in ours] == [6] * 4
    for (means, steps, _), (expected_means, expected_steps, _) in zip(ours, expected, strict=True):
        assert steps == expected_steps
        assert [*steps.values()] == [6, *[10] * (len(steps) - 1)]
        for found, other, common in zip(means, expected_means, ours[0][0], strict=True):
            for name, grad in found.items():
                assert (grad is None) == (other[name] is None) == (common[name] is None)
                assert grad is None or torch.equal(grad, other[name])
                assert grad is None or torch.equal(grad, common[name])
