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


class ByteModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.output(self.gru(self.embedding(text))[0])
        return logits


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random windows of 32 bytes, and the bytes that follow each."""
    starts = torch.randint(len(text) - 33, (count, 1), generator=generator)
    window = text[starts + torch.arange(33)]
    return window[:, :-1], window[:, 1:]


def train(
    method: str, steps: int, width: int, sync_every: int, fragments: int = 1, delay: int = 0
) -> tuple[float, dict[str, object]]:
    """Returns the loss of the mean of all models on unseen windows, and the statistics."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    torch.manual_seed(0)
    model = ByteModel(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    wrap = {"diloco": gradwire.local.DiLoCo, "sparseloco": gradwire.local.SparseLoCo}[method]
    streaming = {"fragments": fragments, "delay": delay}
    with wrap(model, optimizer, sync_every=sync_every, **streaming) as workers:
        for _ in range(steps):
            inputs, targets = windows(text[:-10000], 16, generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
        with workers.averaged(), torch.no_grad():
            inputs, targets = windows(text[-10000:], 64, torch.Generator().manual_seed(2**31))
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        return float(loss), workers.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=["diloco", "sparseloco"], default="diloco")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument(
        "--fragments", type=int, default=1, help="parts that are synchronised in turn"
    )
    parser.add_argument(
        "--delay", type=int, default=0, help="steps until the mean of a part is applied"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    streaming = args.fragments, args.delay
    loss, stats = train(args.method, args.steps, args.width, args.sync_every, *streaming)
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}, {stats['ratio']:.0f} times fewer bytes than dense steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
