"""Whether ranks that should hold the same tensors do: a cheap sum of bits, compared at times."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from laconic.comm.base import Call, Comm
from laconic.errors import PeerError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same(comm: Comm, tensors: Mapping[str, Tensor]) -> None:
    """Raises PeerError on every rank, with names and ranks, unless all hold the same bits.

    One pass over memory and 8 bytes a tensor on the wire. Any single flipped bit is seen; changes
    that cancel out in the sum are not.
    """
    if not tensors:
        return
    lines = differences(comm.answer(digests_call(tensors, comm.size)), tensors)
    if lines:
        raise PeerError("\n".join(["parameters have drifted apart:", *lines]))


def digests_call(tensors: Mapping[str, Tensor], size: int) -> Call:
    """Tells all ranks a sum of bits of each tensor; `differences` takes the answer."""
    own = digests(tensors)
    return Call("gather", [own.view(torch.uint8)], [own.nbytes] * size)


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """A sum of bits of each tensor, as int64."""
    return torch.stack([_digest(tensor) for tensor in tensors.values()])


def differences(answer: Sequence[Tensor], names: Iterable[str]) -> list[str]:
    """A line for every tensor that is not the same everywhere, with the ranks that stand out."""
    told = [row.view(torch.int64).tolist() for row in answer]
    lines = []
    for name, said in zip(names, zip(*told, strict=True), strict=True):
        usual = Counter(said).most_common(1)[0][0]
        odd = [rank for rank, digest in enumerate(said) if digest != usual]
        if odd:
            lines.append(f"  {name}: rank {odd} differ from the others")
    return lines


def _digest(tensor: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.itemsize])
    return words.sum(dtype=torch.int64)
