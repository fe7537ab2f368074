"""A classifier under FSDP2, whose reduce-scatter is compressed (torch 2.9 and newer).

torchrun --nproc-per-node 2 examples/fsdp.py --method qsgd:bits=4
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns noisy copies of ten fixed patterns, and the labels."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (count,), generator=generator)
    return patterns[labels] + 3 * torch.randn(count, 784, generator=generator), labels


def train(method: str, steps: int, hidden: int) -> tuple[float, dict[str, object]]:
    """Returns the accuracy on unseen images, and statistics of the communication."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    shards = gradwire.attach_fsdp(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs, labels = digits(64, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    with torch.no_grad():
        inputs, labels = digits(1000, torch.Generator().manual_seed(2**31))
        right = (model(inputs).argmax(1) == labels).float().mean()
    stats = shards.stats()
    shards.detach()
    return float(right), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="int4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    accuracy, stats = train(args.method, args.steps, args.hidden)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}, {stats['ratio']:.0f} times fewer bytes than plain FSDP2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
