"""Five workers train a classifier, and one of them lies: which aggregations bear that?

    python examples/byzantine.py

Prints the accuracy on unseen points for each lie and aggregation, beside that of an honest run.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradwire

WORKERS, LIAR, STEPS, RATE = 5, 3, 60, 0.5
WAYS = ("gather", *(f"gather:aggregate={name}" for name in ("median", "trimmed", "diameter")))

Lie = Callable[[Tensor], Tensor]
LIES: dict[str, Lie] = {
    "flipped, 100 times as large": lambda grad: -100 * grad,
    "large noise": lambda grad: 1e4 * torch.randn_like(grad),
    "NaN": lambda grad: torch.full_like(grad, float("nan")),
    "infinity": lambda grad: torch.full_like(grad, float("inf")),
    "the same everywhere": lambda grad: torch.full_like(grad, 50.0),
}


def batch(dice: torch.Generator, count: int = 64) -> tuple[Tensor, Tensor]:
    """Four classes: which of four directions a point looks along most."""
    directions = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    points = torch.randn(count, 20, generator=dice)
    return points, (points @ directions).argmax(1)


def accuracy(exchange: str, lie: Lie | None) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    workers = gradwire.simulate(model, "qsgd:bits=8", workers=WORKERS, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    dice = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        gradients = [gradient(model, *batch(dice)) for _ in range(WORKERS)]
        if lie is not None:
            gradients[LIAR] = {name: lie(grad) for name, grad in gradients[LIAR].items()}
        means = workers.step(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    points, classes = batch(dice, 2000)
    return float((model(points).argmax(1) == classes).float().mean())


def gradient(model: nn.Module, points: Tensor, classes: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(points), classes).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    # A mean that a NaN spoils says so in every step.
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    names = [way.rpartition("=")[2] if "=" in way else "mean" for way in WAYS]
    print(f"{'worker ' + str(LIAR) + ' sends':30}" + "".join(f"{name:>10}" for name in names))
    for title, lie in ({"its gradient": None} | LIES).items():
        row = [accuracy(way, lie) for way in WAYS]
        print(f"{title:30}" + "".join(f"{right:10.1%}" for right in row))


if __name__ == "__main__":
    main()
