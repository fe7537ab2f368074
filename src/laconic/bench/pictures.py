"""What all workloads on CIFAR-10 share: data, its variations, loss, optimiser and accuracy.

Images are flipped and shifted anew in every epoch: cut from a frame of 4 black pixels (He et al.
2015). All of that happens on the device, for a whole batch in one go.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

from laconic.bench.data.cifar10 import CIFAR10, SIDE, Pictures, read_cifar10, synthetic_cifar10
from laconic.bench.draw import deal, numbers_below, shuffled
from laconic.bench.workload import Batch, Evaluation, Metric, Workload, evaluating

_FRAME = 4
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_AT_ONCE = 500


class Epoch(NamedTuple):
    """The order of the training images, and what is done to each of them."""

    order: Tensor
    flip: Tensor
    top: Tensor
    left: Tensor


@dataclass(frozen=True)
class PictureWorkload(Workload):
    """A classifier of CIFAR-10; the learning rate is that of 8 workers with 64 images each."""

    batch_size: int = 64
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    metric: ClassVar = Metric("accuracy", "higher")
    source: ClassVar = CIFAR10

    def optimiser(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=0.9,
            weight_decay=self.weight_decay,
            nesterov=True,
        )

    def examples(self) -> int:
        return len(self._pictures().training.classes)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        images = self._pictures().training
        count = len(images.classes)
        number, start, stop = deal(count, self.batch_size, step, rank, workers)
        epoch = Epoch(*(item[start:stop] for item in _epoch(count, seed, number, self.device)))
        return Batch(_varied(images.pixels[epoch.order], epoch), images.classes[epoch.order])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """On all test images, as they are."""
        images = self._pictures().held_out
        loss = right = torch.zeros((), dtype=torch.float64, device=self.device)
        with evaluating(model):
            for pixels, classes in zip(*(item.split(_AT_ONCE) for item in images), strict=True):
                output = model(_scaled(pixels))
                loss = loss + self.loss(output, classes) * len(classes)
                right = right + (output.argmax(1) == classes).sum()
        count = len(images.classes)
        return Evaluation(float(loss) / count, self.metric.name, float(right) / count)

    def _pictures(self) -> Pictures:
        if self.synthetic:
            return synthetic_cifar10(self.device)
        return read_cifar10(self.data, self.device)


# Ranks of one step may be on both sides of an epoch's end.
@lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int, device: str) -> Epoch:
    shifts = 2 * _FRAME + 1
    return Epoch(
        shuffled(count, device, seed, epoch, 0),
        numbers_below(2, count, device, seed, epoch, 1).bool(),
        numbers_below(shifts, count, device, seed, epoch, 2),
        numbers_below(shifts, count, device, seed, epoch, 3),
    )


def _varied(pixels: Tensor, epoch: Epoch) -> Tensor:
    framed = pad(pixels, [_FRAME] * 4)
    place = torch.arange(SIDE, device=pixels.device)
    rows = epoch.top[:, None] + place  # [images, 32]
    columns = epoch.left[:, None] + torch.where(epoch.flip[:, None], place.flip(0), place)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None, None]
    channel = torch.arange(3, device=pixels.device)[:, None, None]
    return _scaled(framed[image, channel, rows[:, None, :, None], columns[:, None, None, :]])


def _scaled(pixels: Tensor) -> Tensor:
    """Mean 0 and variance 1 in every channel, over all images."""
    mean = torch.tensor(_MEAN, device=pixels.device).view(3, 1, 1)
    deviation = torch.tensor(_DEVIATION, device=pixels.device).view(3, 1, 1)
    return (pixels.float() / 255 - mean) / deviation
