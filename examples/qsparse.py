"""Qsparse-local-SGD on a small classifier: eight local steps, then 1 % of the drift in 4 bits.

torchrun --nproc-per-node 2 examples/qsparse.py

With a server in place of collective syncs, and worker 3 at a tenth of the speed:
gradwire net --workers 4 --rate 100mbit -- python examples/qsparse.py --asynchronous \\
    --steps 60 --pause-ms 20 --slow-worker 3
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and their labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels


def train(
    steps: int, hidden: int, asynchronous: bool = False, pause_s: float = 0.0
) -> tuple[float, float, dict[str, object]]:
    """Returns the accuracy of the mean of all models, this worker's seconds, and statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    spec = "topk:ratio=0.01 | qsgd:bits=4"
    local = gradwire.local
    wrap = local.AsyncQsparseLocalSGD if asynchronous else local.QsparseLocalSGD
    with wrap(model, optimizer, spec, sync_every=8) as workers:
        start = time.perf_counter()
        for _ in range(steps):
            time.sleep(pause_s)
            inputs, labels = digits(64, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        took = time.perf_counter() - start
        with workers.averaged(), torch.no_grad():
            inputs, labels = digits(1000, torch.Generator().manual_seed(2**31))
            accuracy = (model(inputs).argmax(1) == labels).float().mean()
        return float(accuracy), took, workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--asynchronous", action="store_true", help="workers do not wait for each other"
    )
    parser.add_argument("--pause-ms", type=float, default=0.0, help="pause in every step")
    parser.add_argument(
        "--slow-worker", type=int, default=-1, help="rank that pauses ten times as long"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pause_s = args.pause_ms / 1000 * (10 if rank == args.slow_worker else 1)
    accuracy, took, stats = train(args.steps, args.hidden, args.asynchronous, pause_s)
    print(f"worker {rank}: {args.steps} steps in {took:.1f} s")
    if rank == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
