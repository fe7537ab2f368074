"""Counts the backward passes of DDP's own reducer, which a dense plan leaves in place.

DDP allows one communication hook per model, for good, and calls it for every bucket. A plan that
sends gradients as they are needs none: DDP averages them, and the statistics are computed from the
number of passes and the sizes of DDP's buckets. A pass is counted as DDP decides whether gradients
are exchanged: a forward pass with gradients outside `no_sync` prepares it, and the first gradient
that is accumulated begins it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.errors import ConfigError
from gradwire.integrations.backward_pass import BackwardPass, at_end_of_backward
from gradwire.integrations.unused_parameters import UnusedParameters


class PassCount(NamedTuple):
    """Passes that had the same buckets."""

    passes: int
    buckets: list[list[str]]
    """The parameters in each bucket."""
    bucket_bytes: list[int]


class NativePasses:
    """Counts passes from its creation to `stop`. Neither model nor parameters live longer for it.

    DDP rebuilds its buckets once, in the order of the first pass.
    """

    def __init__(
        self,
        model: DDP,
        names: Mapping[nn.Parameter, str],
        backward: BackwardPass,
        unused: UnusedParameters | None,
    ) -> None:
        self._model, self._backward, self._unused = ref(model), backward, unused
        self._names = {id(p): name for p, name in names.items()}
        self._is_prepared = False
        self._counts: dict[bool, PassCount] = {}
        """Passes before and after the buckets were rebuilt."""
        self._passes_unused: Counter[str] = Counter()
        """Passes in which no rank used a parameter."""
        # Only with DDP's options for that may a pass leave out parameters.
        watched = list(names)[-1:] if unused is None else list(names)
        self._hooks = [model.register_forward_hook(PreparePass(self))]
        self._hooks += [p.register_post_accumulate_grad_hook(self._begin) for p in watched]

    def prepare(self, model: DDP) -> None:
        """Notes a forward pass of this model; raises ConfigError if another hook was registered."""
        if model._comm_hooks:
            raise ConfigError(
                "attach: the model's only hook slot was taken by "
                f"{model._comm_hooks[0][0].__qualname__} since; detach before you register a hook"
            )
        if model.require_backward_grad_sync and torch.is_grad_enabled():
            self._is_prepared = True

    def _begin(self, _: Tensor) -> None:
        if self._is_prepared:
            self._is_prepared = False
            self._backward.note_bucket()
            # Queued from a callback, so that it runs after DDP's own, which may raise.
            at_end_of_backward(self._computed)

    def _computed(self) -> None:
        at_end_of_backward(self._end)

    def _end(self) -> None:
        self._backward.end()
        model = self._model()
        if model is None:
            return
        # Read once for each of both, since it allocates zeros for all gradients.
        rebuilt = model._has_rebuilt_buckets
        count = self._counts[rebuilt] if rebuilt in self._counts else self._read_buckets(model)
        self._counts[rebuilt] = count._replace(passes=count.passes + 1)
        if self._unused is not None:
            # That of the pass before, which a GPU has copied to the host meanwhile.
            self._passes_unused.update(self._unused.take())
            self._unused.note_pass(is_map_reduced=True)

    def _read_buckets(self, model: DDP) -> PassCount:
        buckets = model.reducer._get_zeros_like_grad_buckets()
        names = [[self._names[id(p)] for p in bucket.parameters()] for bucket in buckets]
        return PassCount(0, names, [bucket.buffer().nbytes for bucket in buckets])

    def take(self) -> tuple[list[PassCount], Counter[str]]:
        """Returns the passes since the last call, in order, and by parameter those without it."""
        counts = [count for _, count in sorted(self._counts.items()) if count.passes]
        self._counts = {key: c._replace(passes=0) for key, c in self._counts.items()}
        unused, self._passes_unused = self._passes_unused, Counter()
        if self._unused is not None:
            unused.update(self._unused.take())
        return counts, unused

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


class PreparePass:
    """Forward hook of a model with `NativePasses`; does nothing in a copy of the model."""

    def __init__(self, passes: NativePasses | None = None) -> None:
        self._passes = passes

    def __call__(self, model: nn.Module, *_: object) -> None:
        if self._passes is not None:
            assert isinstance(model, DDP)
            self._passes.prepare(model)

    def __reduce__(self) -> tuple[type["PreparePass"], tuple[()]]:
        return PreparePass, ()
