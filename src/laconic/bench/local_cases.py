"""Methods that talk rarely, as the studies have them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from torch import nn
from torch.optim import Optimizer

from laconic.local import CSER, DiLoCo, QsparseLocalSGD, Seat, SparseLoCo
from laconic.local.steps import LocalSteps

Method: TypeAlias = Callable[[nn.Module, Optimizer, Seat], LocalSteps]
"""A method around one worker's optimiser."""

PREFIX = "local "


class LocalCase(NamedTuple):
    method: Method
    flat: bool = False
    """Whether the model's parameters lie in vectors: for those who talk at every step."""


def cser_cases(
    ratio: int, updates: int, errors: int, gap: int, qsparse: int
) -> dict[str, LocalCase]:
    """CSER, error feedback at every step, and Qsparse, all at the same overall ratio."""

    def blocks(ratio: int) -> str:
        return f"grbs:ratio={1 / ratio!r},block=256"

    def cser(model: nn.Module, optimiser: Optimizer, seat: Seat) -> LocalSteps:
        told = blocks(updates), blocks(errors)
        return CSER(
            model, optimiser, *told, sync_every=gap, process_group=seat, nan_policy="ignore"
        )

    return {
        f"cser-{ratio}": LocalCase(cser, flat=True),
        f"ef-{ratio}": LocalCase(qsparse_method(blocks(ratio), 1), flat=True),
        f"qsparse-{ratio}": LocalCase(qsparse_method(blocks(qsparse), 8), flat=True),
    }


def qsparse_method(spec: str, sync_every: int) -> Method:
    return lambda model, optimiser, seat: QsparseLocalSGD(
        model, optimiser, spec, sync_every=sync_every, process_group=seat, nan_policy="ignore"
    )


CASES: Mapping[str, LocalCase] = {
    "dense": LocalCase(qsparse_method("none", 1), flat=True),
    "topk": LocalCase(qsparse_method("topk:ratio=0.01,values=fp32", 1)),
    "qtopk": LocalCase(qsparse_method("topk:ratio=0.01 | qsgd:bits=4", 8)),
    "signtopk": LocalCase(qsparse_method("topk:ratio=0.01 | sign", 8)),
    **cser_cases(32, updates=64, errors=4, gap=16, qsparse=4),
    **cser_cases(256, updates=512, errors=16, gap=32, qsparse=32),
    **cser_cases(1024, updates=2048, errors=8, gap=256, qsparse=128),
    "diloco": LocalCase(
        lambda m, o, s: DiLoCo(m, o, sync_every=30, process_group=s, nan_policy="ignore")
    ),
    "sparseloco": LocalCase(
        lambda m, o, s: SparseLoCo(m, o, sync_every=30, process_group=s, nan_policy="ignore")
    ),
}
"""By name; a study calls them `local NAME`."""
