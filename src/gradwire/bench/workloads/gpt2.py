"""GPT-2 (Radford et al. 2019): random tokens, or the BPE tokens of a text such as Gutenberg's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim import AdamW, Optimizer

from gradwire.bench.datasets.text import Text, synthetic_words
from gradwire.bench.datasets.tokens import GUTENBERG, read_tokens
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads._transformer import Block, WindowWorkload
from gradwire.bench.workloads.base import Metric
from gradwire.errors import ConfigError

_INITIAL = 0.02
_WEIGHT_DECAY = 0.1
_PADDED_TO = 64
"""Matrices whose sides are multiples of this are fast on GPUs."""
_RANDOM_TOKENS = 2**16


class _Shape(NamedTuple):
    layers: int
    width: int
    heads: int


_SHAPES: Mapping[str, _Shape] = {
    "124": _Shape(layers=12, width=768, heads=12),
    "60": _Shape(layers=11, width=512, heads=8),
    "30": _Shape(layers=6, width=384, heads=6),
    "tiny": _Shape(layers=1, width=16, heads=2),
}


@dataclass(frozen=True)
class Gpt2(WindowWorkload):
    """GPT-2 with tied embedding and output; `size` is in millions of parameters.

    | size | layers | width | heads | parameters |
    | --- | --- | --- | --- | --- |
    | 124 | 12 | 768 | 12 | 124,082,688 |
    | 60 | 11 | 512 | 8 | 60,695,040 |
    | 30 | 6 | 384 | 6 | 30,160,896 |

    The numbers hold for a context of 512, and for a vocabulary of 50,257 tokens, padded to 50,304.
    Without a data folder the tokens are random, which is enough for step times. With one, they are
    BPE tokens of the text in it, cached in the folder `cache` if that is set.
    """

    batch_size: int = 8
    context: int = 512
    size: Literal["124", "60", "30", "tiny"] = "124"
    vocabulary: int = 50_257
    dropout: float = 0.0
    learning_rate: float = 0.0006
    clip_norm: float = 1.0
    bf16: bool = False
    """True if the model runs under bfloat16 autocast; parameters and gradients stay float32."""
    cache: str = ""
    metric: ClassVar = Metric("perplexity", "lower")
    source: ClassVar = GUTENBERG
    tiny: ClassVar = "synthetic=true,size=tiny,context=16,vocabulary=60,learning_rate=0.02"

    @property
    def title(self) -> str:
        size = "tiny" if self.size == "tiny" else f"{self.size} M"
        return f"GPT-2 ({size}) on {'BPE tokens' if self.data else 'random tokens'}"

    def build(self) -> nn.Module:
        return _Gpt2(self)

    def optimiser(self, model: nn.Module) -> Optimizer:
        """Returns AdamW that decays matrices only, not biases and gains."""
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.cosine(progress, warm=0.05)

    def text(self) -> Text:
        if self.data is None and self.cache:
            raise ConfigError(f"gpt2: cache is for tokens of a data folder, got {self.cache!r}")
        if self.data is None:
            return Text(*synthetic_words(self.vocabulary, self.device, _RANDOM_TOKENS))
        folder = Path(self.cache) if self.cache else None
        return read_tokens(self.data, self.vocabulary, folder, self.device)

    def metric_of(self, loss: float) -> float:
        # exp(700) is near the largest float.
        return math.exp(loss) if loss < 700 else math.inf


class _Gpt2(nn.Module):
    def __init__(self, sizes: Gpt2) -> None:
        nn.Module.__init__(self)
        layers, width, heads = _SHAPES[sizes.size]
        padded = -(-sizes.vocabulary // _PADDED_TO) * _PADDED_TO
        self.bf16 = sizes.bf16
        self.tokens = nn.Embedding(padded, width)
        self.places = nn.Embedding(sizes.context, width)
        self.drop = nn.Dropout(sizes.dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, sizes.dropout, gelu_form="tanh") for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Draws weights as the paper does; those that add to the residual stream are smaller."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                adds = name.endswith(("attended.weight", "narrow.weight"))
                std = _INITIAL / (2 * layers) ** 0.5 if adds else _INITIAL
                nn.init.normal_(parameter, std=std)

    def forward(self, text: Tensor) -> Tensor:
        with torch.autocast(text.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.drop(self.tokens(text) + self.places.weight[: text.shape[1]])
            logits = linear(self.norm(self.blocks(x)), self.tokens.weight)
        return logits.float()
