"""How many entries thresholds of fitted distributions select, in steps with error feedback.

The ranges are those that the docstrings of the methods state.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from gradwire.compressors._sparsifier import ThresholdSparsifier
from gradwire.compressors.gaussiank import GaussianK
from gradwire.compressors.sidco import SIDCo
from gradwire.types import EFInput, EncodeContext

NUMEL = 10_000
STEPS = 120
SETTLED = 20
"""Steps after which residuals have grown to what they stay at."""
RATIOS = (0.1, 0.01, 0.001)

Draw = Callable[[torch.Generator], Tensor]


def normal(rng: torch.Generator) -> Tensor:
    return torch.randn(NUMEL, generator=rng)


def uniform(rng: torch.Generator) -> Tensor:
    return torch.rand(NUMEL, generator=rng)


def student(freedom: int) -> Draw:
    """Returns draws of Student's t: a normal over the root of a mean of squared normals."""

    def draw(rng: torch.Generator) -> Tensor:
        squares = torch.randn(freedom, NUMEL, generator=rng).square().mean(dim=0)
        return normal(rng) / squares.sqrt()

    return draw


def mixture(share: float, factor: float) -> Draw:
    return lambda rng: normal(rng) * torch.where(uniform(rng) < share, factor, 1.0)


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": normal,
    "laplace": lambda rng: uniform(rng).log() * normal(rng).sign(),
    "uniform": lambda rng: 2 * uniform(rng) - 1,
    "student 3": student(3),
    "student 2": student(2),
    "cauchy": student(1),
    "log-normal": lambda rng: (2 * normal(rng)).exp() * normal(rng).sign(),
    "half zero": lambda rng: normal(rng) * (uniform(rng) < 0.5),
    "sparse": lambda rng: normal(rng) * (uniform(rng) < 0.01),
    "1 % a hundred times larger": mixture(0.01, 100.0),
    "10 % thirty times larger": mixture(0.1, 30.0),
    "scales of three decades": lambda rng: normal(rng) * torch.logspace(-3, 0, NUMEL),
    "far from zero": lambda rng: 1 + 0.1 * normal(rng),
}


LIGHT_TAILS = ("normal", "laplace", "uniform", "half zero", "net")


@cache
def gradients_of_a_net() -> list[Tensor]:
    """Returns the gradient of the first layer of a small net in training, step by step."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(64, NUMEL // 64), torch.nn.ReLU(), torch.nn.Linear(NUMEL // 64, 10)
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        inputs, teacher = torch.randn(2048, 64), torch.randn(64, 10)
        labels = (inputs @ teacher).argmax(1)
        found = []
        for _ in range(STEPS):
            batch = torch.randint(2048, (32,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            weight = next(net.parameters())
            assert weight.grad is not None
            found.append(weight.grad.reshape(-1).clone())
        return found


def gradients(name: str) -> list[Tensor]:
    if name == "net":
        return gradients_of_a_net()
    rng = torch.Generator().manual_seed(0)
    return [DISTRIBUTIONS[name](rng) for _ in range(STEPS)]


def sent_over_wanted(codec: ThresholdSparsifier, grads: list[Tensor]) -> Tensor:
    """Returns the number of entries sent, over k or the number of nonzero entries, by step."""
    residual, found = torch.zeros_like(grads[0]), []
    for step, grad in enumerate(grads):
        total = grad + residual
        index = codec.select(EFInput(total), EncodeContext((total.numel(),), step=step))
        wanted = min(codec.count(total.numel()), int(total.count_nonzero()))
        found.append(index.numel() / wanted)
        residual = total.index_fill_(0, index, 0.0)
    return torch.tensor(found)


each_distribution = pytest.mark.parametrize("name", [*DISTRIBUTIONS, "net"])


@each_distribution
def test_gaussiank_sends_two_to_four_thirds_of_k(name: str) -> None:
    """The search for the threshold ends between its bounds, and does not oscillate."""
    grads = gradients(name)
    for ratio in RATIOS:
        sent = sent_over_wanted(GaussianK(ratio=ratio), grads)
        assert sent.min() >= 2 / 3 - 1e-6
        assert sent.max() <= 4 / 3 + 1e-6
        assert sent[SETTLED:].std() <= 0.22


@each_distribution
def test_sidco_sends_less_of_heavy_tails(name: str) -> None:
    grads = gradients(name)
    for ratio in RATIOS:
        sent = sent_over_wanted(SIDCo(ratio=ratio), grads)
        assert sent.min() > 0
        assert sent.max() <= 1.7
        if name in LIGHT_TAILS and ratio >= 0.01:
            assert sent.min() >= 0.7


@pytest.mark.parametrize("name", LIGHT_TAILS)
def test_sidco_needs_more_stages_for_a_thousandth(name: str) -> None:
    grads = gradients(name)
    few, many = (sent_over_wanted(SIDCo(ratio=0.001, stages=stages), grads) for stages in (3, 5))
    assert few.median() <= 0.5
    assert 0.9 <= many.median() <= 1.7


def test_sidco_sends_one_entry_where_all_are_far_from_zero() -> None:
    """An exponential distribution with that mean would have much larger entries."""
    for ratio in RATIOS:
        codec, x = SIDCo(ratio=ratio), gradients("far from zero")[0]
        assert codec.select(EFInput(x), EncodeContext((NUMEL,))).numel() == 1
