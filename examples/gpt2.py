"""GPT-2 under DistributedDataParallel, with one line that compresses its gradients.

torchrun --nproc-per-node 2 examples/gpt2.py --layers 6 --width 384 --heads 6 --steps 20
torchrun --nproc-per-node 8 examples/gpt2.py --text book.txt --steps 5000
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire

VOCABULARY = 50_304  # 50,257 tokens, padded to a multiple of 64


class GPT2(nn.Module):
    """Predicts the next token; the output layer is the embedding (Radford et al. 2019)."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight
        return linear(self.blocks(x, mask=self.mask, is_causal=True), self.tokens.weight)


def read_tokens(path: str | None, vocabulary: int) -> Tensor:
    """Returns the bytes of a text; without one, tokens of which each follows from the last."""
    if path is not None:
        return torch.tensor(list(Path(path).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 5, (2**16,), generator=generator).cumsum(0) % vocabulary


def windows(
    text: Tensor, count: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns random windows of the text, and the tokens that follow each of theirs."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]


def train(
    method: str,
    steps: int,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    context: int = 512,
    batch: int = 8,
    vocabulary: int = VOCABULARY,
    learning_rate: float = 6e-4,
    text: str | None = None,
    device: str = "cpu",
) -> tuple[list[float], dict[str, object]]:
    """Returns the losses of this rank, and statistics of the communication."""
    torch.manual_seed(0)
    model = DDP(GPT2(layers, width, heads, context, vocabulary).to(device))
    link = gradwire.attach(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    tokens = read_tokens(text, vocabulary)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[Tensor] = []
    for _ in range(steps):
        inputs, targets = (part.to(device) for part in windows(tokens, batch, context, generator))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=device != "cpu"):
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    stats = link.stats()
    link.detach()
    return [float(loss) for loss in losses], stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="powersgd:rank=4")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--text", help="a file whose bytes are the tokens; default: random tokens")
    args = parser.parse_args()
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    losses, stats = train(
        args.method,
        args.steps,
        args.layers,
        args.width,
        args.heads,
        args.context,
        args.batch,
        text=args.text,
        device=device,
    )
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f}, then {losses[-1]:.3f}, "
            f"{stats['ratio']:.0f} times fewer bytes than dense steps"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
