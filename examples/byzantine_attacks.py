"""Ten workers train a classifier, some of them lie: which aggregation survives which attack?

    python examples/byzantine_attacks.py --liars 2 --seeds 3

Prints a table of the accuracy on unseen points, in percent, by attack and aggregation. Liars know
the momenta of all honest workers. Every worker keeps its own momentum and sends that.
"""

import argparse
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import gradwire

WORKERS, BATCH, RATE, MOMENTUM = 10, 32, 0.1, 0.9
INPUTS, CLASSES = 20, 10
AGGREGATIONS = (
    "mean",
    "median",
    "trimmed",
    "diameter",
    "multi_krum",
    "geometric_median",
    "clipped",
    "trimmed,mix=true",
)
ATTACKS = (
    "sign_flip:scale=10",
    "noise:scale=10",
    "alie:z=1.5",
    "inner_product:eps=0.1",
    "inner_product:eps=10",
    "nan",
    "replay:delay=50",
)


def batch(generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Returns points, and for each the one of ten directions with the largest projection."""
    directions = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    points = torch.randn(count, INPUTS, generator=generator)
    return points, (points @ directions).argmax(1)


def accuracy(
    spec: str, aggregation: str, liars: int, attack: str | None, seed: int, steps: int
) -> float:
    """Trains, with liars if there is an attack; returns the accuracy on unseen points."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    name, *settings = aggregation.split(",")
    settings += [] if name == "mean" else [f"faulty={liars}"]
    workers = gradwire.simulate(
        model,
        spec,
        workers=WORKERS,
        exchange=",".join([f"gather:aggregate={name}", *settings]),
        seed=seed,
        attacks=None if attack is None else dict.fromkeys(range(WORKERS - liars, WORKERS), attack),
    )
    parameters = dict(model.named_parameters())
    momenta = [{n: torch.zeros_like(p) for n, p in parameters.items()} for _ in range(WORKERS)]
    generator = torch.Generator().manual_seed(seed + 1)
    for step in range(steps):
        for momentum in momenta:
            points, classes = batch(generator)
            loss = nn.functional.cross_entropy(model(points), classes)
            grads = torch.autograd.grad(loss, [*parameters.values()])
            for held, grad in zip(momentum.values(), grads, strict=True):
                held.mul_(MOMENTUM).add_(grad)
        rate = RATE * (1 - step / steps)
        for parameter, mean in zip(
            parameters.values(), workers.step(momenta).values(), strict=True
        ):
            parameter.data.sub_(rate * mean)
    points, classes = batch(generator, 5000)
    return float((model(points).argmax(1) == classes).float().mean())


def table(spec: str, liars: int, steps: int, seeds: int) -> Iterator[str]:
    """Yields the lines of a table of mean accuracies in percent."""
    yield f"| {liars} of {WORKERS} send | {' | '.join(AGGREGATIONS)} |"
    yield "| --- |" + " --- |" * len(AGGREGATIONS)
    for attack in (None, *ATTACKS):
        row = []
        for aggregation in AGGREGATIONS:
            found = [
                accuracy(spec, aggregation, liars, attack, seed, steps) for seed in range(seeds)
            ]
            row.append(f"{100 * sum(found) / seeds:.1f}")
        yield f"| {attack or 'their momenta'} | {' | '.join(row)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", default="none")
    parser.add_argument("--liars", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    # Every step whose mean is NaN logs a warning.
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    for line in table(given.spec, given.liars, given.steps, given.seeds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
