"""Parameters that no rank used in a backward pass, for which DDP drops the mean over ranks."""

from collections.abc import Mapping
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError


class UnusedParameters:
    """Finds out which parameters no rank used in the last pass, from the map that DDP reduces.

    With `find_unused_parameters` DDP sums over ranks, per parameter, whether it was used. Its order
    is that of the parameters that require a gradient. With `gradient_as_bucket_view` a gradient
    that exists is the bucket itself, so that its mean is not dropped.
    """

    def __init__(self, model: DDP, names: Mapping[nn.Parameter, str]) -> None:
        # The model must not live longer for its link.
        self._model = ref(model)
        self._names = dict(names)
        self._views = model.gradient_as_bucket_view
        self._in_bucket: set[str] = set()
        self._due = self._reduced = False
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        counts = self._counts()
        if counts is not None and counts.numel() != len(names):
            raise ConfigError(
                f"attach: {len(names)} parameters require a gradient, but {counts.numel()} did "
                "when DDP was made; freeze or unfreeze them before that"
            )

    @property
    def pending(self) -> bool:
        """True if the host would have to wait for the GPU, or DDP has yet to reduce the map."""
        return self._due and (self._copied is not None or not self._reduced)

    def note_pass(self, *, is_map_reduced: bool) -> None:
        """Notes the end of a pass; on a GPU the map starts its way to the host asynchronously."""
        self._due, self._reduced = True, is_map_reduced
        if self._views:
            self._in_bucket = {n for p, n in self._names.items() if p.grad is not None}
        counts = self._counts()
        if is_map_reduced and counts is not None and counts.is_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(counts.device))

    def take(self) -> list[str]:
        """Returns, once, the parameters that the mean of the last pass did not reach."""
        if not self._due:
            return []
        if self._copied is not None:
            self._copied.synchronize()
        counts = self._counts() if self._host is None else self._host
        self._due, self._host, self._copied = False, None, None
        if counts is None:
            return []
        used: list[int] = counts.tolist()
        named = zip(self._names.values(), used, strict=True)
        return [name for name, ranks in named if not ranks and name not in self._in_bucket]

    def _counts(self) -> Tensor | None:
        """Returns by parameter how many ranks used it; None before DDP has noted any."""
        model = self._model()
        counts: Tensor | None = None if model is None else model.reducer._get_local_used_map()
        return counts
