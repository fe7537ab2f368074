"""Ten workers train a classifier, some of them lie: which aggregation survives which attack?

    python examples/byzantine_attacks.py --liars 2 --seeds 3

Prints a table of the accuracy on unseen points, in percent, by attack and aggregation. Liars know
the momenta of all honest workers. Every worker keeps its own momentum and sends that. With
`--servers` models are those of five parameter servers, one of which lies, too (ByzSGD).
"""

import argparse
import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradwire
from gradwire.byzsgd import ByzSGD, Nodes

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


def accuracy_of_servers(liars: int, attack: str | None, seed: int, steps: int) -> float:
    """Trains on five parameter servers, one of which lies if there is an attack."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    parameters = dict(model.named_parameters())
    byz = ByzSGD(
        parameters,
        Nodes(servers=5, faulty_servers=1, workers=WORKERS, faulty_workers=liars),
        attacks={} if attack is None else dict.fromkeys(range(WORKERS - liars, WORKERS), attack),
        server_attacks={} if attack is None else {4: "sign_flip:scale=10"},
        seed=seed,
    )
    momenta = [{n: torch.zeros_like(p) for n, p in parameters.items()} for _ in range(WORKERS)]
    generator = torch.Generator().manual_seed(seed + 1)

    def momentum(values: Mapping[str, Tensor], worker: int) -> Mapping[str, Tensor]:
        own = {name: value.detach().requires_grad_() for name, value in values.items()}
        points, classes = batch(generator)
        loss = nn.functional.cross_entropy(functional_call(model, own, (points,)), classes)
        grads = torch.autograd.grad(loss, [*own.values()])
        for held, grad in zip(momenta[worker].values(), grads, strict=True):
            held.mul_(MOMENTUM).add_(grad)
        return momenta[worker]

    for step in range(steps):
        byz.step(momentum, RATE * (1 - step / steps))
    points, classes = batch(generator, 5000)
    output = functional_call(model, byz.model(), (points,))
    return float((output.argmax(1) == classes).float().mean())


def table_of_servers(liars: int, steps: int, seeds: int) -> Iterator[str]:
    """Yields the lines of a table of mean accuracies of ByzSGD in percent."""
    yield f"| {liars} of {WORKERS} workers send | ByzSGD |\n| --- | --- |"
    for attack in (None, *ATTACKS):
        found = [accuracy_of_servers(liars, attack, seed, steps) for seed in range(seeds)]
        yield f"| {attack or 'their momenta'} | {100 * sum(found) / seeds:.1f} |"


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
    parser.add_argument("--servers", action="store_true")
    given = parser.parse_args()
    # Every step whose mean is NaN logs a warning.
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    lines = table(given.spec, given.liars, given.steps, given.seeds)
    if given.servers:
        lines = table_of_servers(given.liars, given.steps, given.seeds)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
