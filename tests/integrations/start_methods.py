"""Trains on two ranks, started by fork or by spawn, with data loaded in forked processes."""

import os
import sys
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import gradwire

RANKS = 2


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(index + 1 + int(os.environ["RANK"])))


def rank_main(rank: int, store: str) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), bucket_cap_mb=0.0005)
    link = gradwire.attach(model, "topk:ratio=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Its processes are forked from one in which a communication thread is running.
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    for _ in range(2):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    line = f"trained {rank} {link.stats()['steps']} {sha256(content).hexdigest()}\n"
    # In one write, so that the lines of two ranks and of gloo do not mix.
    os.write(sys.stdout.fileno(), line.encode())
    dist.destroy_process_group()


def main() -> None:
    method, store = sys.argv[1:]
    context = mp.get_context(method)
    processes = [context.Process(target=rank_main, args=(rank, store)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
