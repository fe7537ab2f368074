"""A small GPT under FSDP2, whose weights and gradients both travel compressed (torch 2.9, newer).

torchrun --nproc-per-node 2 examples/fsdp_gpt.py --gradients int4 --weights int8
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import gradwire

CONTEXT = 64


class GPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, layers: int, width: int) -> None:
        nn.Module.__init__(self)
        self.symbols, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text) + self.places.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        result: Tensor = self.output(self.norm(x))
        return result


def read_bytes(path: str | None) -> Tensor:
    """Returns the bytes of a text; without one, those of Python's own library."""
    if path is not None:
        return torch.tensor(list(Path(path).read_bytes()))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def loss_of(model: nn.Module, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Returns the mean loss of some random windows of the text."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    window = text[starts + torch.arange(CONTEXT + 1)]
    return cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def train(
    gradients: str,
    weights: str | None,
    steps: int,
    layers: int = 2,
    width: int = 96,
    seed: int = 0,
    path: str | None = None,
) -> tuple[float, dict[str, object]]:
    """Returns the loss on the last tenth of the text, and statistics of the communication.

    With both "none" that is plain FSDP2.
    """
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(layers, width)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = gradwire.attach_fsdp(model, gradients=gradients, weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    text = read_bytes(path)
    split = 9 * len(text) // 10
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, text[:split], 16, generator).backward()
        optimizer.step()
        schedule.step()
    stats = shards.stats()
    # Evaluated in full precision, as the checkpoint has it.
    shards.detach()
    with torch.no_grad():
        loss = loss_of(model, text[split:], 512, torch.Generator().manual_seed(2**31))
    return float(loss), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradients", default="int4")
    parser.add_argument("--weights", default="int8", help="'none' gathers them as they are")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="a file to learn; default: the source of Python's library")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    loss, stats = train(
        args.gradients, args.weights, args.steps, args.layers, args.width, args.seed, args.text
    )
    if dist.get_rank() == 0:
        sent, dense = stats["sent_bytes"], stats["dense_bytes"]
        assert isinstance(sent, int)
        assert isinstance(dense, int)
        print(f"loss {loss:.4f}, {sent / dense:.3f} of the bytes of plain FSDP2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
