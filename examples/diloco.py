"""DiLoCo or SparseLoCo on a small language model: AdamW inside, a sync every 30 steps.

torchrun --nproc-per-node 2 examples/diloco.py --method sparseloco
torchrun --nproc-per-node 2 examples/diloco.py --fragments 3 --delay 5
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire


class Reader(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.symbols = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.output(self.memory(self.symbols(text))[0])
        return logits


def windows(text: Tensor, count: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - 33, (count, 1), generator=dice)
    seen = text[starts + torch.arange(33)]
    return seen[:, :-1], seen[:, 1:]


def train(
    method: str, steps: int, width: int, sync_every: int, fragments: int = 1, delay: int = 0
) -> tuple[float, dict[str, object]]:
    """The loss of the mean of all models on windows that none has seen, and what was said."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    torch.manual_seed(0)
    model = Reader(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dice = torch.Generator().manual_seed(dist.get_rank())
    wrap = {"diloco": gradwire.local.DiLoCo, "sparseloco": gradwire.local.SparseLoCo}[method]
    streaming = {"fragments": fragments, "delay": delay}
    with wrap(model, optimizer, sync_every=sync_every, **streaming) as workers:
        for _ in range(steps):
            seen, said = windows(text[:-10000], 16, dice)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(seen).flatten(0, 1), said.flatten()).backward()
            optimizer.step()
        with workers.averaged(), torch.no_grad():
            seen, said = windows(text[-10000:], 64, torch.Generator().manual_seed(2**31))
            loss = nn.functional.cross_entropy(model(seen).flatten(0, 1), said.flatten())
        return float(loss), workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["diloco", "sparseloco"], default="diloco")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--fragments", type=int, default=1, help="parts that are told in turn")
    parser.add_argument("--delay", type=int, default=0, help="steps while a part is on its way")
    said = parser.parse_args()
    dist.init_process_group("gloo")
    streaming = said.fragments, said.delay
    loss, stats = train(said.method, said.steps, said.width, said.sync_every, *streaming)
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
