"""Five workers train a classifier, and one of them is faulty: which aggregations tolerate it?

    python examples/byzantine.py

Prints the accuracy on unseen points for each fault and aggregation, and without a fault.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradwire

WORKERS, FAULTY, STEPS, RATE = 5, 3, 60, 0.5
EXCHANGES = ("gather", *(f"gather:aggregate={name}" for name in ("median", "trimmed", "diameter")))

Fault = Callable[[Tensor], Tensor]
FAULTS: dict[str, Fault] = {
    "flipped, 100 times as large": lambda grad: -100 * grad,
    "large noise": lambda grad: 1e4 * torch.randn_like(grad),
    "NaN": lambda grad: torch.full_like(grad, float("nan")),
    "infinity": lambda grad: torch.full_like(grad, float("inf")),
    "the same everywhere": lambda grad: torch.full_like(grad, 50.0),
}


def batch(generator: torch.Generator, count: int = 64) -> tuple[Tensor, Tensor]:
    """Returns points, and for each the one of four directions with the largest projection."""
    directions = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    points = torch.randn(count, 20, generator=generator)
    return points, (points @ directions).argmax(1)


def accuracy(exchange: str, fault: Fault | None) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    workers = gradwire.simulate(model, "qsgd:bits=8", workers=WORKERS, exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        gradients = [gradient(model, *batch(generator)) for _ in range(WORKERS)]
        if fault is not None:
            gradients[FAULTY] = {name: fault(grad) for name, grad in gradients[FAULTY].items()}
        means = workers.step(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[name]
        optimizer.step()
    points, classes = batch(generator, 2000)
    return float((model(points).argmax(1) == classes).float().mean())


def gradient(model: nn.Module, points: Tensor, classes: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(points), classes).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    # Every step whose mean is NaN logs a warning.
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    names = [name.rpartition("=")[2] if "=" in name else "mean" for name in EXCHANGES]
    print(f"{'worker ' + str(FAULTY) + ' sends':30}" + "".join(f"{name:>10}" for name in names))
    for title, fault in ({"its gradient": None} | FAULTS).items():
        row = [accuracy(exchange, fault) for exchange in EXCHANGES]
        print(f"{title:30}" + "".join(f"{value:10.1%}" for value in row))


if __name__ == "__main__":
    main()
