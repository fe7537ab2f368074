"""A small U-Net (Ronneberger et al. 2015) that segments defects of textures, DAGM 2007 class 1."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, max_pool2d
from torch.optim import Adam, Optimizer

from gradwire.bench.datasets.dagm import DAGM, TextureSplits, read_dagm, synthetic_dagm
from gradwire.bench.datasets.sampling import batch_slice, random_integers, random_permutation
from gradwire.bench.workloads import _schedules as schedules
from gradwire.bench.workloads.base import Batch, Evaluation, Metric, Workload, evaluating

_EVAL_BATCH = 10


class Epoch(NamedTuple):
    """The order of the images in an epoch, and which are flipped vertically or horizontally."""

    order: Tensor
    flip_rows: Tensor
    flip_columns: Tensor


@dataclass(frozen=True)
class UNet(Workload):
    """Classifies each pixel as defect or not; 1.9 million parameters by default."""

    batch_size: int = 4
    width: int = 16
    depth: int = 4
    learning_rate: float = 0.001
    metric: ClassVar = Metric("IoU", "higher")
    source: ClassVar = DAGM
    tiny: ClassVar = "synthetic=true,width=4,depth=2,batch_size=4,learning_rate=0.01"

    @property
    def title(self) -> str:
        return "U-Net on DAGM 2007 class 1"

    def build(self) -> nn.Module:
        return _UNet(self.width, self.depth)

    def optimiser(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.learning_rate)

    def learning_rate_at(self, progress: float) -> float:
        return self.learning_rate * schedules.plateau(progress, end=0.5)

    def examples(self) -> int:
        return len(self._splits().training.pixels)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        pixels, masks = self._splits().training
        number, start, stop = batch_slice(len(pixels), self.batch_size, step, rank, workers)
        epoch = Epoch(
            *(item[start:stop] for item in _epoch(len(pixels), seed, number, self.device))
        )
        inputs, targets = pixels[epoch.order], masks[epoch.order]
        return Batch(_normalized(_flipped(inputs, epoch)), _flipped(targets, epoch).float())

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the cross entropy of the pixels plus 1 - Dice overlap of the masks."""
        probability = output.sigmoid()
        both = 2 * (probability * targets).sum() + 1
        overlap = both / (probability.sum() + targets.sum() + 1)
        return binary_cross_entropy_with_logits(output, targets) + 1 - overlap

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluates intersection over union of the masks, over all held-out images."""
        pixels, masks = self._splits().held_out
        loss = both = either = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for inputs, targets in zip(
                pixels.split(_EVAL_BATCH), masks.split(_EVAL_BATCH), strict=True
            ):
                output = model(_normalized(inputs))
                loss = loss + self.loss(output, targets.float()) * len(inputs)
                found, true = output > 0, targets > 0
                both, either = both + (found & true).sum(), either + (found | true).sum()
        return Evaluation(float(loss) / len(pixels), self.metric.name, float(both / either))

    def _splits(self) -> TextureSplits:
        return synthetic_dagm(self.device) if self.synthetic else read_dagm(self.data, self.device)


class _UNet(nn.Module):
    """Halves the image `depth` times and doubles it again, with a skip connection at every size."""

    def __init__(self, width: int, depth: int) -> None:
        nn.Module.__init__(self)
        widths = [width << level for level in range(depth + 1)]
        steps = list(pairwise(widths))
        self.start = _double(1, width)
        self.down = nn.ModuleList(_double(above, below) for above, below in steps)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in reversed(steps)
        )
        self.join = nn.ModuleList(_double(2 * above, above) for above, _ in reversed(steps))
        self.output = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.start(x)]
        for down in self.down:
            levels.append(down(max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        logits: Tensor = self.output(x)
        return logits


def _double(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        convolution = nn.Conv2d(before, outputs, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


@lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int, device: str) -> Epoch:
    flips = (random_integers(2, count, device, seed, epoch, axis).bool() for axis in (1, 2))
    return Epoch(random_permutation(count, device, seed, epoch, 0), *flips)


def _flipped(images: Tensor, epoch: Epoch) -> Tensor:
    for axis, flip in ((2, epoch.flip_rows), (3, epoch.flip_columns)):
        images = torch.where(flip[:, None, None, None], images.flip(axis), images)
    return images


def _normalized(pixels: Tensor) -> Tensor:
    return pixels.float() / 64 - 1
