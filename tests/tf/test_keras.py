"""Keras and TensorFlow on real processes."""

from pathlib import Path

import pytest
import torch
from named_jobs import NamedJobs

SPECS = ["none", "topk:ratio=0.1", "topk:ratio=0.1 | qsgd:bits=4", "powersgd:rank=2", "signum"]


def assert_equal(weights: list[torch.Tensor]) -> None:
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert weights[0].isfinite().all()


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2"])
def test_fit_on_four_ranks(keras_ranks: NamedJobs, spec: str) -> None:
    results = keras_ranks.run("fit_job", spec)
    assert_equal([weights for weights, _ in results])
    assert [stats["steps"] for _, stats in results] == [4] * 4
    if spec == "none":
        expected = keras_ranks.run("torch_fit_job")[0]
        torch.testing.assert_close(results[0][0], expected, rtol=1e-4, atol=1e-5)


def test_fit_on_two_ranks(keras_ranks: NamedJobs) -> None:
    (a, stats), (b, _), (c, _), (d, _) = keras_ranks.run("fit_job", "topk:ratio=0.1", 2)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)
    assert stats["ratio"] > 3


def test_equal_gradients_give_the_means_of_torch(keras_ranks: NamedJobs) -> None:
    for found in keras_ranks.run("against_torch_job", SPECS):
        assert found == dict.fromkeys(SPECS, (True, True, True))


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_tapes(keras_ranks: NamedJobs, how: str) -> None:
    results = keras_ranks.run("tape_job", how)
    assert_equal([weights for weights, *_ in results])
    for _, one_reducer, unused, stats in results:
        assert one_reducer
        assert [name.split("/")[-2] for name in unused] == ["never", "never"]
        assert stats["steps"] == 4
        assert stats["residual_norm"] > 0


def test_memory_is_shared_and_gradients_are_unchanged(keras_ranks: NamedJobs) -> None:
    for found in keras_ranks.run("shared_memory_job"):
        assert found == dict.fromkeys(["shared", "given", "odd", "alone", "twice"], True)


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_resume_is_bitwise(keras_ranks: NamedJobs, spec: str) -> None:
    assert all(same and kept for same, kept in keras_ranks.run("resume_job", spec))


def test_an_overflow_is_skipped_on_all_ranks(keras_ranks: NamedJobs) -> None:
    results = keras_ranks.run("overflow_job")
    assert_equal([weights for weights, *_ in results])
    for _, scale, stats, applied in results:
        assert scale == 4.0
        assert (stats["steps"], stats["skipped"], applied) == (3, 1, 3)


def test_variables_that_share_a_name_are_numbered(keras_ranks: NamedJobs) -> None:
    assert keras_ranks.run("names_job")[0] == ["Variable", "Variable#2", "Variable#3"]


def test_a_saved_model_needs_no_gradwire(keras_ranks: NamedJobs, tmp_path: Path) -> None:
    assert keras_ranks.run("saved_job", str(tmp_path)) == ["SGD 4"] * 4


def test_an_error_inside_a_graph_is_raised(keras_ranks: NamedJobs) -> None:
    for text in keras_ranks.run("raised_job"):
        assert "NonFiniteError: a gradient of step 0 is not finite on some rank" in text


def test_refusals_name_thing_rule_and_value(keras_ranks: NamedJobs) -> None:
    found = keras_ranks.run("refusals_job")[0]
    print(found)
    assert "no compressor named 'top_k'; did you mean 'topk'?" in found["spec"]
    assert "settings: no option named 'sed'; did you mean 'seed'?" in found["option"]
    assert "expected an optimiser of Keras 3, got str" in found["optimizer"]
    assert "averages its gradients already" in found["twice"]
    assert "DistributedOptimizer(LossScaleOptimizer(optimizer), ...)" in found["half"]
    assert "set jit_compile=False" in found["xla"]
    assert "make the model outside of any strategy's scope" in found["strategy"]
    assert "its gradient goes through a Reducer already" in found["claimed"]
    assert "['new'] came after this reducer was made" in found["later"]
    assert "1 gradients of 6 variables" in found["count"]
    assert "this reducer is detached" in found["detached"]
    assert "['y'] had no gradient on any rank in the first step" in found["late"]
    assert "['seed'] are settings of the reducer" in found["both"]
    assert "is torch.int32" in found["type"]
    assert "no variable to train" in found["nothing"]
    assert found.pop("drift").startswith("PeerError: parameters have drifted apart")
    assert all(text.startswith("ConfigError") for text in found.values()), found
