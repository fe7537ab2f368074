"""Passes of all workers: each on its own batch, and the same with a shared model."""

import copy

import pytest
import torch

from gradwire.bench.datasets.sampling import BatchSlice, merge_slices
from gradwire.bench.simulated.passes import EagerPasses, passes_of
from gradwire.bench.workloads.base import parse_workload, workload_classes


@pytest.mark.parametrize("name", sorted(workload_classes()))
def test_batches_of_all_workers_are_those_of_each(name: str) -> None:
    workload = parse_workload(f"{name}-tiny")
    workers = 3
    # Steps before and after an epoch's end, and the one that contains it.
    count = workload.examples() // workload.batch_size
    for step in {0, count // workers - 1, count // workers, count // workers + 1}:
        inputs, targets = workload.batches(step, workers, seed=1)
        for rank in range(workers):
            one = workload.batch(step, rank, workers, seed=1)
            assert torch.equal(inputs.chunk(workers)[rank], one.inputs)
            assert torch.equal(targets.chunk(workers)[rank], one.targets)


def test_consecutive_deals_are_one() -> None:
    deals = [BatchSlice(0, 4, 6), BatchSlice(0, 6, 8), BatchSlice(1, 0, 2), BatchSlice(1, 2, 4)]
    assert merge_slices(deals) == [BatchSlice(0, 4, 8), BatchSlice(1, 0, 4)]
    # An equal position of another epoch holds another example.
    assert merge_slices([BatchSlice(0, 0, 2), BatchSlice(1, 2, 4)]) == [
        BatchSlice(0, 0, 2),
        BatchSlice(1, 2, 4),
    ]


def test_equal_models_give_the_results_of_a_shared_one() -> None:
    workload = parse_workload("resnet9-tiny")
    torch.manual_seed(0)
    model = workload.build()
    each = [copy.deepcopy(model) for _ in range(3)]
    shared = EagerPasses(workload, [model] * 3, seed=0).run(2)
    own = EagerPasses(workload, each, seed=0).run(2)
    assert torch.equal(shared.losses, own.losses)
    assert len(set(shared.losses.tolist())) == 3
    for ours, theirs in zip(shared.gradients, own.gradients, strict=True):
        assert ours.keys() == theirs.keys() == {n for n, _ in model.named_parameters()}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Running means of a shared model are worker 0's; separate models keep their own.
    means = [m.get_buffer("0.1.running_mean") for m in (model, *each)]
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_a_cpu_runs_one_worker_after_the_other() -> None:
    workload = parse_workload("mlp-tiny")
    assert isinstance(passes_of(workload, [workload.build()], seed=0), EagerPasses)


def test_a_net_in_bf16_has_float_gradients_near_those_in_fp32() -> None:
    found = {}
    for bf16 in (False, True):
        workload = parse_workload(f"resnet9-tiny:bf16={str(bf16).lower()}")
        torch.manual_seed(0)
        [gradient] = EagerPasses(workload, [workload.build()], seed=0).run(0).gradients
        assert {g.dtype for g in gradient.values()} == {torch.float32}
        found[bf16] = torch.cat([g.flatten() for g in gradient.values()])
    assert not torch.equal(found[True], found[False])
    assert torch.cosine_similarity(found[True], found[False], dim=0) > 0.95
