"""What all workloads on CIFAR-10 share: data, its variations, loss, optimiser and accuracy.

Images are flipped and shifted anew in every epoch: cut from a frame of 4 black pixels (He et al.
2015). All of that happens on the device, for a whole batch in one go.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

from laconic.bench.data.cifar10 import CIFAR10, SIDE, Pictures, read_cifar10, synthetic_cifar10
from laconic.bench.data.draw import Deal, deal, joined, numbers_below, shuffled
from laconic.bench.work.flat import Flat
from laconic.bench.work.workload import Batch, Evaluation, Metric, Workload, evaluating

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
    bf16: bool = False
    """Whether the net multiplies in bfloat16; parameters and gradients are float32 in any case."""
    flat: bool = False
    """Whether all weights are one parameter, so that methods choose among layers."""
    metric: ClassVar = Metric("accuracy", "higher")
    source: ClassVar = CIFAR10

    @abstractmethod
    def net(self) -> nn.Module:
        """The model, from torch's global generator."""

    def build(self) -> nn.Module:
        net = _Bf16(self.net()) if self.bf16 else self.net()
        return Flat(net) if self.flat else net

    def optimiser(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=0.9,
            weight_decay=self.weight_decay,
            nesterov=True,
            fused=True if self.device == "cuda" else None,
        )

    def examples(self) -> int:
        return len(self._pictures().training.classes)

    def batch(self, step: int, rank: int, workers: int, seed: int) -> Batch:
        count = len(self._pictures().training.classes)
        return self._dealt(seed, deal(count, self.batch_size, step, rank, workers))

    def batches(self, step: int, workers: int, seed: int) -> Batch:
        """In one go, since workers take what lies side by side in the order of an epoch."""
        count = len(self._pictures().training.classes)
        each = [deal(count, self.batch_size, step, rank, workers) for rank in range(workers)]
        parts = [self._dealt(seed, part) for part in joined(each)]
        return parts[0] if len(parts) == 1 else Batch(*map(torch.cat, zip(*parts, strict=True)))

    def _dealt(self, seed: int, part: Deal) -> Batch:
        images = self._pictures().training
        whole = _epoch(len(images.classes), seed, part.epoch, self.device)
        epoch = Epoch(*(item[part.start : part.stop] for item in whole))
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
    mean, deviation = _colours(pixels.device)
    return (pixels.float() / 255 - mean) / deviation


@cache
def _colours(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device, where putting them takes longer than using them."""
    mean, deviation = torch.tensor([_MEAN, _DEVIATION], device=device).view(2, 3, 1, 1)
    return mean, deviation


class _Bf16(nn.Module):
    """A net that multiplies in bfloat16, and lays out images as the units for that like them."""

    def __init__(self, net: nn.Module) -> None:
        nn.Module.__init__(self)
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            output: Tensor = self.net(images.contiguous(memory_format=torch.channels_last))
        return output.float()
