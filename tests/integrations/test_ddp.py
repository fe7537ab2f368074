"""The contract of DDP's hooks, on four real processes."""

import ddp_jobs as jobs
import pytest
import torch

import gradwire
from gradwire.spec import compressor_classes, format_spec
from processes import Ranks

# One usual setting of each method in the folder.
SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]


def assert_equal(weights: list[torch.Tensor]) -> None:
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert weights[0].isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_parameters_stay_equal_over_several_buckets(four_ranks: Ranks, spec: str) -> None:
    assert_equal(four_ranks.run(jobs.trained, spec, 5, {"bucket_cap_mb": 0.01}, {}))


EXCHANGES = ["gather", "sharded", "hierarchical:node=2", "hierarchical:node=2,between=sharded"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges_work_on_real_ranks(four_ranks: Ranks, exchange: str) -> None:
    options = {"exchange": exchange}
    assert_equal(four_ranks.run(jobs.trained, "efsign", 5, {"bucket_cap_mb": 0.01}, options))


@pytest.mark.parametrize(
    "ddp", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"broadcast_buffers": False}]
)
def test_ddp_options(four_ranks: Ranks, ddp: dict[str, bool]) -> None:
    settings = {"bucket_cap_mb": 0.01, **ddp}
    assert_equal(four_ranks.run(jobs.trained, "powersgd:rank=2", 4, settings, {}))


def test_no_compression_is_plain_ddp(four_ranks: Ranks) -> None:
    plain = four_ranks.run(jobs.plain, 5)
    ours = four_ranks.run(jobs.trained, "none", 5, {"bucket_cap_mb": 0.01}, {})
    assert torch.equal(ours[0], plain[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2"])
def test_half_precision_parameters(four_ranks: Ranks, spec: str, dtype: torch.dtype) -> None:
    results = four_ranks.run(jobs.trained_half, spec, dtype)
    assert_equal([weights for weights, _ in results])
    assert all(same_type for _, same_type in results)


# Nodes of two: a sum of two numbers is the same in any order, on the wire as in simulation.
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "qsgd:bits=4", "efsign"])
def test_real_ranks_do_what_simulated_ranks_do(four_ranks: Ranks, spec: str, exchange: str) -> None:
    results = four_ranks.run(jobs.seen_by_simulation, spec, {"exchange": exchange})
    given = [local for (local, _), _ in results]
    network = gradwire.simulate(jobs.mlp(), spec, workers=4, exchange=exchange)
    means = network.step(given)
    for (_, real), _ in results:
        assert all(torch.equal(real[name], mean) for name, mean in means.items())
    assert network.stats()["message_bytes"] <= results[0][1]


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_chunks_on_real_ranks_are_those_of_simulated_ones(four_ranks: Ranks, exchange: str) -> None:
    options = {"exchange": exchange, "chunk_bytes": 8192}
    results = four_ranks.run(jobs.seen_by_simulation, "topk:ratio=0.1", options)
    network = gradwire.simulate(jobs.mlp(), "topk:ratio=0.1", workers=4, **options)
    assert [*map(len, network.workers[0].chunks.values())] == [3, 4]
    means = network.step([local for (local, _), _ in results])
    for (_, real), _ in results:
        assert all(torch.equal(real[name], mean) for name, mean in means.items())


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.1", "none"])
def test_chunks_keep_ranks_equal_and_resume_bitwise(four_ranks: Ranks, spec: str) -> None:
    assert_equal(four_ranks.run(jobs.trained, spec, 3, {}, {"chunk_bytes": 8192}))
    assert all(four_ranks.run(jobs.resume_job, spec, 0, 8192))


@pytest.mark.parametrize("spec", ["randomk:ratio=0.1", "powersgd:rank=2", "none", "fp16"])
def test_means_of_real_ranks_are_those_of_simulated_ones(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.seen_by_simulation, spec, {})
    network = gradwire.simulate(jobs.mlp(), spec, workers=4)
    means = network.step([local for (local, _), _ in results])
    # An all-reduce may add in another order, and each addition rounds the size of the largest term.
    unit = 2.0**-11 if spec == "fp16" else 2.0**-24
    for (_, real), _ in results:
        for name, mean in means.items():
            largest = max(float(local[name].abs().max()) for (local, _), _ in results)
            assert (real[name] - mean).abs().max() <= 64 * unit * largest / 4


@pytest.mark.parametrize("spec", ["none", "efsign"])
def test_no_sync_accumulates(four_ranks: Ranks, spec: str) -> None:
    for untouched, close in four_ranks.run(jobs.no_sync_job, spec):
        assert untouched
        assert close


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_unused_parameters(four_ranks: Ranks, spec: str) -> None:
    results = four_ranks.run(jobs.unused_job, spec)
    assert all(none for none, _ in results)
    assert_equal([weights for _, weights in results])


def test_groups_of_some_ranks(four_ranks: Ranks) -> None:
    weights = four_ranks.run(jobs.subgroup_job, "topk:ratio=0.1")
    assert_equal(weights[:2])
    assert_equal(weights[2:])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "randomk:ratio=0.1", "threshold:value=0.001"])
@pytest.mark.parametrize("node", [1, 2, 4])
def test_nodes_of_real_ranks(four_ranks: Ranks, spec: str, node: int) -> None:
    options = {"exchange": f"hierarchical:node={node}"}
    assert_equal(four_ranks.run(jobs.trained, spec, 3, {"bucket_cap_mb": 0.01}, options))


def test_nodes_in_groups_of_some_ranks(four_ranks: Ranks) -> None:
    weights = four_ranks.run(jobs.subgroup_job, "topk:ratio=0.1", "hierarchical:node=1")
    flat = four_ranks.run(jobs.subgroup_job, "topk:ratio=0.1", "gather")
    assert all(torch.equal(w, f) for w, f in zip(weights, flat, strict=True))


def test_switch_to_nodes_and_back(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.switch_exchange_job)
    assert_equal([weights for weights, _ in results])
    for _, [flat, nodes, larger, again] in results:
        assert flat == 0 < nodes < larger == again


def test_groups_of_nodes_are_made_once(four_ranks: Ranks) -> None:
    for first, *later in four_ranks.run(jobs.groups_job):
        assert later == [first, first]


def test_buckets_are_rebuilt(four_ranks: Ranks) -> None:
    assert_equal([weights for _, weights in four_ranks.run(jobs.rebuilt_job)])


def test_switch_keeps_residuals(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.switch_job, "topk:ratio=0.01", "efsign")
    assert_equal([weights for weights, *_ in results])
    for _, before, after, name in results:
        assert before == after > 0
        assert name == "efsign"


def test_a_new_learning_rate_rescales_residuals(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.rate_job)
    assert_equal([weights for weights, *_ in results])
    for _, before, after, message in results:
        assert after == pytest.approx(10 * before, rel=1e-5)
        assert before > 0
        assert message == "learning rates must be positive, got 0.1 and 0.0"


def test_detach_restores_plain_ddp(four_ranks: Ranks) -> None:
    plain = four_ranks.run(jobs.plain, 3)
    results = four_ranks.run(jobs.detach_job)
    assert torch.equal(results[0][0], plain[0])
    assert_equal([again for _, again, _ in results])
    assert "detached" in results[0][2]


@pytest.mark.parametrize("spec", SPECS)
def test_resume_is_bitwise(four_ranks: Ranks, spec: str) -> None:
    assert all(four_ranks.run(jobs.resume_job, spec))


def test_many_buckets_and_rounds_keep_their_order(four_ranks: Ranks) -> None:
    assert_equal(four_ranks.run(jobs.many_buckets_job, "powersgd:rank=2", 80))


def test_user_collectives_during_backward_do_no_harm(four_ranks: Ranks) -> None:
    assert_equal(four_ranks.run(jobs.other_collectives_job))


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=1"])
def test_uneven_inputs_under_join(four_ranks: Ranks, spec: str) -> None:
    assert_equal(four_ranks.run(jobs.uneven_job, spec))


def test_compiled_models(four_ranks: Ranks) -> None:
    eager = four_ranks.run(jobs.trained, "topk:ratio=0.1", 3, {"bucket_cap_mb": 0.01}, {})
    compiled = four_ranks.run(jobs.compiled_job, "topk:ratio=0.1")
    assert_equal(compiled)
    torch.testing.assert_close(compiled[0], eager[0])


@pytest.mark.parametrize("key", ["spec", "seed", "checksum"])
def test_ranks_with_other_settings_are_refused(four_ranks: Ranks, key: str) -> None:
    for text in four_ranks.run(jobs.disagreement_job, key):
        assert text.startswith("ConfigError: ranks are set up differently")
        assert ("compressor" if key == "spec" else key) in text
        assert "rank [0, 1, 3]" in text
        assert "rank [2]" in text


@pytest.mark.parametrize(
    ("key", "difference"),
    [
        ("order", 'parameter 0: "a.weight (40, 40) torch.float32" on rank [0, 1, 3]'),
        ("dtype", "b.weight (40, 40) torch.bfloat16"),
        ("version", "version"),
    ],
)
def test_ranks_with_other_models_are_refused(four_ranks: Ranks, key: str, difference: str) -> None:
    for text in four_ranks.run(jobs.different_models_job, key):
        assert text.startswith("ConfigError: ranks are set up differently")
        assert difference in text
        assert "rank [2]" in text


def test_refusals_name_thing_rule_and_value(four_ranks: Ranks) -> None:
    found = four_ranks.run(jobs.refusals_job)[0]
    assert all(text.startswith("ConfigError") for text in found.values()), found
    assert "expected a DistributedDataParallel, got Sequential" in found["not ddp"]
    assert "did you mean 'topk'?" in found["name"]
    assert "does not go with memory 'residual'" in found["memory"]
    assert "does not go with exchange 'mean'" in found["exchange"]
    assert "0 has sparse=True" in found["sparse"]
    assert "hook slot is taken by _some_hook" in found["slot"]
    assert "has a link already" in found["twice"]
    assert "hook slot is taken by DDP's mixed_precision" in found["mixed"]
    assert "torch.float64" in found["dtype"]
    assert "got OptimizedModule; attach to the DDP object that was compiled" in found["compiled"]
    assert "DDP averages gradients itself; use gradwire.attach" in found["reducer"]
    assert "got ModuleDict; attach to the DDP object inside it, its .inner" in found["wrapped"]
    assert "5 parameters require a gradient, but 6 did when DDP was made" in found["frozen"]
    assert "skip_all_reduce_unused_params=True leaves out buckets" in found["skipping"]


def test_attach_without_a_process_group_says_so() -> None:
    with pytest.raises(gradwire.ConfigError, match=r"no process group; .*init_process_group, then"):
        gradwire.attach(jobs.mlp(), "efsign")  # type: ignore[arg-type]


def test_arguments_of_wrong_types_are_refused_at_the_call(four_ranks: Ranks) -> None:
    assert four_ranks.run(jobs.wrong_types_job)[0] == {
        "class": "ConfigError: expected a spec string or a compressor, got the class TopK; make "
        "one, like TopK(ratio=0.01)",
        "memory": "ConfigError: expected a memory or its spec, got 3",
        "exchange": "ConfigError: exchange: a spec must be a string, got None",
        "seed": "ConfigError: seed must be a whole number, got 'a'",
        "scaler": "ConfigError: attach: scaler must be a GradScaler, with get_scale(), got 1024.0",
        "group": "ConfigError: process_group: expected a ProcessGroup, got 'world'",
        "not a member": "ConfigError: process_group: rank 0 is not in this group; call on its "
        "ranks only",
    }


def test_an_error_of_the_exchange_is_raised_by_backward(four_ranks: Ranks) -> None:
    for text, rest in four_ranks.run(jobs.failure_surfaces_job):
        assert text == "WireError: bad bytes"
        assert rest == "untouched: True, had gradients: True"


def test_after_a_failure_the_communication_thread_has_ended(four_ranks: Ranks) -> None:
    for errors, left in four_ranks.run(jobs.failed_runner_job):
        assert errors == ["PeerError: rank 3 is gone"] * 2
        assert left == "[]"


def test_a_failure_ends_all_buckets_that_are_under_way(four_ranks: Ranks) -> None:
    for errors, under_way, left in four_ranks.run(jobs.failure_in_flight_job):
        assert errors == ["PeerError: rank 3 is gone"] * 2
        assert under_way >= 2
        assert left == "[]"


def test_a_switch_while_buckets_are_under_way_changes_nothing(four_ranks: Ranks) -> None:
    results = four_ranks.run(jobs.switch_in_flight_job)
    for error, under_way, _ in results:
        assert error.startswith("ConfigError: switch: ")
        assert under_way >= 2
    assert_equal([parameters for _, _, parameters in results])


def test_several_models_and_groups_in_one_process(four_ranks: Ranks) -> None:
    together = four_ranks.run(jobs.several_models_job, "together")
    in_turns = four_ranks.run(jobs.several_models_job, "in turns")
    first, second = zip(*together, strict=True)
    assert_equal(list(first))
    assert_equal(list(second[:2]))
    assert_equal(list(second[2:]))
    assert not torch.equal(second[0], second[2])
    for one, other in zip(together, in_turns, strict=True):
        assert_equal([one[0], other[0]])
        assert_equal([one[1], other[1]])
    alone = four_ranks.run(jobs.trained, "topk:ratio=0.1", 6, {"bucket_cap_mb": 0.01}, {})
    assert torch.equal(alone[0], first[0])
