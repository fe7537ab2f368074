"""DDP with gradients on a GPU: over gloo, where messages go through the host, and on NCCL."""

import gpu_jobs as jobs
import pytest
import torch
import torch.multiprocessing as mp

from gradwire.spec import compressor_classes, format_spec, parse
from processes import Ranks, free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

SPECS = [format_spec(cls(**cls.examples[0])) for cls in compressor_classes().values()]


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_that_share_a_gpu_stay_equal(four_ranks: Ranks, spec: str) -> None:
    weights = four_ranks.run(jobs.trained_on, spec, "auto", "cuda", 6)
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert weights[0].isfinite().all()


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("spec", ["efsign", "qsgd:bits=4", "topk:ratio=0.01"])
def test_exchanges_on_the_gpu(four_ranks: Ranks, spec: str, exchange: str) -> None:
    weights = four_ranks.run(jobs.trained_on, spec, exchange, "cuda", 6)
    assert all(torch.equal(w, weights[0]) for w in weights)


@pytest.mark.parametrize("spec", SPECS)
def test_gpu_and_cpu_take_the_same_step(four_ranks: Ranks, spec: str) -> None:
    gpu = four_ranks.run(jobs.trained_on, spec, "auto", "cuda", 1)[0]
    cpu = four_ranks.run(jobs.trained_on, spec, "auto", "cpu", 1)[0]
    # Gradients differ in their last bits, so a few entries are selected or rounded differently.
    moved = (gpu - cpu).abs() > 1e-4
    assert moved.float().mean() < 0.02


def never_synchronizes(spec: str) -> bool:
    return not parse(spec).traits().variable_length and not parse(spec).traits().syncs_host


@pytest.mark.parametrize("spec", [s for s in SPECS if never_synchronizes(s)])
def test_nccl_never_synchronizes(spec: str) -> None:
    """Only messages of varying length need the host to know their length."""
    context = mp.get_context("spawn")
    with context.Pool(1) as pool:
        ours, plain = pool.apply(jobs.one_rank_of_nccl, (spec, "auto", free_port()))
    assert ours.isfinite().all()
    assert (ours * plain).sum() > 0
