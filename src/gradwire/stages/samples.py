"""Sample memory: the last activation of each training sample, at both ends of a boundary (AQ-SGD).

The sender encodes the difference of an activation to the last one of the same sample, and both ends
add the decoded difference to what they keep. As training converges the differences shrink, and the
error with them. Wang et al. 2022, arXiv:2206.01299.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from gradwire.checks import check_whole
from gradwire.errors import ConfigError

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class SampleMemory:
    """Keeps the activations of every sample at both ends of each boundary; forward only.

    A micro-batch with a sample that was not seen before is sent as it is. One activation is kept
    per sample: `max_bytes` bounds what one end keeps, beyond which `samples` raises ConfigError.
    `values` is the number format that is kept.
    """

    max_bytes: int = 1 << 30
    values: str = "fp32"

    def __post_init__(self) -> None:
        check_whole("samples", "max_bytes", self.max_bytes, 1)
        if self.values not in _TYPES:
            raise ConfigError(f"samples: values must be one of {[*_TYPES]}, got {self.values!r}")

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.values]


def memory_of(given: SampleMemory | str | None) -> SampleMemory | None:
    """Returns the memory that `memory=` names or is."""
    if given == "samples":
        return SampleMemory()
    if given is not None and not isinstance(given, SampleMemory):
        raise ConfigError(
            f"attach_pipeline: memory must be 'samples', a SampleMemory or None, got {given!r}; "
            "residuals belong to parameters, and stages exchange none"
        )
    return given


def read_ids(given: object) -> list[int]:
    """Returns the numbers of samples; raises ConfigError unless they are whole numbers."""
    values = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise ConfigError(f"samples: expected a sequence of whole numbers, got {given!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
            raise ConfigError(f"samples: expected whole numbers from 0 to 2^63 - 1, got {value!r}")
    return list(values)


class MicroBatches:
    """The samples of a step by micro-batch, split as torch splits a batch."""

    def __init__(self, ids: Sequence[int], count: int) -> None:
        whole = torch.tensor(ids, dtype=torch.int64)
        self._ids: list[list[int]] = [part.tolist() for part in whole.tensor_split(count)]
        self.digests = [crc32(part.numpy().tobytes()) for part in whole.tensor_split(count)]

    def __getitem__(self, microbatch: int) -> list[int]:
        return self._ids[microbatch]

    def all(self) -> list[list[int]]:
        return self._ids


class KeptSamples:
    """The activations that one end of a boundary keeps, by position in a message and sample."""

    def __init__(self, config: SampleMemory) -> None:
        self._config = config
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._new: list[bool] = []

    def begin_step(self, batches: MicroBatches) -> None:
        """Decides which micro-batches are sent as they are: those with a new sample.

        All are decided at once, since a receiver prepares for some before it has read others.
        """
        known = self.known()
        self._new = [not known.issuperset(ids) for ids in batches.all()]

    def is_new(self, microbatch: int) -> bool:
        return self._new[microbatch]

    def known(self) -> set[int]:
        """Returns the samples that were seen."""
        return set().union(*(kept.keys() for kept in self._kept.values()))

    def rows(self, slot: int, ids: Sequence[int], form: tuple[int, ...]) -> Tensor:
        """Returns what is kept of these samples, as float32, in the shape of the activation."""
        _check_rows(form[0] if form else 0, ids)
        kept = self._kept[slot]
        return torch.stack([kept[number] for number in ids]).to(torch.float32).view(form)

    def keep(self, slot: int, ids: Sequence[int], values: Tensor) -> Tensor:
        """Keeps an activation of each sample; returns the values as they are kept, as float32."""
        _check_rows(values.shape[0] if values.dim() else 0, ids)
        rounded = values.detach().to(self._config.dtype, copy=True)
        self._kept.setdefault(slot, {}).update(zip(ids, rounded.unbind(0), strict=True))
        return rounded.to(torch.float32)

    def nbytes_with(self, ids: Sequence[int]) -> int:
        """Returns the bytes that are kept once these samples were seen; 0 before the first step."""
        if not self._kept:
            return 0
        samples = len(self.known().union(ids))
        return samples * sum(next(iter(kept.values())).nbytes for kept in self._kept.values())

    def state(self) -> dict[str, object]:
        """Returns the numbers of all samples and their activations, one tensor of each per slot."""
        return {
            str(slot): {
                "ids": torch.tensor(list(kept), dtype=torch.int64),
                "values": torch.stack(list(kept.values())),
            }
            for slot, kept in self._kept.items()
        }

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._kept = {
            int(slot): dict(
                zip(kept["ids"].tolist(), kept["values"].clone().unbind(0), strict=True)
            )
            for slot, kept in saved.items()
        }


def _check_rows(rows: int, ids: Sequence[int]) -> None:
    """Raises ConfigError unless there is one sample per row."""
    if rows != len(ids):
        raise ConfigError(
            f"samples: a micro-batch has {rows} rows and {len(ids)} samples; give one number per "
            "row of the batch"
        )
