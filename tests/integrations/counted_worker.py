"""Trains a few steps and compares the link's sent bytes with the interface's counter."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

TRANSMITTED = 8  # the column of /proc/net/dev


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for spec, exchange in json.loads(sys.argv[1]):
        reported, counted = count(spec, exchange)
        print(json.dumps({"spec": spec, "reported": reported, "counted": counted}), flush=True)
    dist.destroy_process_group()


def count(spec: str, exchange: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024)))
    link = gradwire.attach(model, spec, exchange=exchange)
    # No rank starts or ends while others still count.
    dist.barrier()
    reported, counted = link.stats()["sent_bytes"], interface_bytes()
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 784)).square().mean().backward()
    dist.barrier()
    reported, counted = link.stats()["sent_bytes"] - reported, interface_bytes() - counted
    dist.barrier()
    link.detach()
    return reported, counted


def interface_bytes() -> int:
    """Returns the operating system's count of bytes sent by this host's only interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[TRANSMITTED])
    raise AssertionError("no interface eth0")


if __name__ == "__main__":
    main()
