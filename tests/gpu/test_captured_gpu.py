"""Passes replayed as a CUDA graph give the same results as passes launched one by one."""

import pytest
import torch
from torch import nn

from gradwire.bench.cases.local import LocalCase
from gradwire.bench.cases.parse import parse_case
from gradwire.bench.simulated.passes import CapturedPasses, EagerPasses, StepResult
from gradwire.bench.simulated.trainer import exchange_trainer, local_trainer
from gradwire.bench.workloads.base import Workload, parse_workload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

# More than the warm-up, so that the last steps are replays.
STEPS = 6
# Without dropout, whose random numbers would come in another order.
EXACT = ["resnet9-tiny", "gpt-tiny:dropout=0", "lstm_ptb-tiny:dropout=0", "mlp-tiny"]


def built(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build().to(workload.device)


def flat(result: StepResult) -> torch.Tensor:
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in result.gradients])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shared", [True, False])
def test_replayed_passes_equal_those_of_each_worker(name: str, shared: bool) -> None:
    workload = parse_workload(name, device="cuda")
    # Built anew, since the weights of a copied LSTM are not contiguous.
    ours, theirs = (
        [built(workload)] * 3 if shared else [built(workload) for _ in range(3)] for _ in range(2)
    )
    captured, eager = CapturedPasses(workload, ours, seed=0), EagerPasses(workload, theirs, seed=0)
    for step in range(STEPS):
        a, b = captured.run(step), eager.run(step)
        torch.testing.assert_close(a.losses, b.losses, rtol=1e-3, atol=1e-4)
        error = (flat(a) - flat(b)).norm() / flat(b).norm()
        # cuDNN multiplies in TF32.
        assert error < 5e-3, f"step {step}: {error}"
        # Changes the weights like an optimiser, so that stale results would be detected.
        with torch.no_grad():
            for p in {*ours, *theirs}:
                torch._foreach_mul_(list(p.parameters()), 0.98)
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gpt-tiny:dropout=0.5", "lstm_ptb-tiny:dropout=0.5"])
def test_dropout_differs_from_replay_to_replay(name: str) -> None:
    workload = parse_workload(name, device="cuda")
    captured = CapturedPasses(workload, [built(workload)] * 2, seed=0)
    for step in range(STEPS):
        captured.run(step)
    # The same batch again: only the random numbers differ.
    losses = torch.stack([captured.run(0).losses.clone() for _ in range(3)])
    assert len(losses[:, 0].unique()) == 3
    assert len(losses[:, 1].unique()) == 3


def test_gradients_are_the_same_tensors_in_every_step() -> None:
    workload = parse_workload("resnet9-tiny", device="cuda")
    captured = CapturedPasses(workload, [built(workload)] * 2, seed=0)
    places = {
        tuple(g.data_ptr() for one in captured.run(step).gradients for g in one.values())
        for step in range(STEPS)
    }
    assert len(places) == 1


@pytest.mark.parametrize(
    "text",
    [
        "topk:ratio=0.01 | qsgd:bits=4 @ local=(qsparse:sync_every=8)",
        "grbs:ratio=0.03,block=64 @ local=(cser:sync_every=4,errors=(grbs:ratio=0.25,block=64))",
    ],
)
def test_local_training_learns(text: str) -> None:
    workload = parse_workload("resnet9-tiny", device="cuda")
    case = parse_case(text)
    assert isinstance(case, LocalCase)
    with local_trainer(workload, case, workers=3, seed=0) as trainer:
        losses = torch.stack([trainer.step(step, 40).clone() for step in range(40)])
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.05", "powersgd:rank=2"])
def test_lock_step_training_learns(spec: str) -> None:
    workload = parse_workload("resnet9-tiny", device="cuda")
    trainer = exchange_trainer(workload, spec, workers=4, seed=0)
    losses = torch.stack([trainer.step(step, 40).clone() for step in range(40)])
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
