"""A small GPT in pipeline stages, whose activations and gradients travel in 4 to 8 bits.

torchrun --nproc-per-node 2 examples/pipeline_gpt.py --activations int4 --gradients int8
gradwire net --workers 4 --rate 20mbit -- python examples/pipeline_gpt.py --controller gravac
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import gradwire


class Block(nn.Module):
    """Causal attention and a perceptron, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        nn.Module.__init__(self)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.second(x))
        return out


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, symbols: int, context: int, width: int) -> None:
        nn.Module.__init__(self)
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.symbols(tokens) + self.places.weight[: tokens.shape[1]]
        return out


SYMBOLS = 128


def stage_of(index: int, count: int, layers: int, width: int, context: int) -> nn.Module:
    """Returns one stage: its share of the layers, with the embedding first or the head last."""
    torch.manual_seed(index)
    share = layers // count + (index < layers % count)
    parts: list[nn.Module] = [Block(width, 4) for _ in range(share)]
    if index == 0:
        parts.insert(0, Embedding(SYMBOLS, context, width))
    if index == count - 1:
        parts += [nn.LayerNorm(width), nn.Linear(width, SYMBOLS)]
    return nn.Sequential(*parts)


def tokens_of(step: int, rows: int, context: int) -> Tensor:
    """Returns text in which every character is followed by one of the next four."""
    generator = torch.Generator().manual_seed(step)
    steps = torch.randint(1, 5, (rows, context + 1), generator=generator)
    start = torch.randint(SYMBOLS, (rows, 1), generator=generator)
    return (start + steps.cumsum(1)) % SYMBOLS


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(
    activations: str,
    gradients: str,
    steps: int,
    layers: int = 4,
    width: int = 64,
    context: int = 32,
    controller: str | None = None,
) -> tuple[list[float], dict[str, object]]:
    """Returns the losses, which only the last rank has, and statistics of the communication."""
    rank, count = dist.get_rank(), dist.get_world_size()
    module = stage_of(rank, count, layers, width, context)
    stage = PipelineStage(module, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_of)
    handle = gradwire.attach_pipeline(schedule, activations, gradients, controller=controller)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens = tokens_of(step, 16, context)
        optimizer.zero_grad()
        found: list[Tensor] = []
        if stage.is_first:
            schedule.step(tokens[:, :-1])
        elif stage.is_last:
            schedule.step(target=tokens[:, 1:], losses=found)
        else:
            schedule.step()
        optimizer.step()
        losses += [float(torch.stack(found).detach().mean())] if found else []
    stats = handle.stats()
    handle.detach()
    return losses, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--activations", default="int4")
    parser.add_argument("--gradients", default="int8")
    parser.add_argument("--controller", default=None, help="gravac")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=32)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    sizes = args.layers, args.width, args.context
    losses, stats = train(args.activations, args.gradients, args.steps, *sizes, args.controller)
    if losses:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {stats['ratio']:.1f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
