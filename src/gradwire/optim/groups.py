"""Checks of the model and the parameter groups of a compressed optimiser."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.checks import check_number
from gradwire.errors import ConfigError


def check_model(kind: str, model: object) -> None:
    """Raises ConfigError unless the model is a DDP object of one device and one dtype."""
    if not isinstance(model, DDP):
        raise ConfigError(
            f"{kind}: expected a DistributedDataParallel, got {type(model).__name__}; updates are "
            "exchanged in its buckets, so give the model, not its parameters (groups go to params=)"
        )
    trained = [p for p in model.module.parameters() if p.requires_grad]
    devices = sorted({str(p.device) for p in trained})
    if len(devices) > 1:
        raise ConfigError(f"{kind}: parameters must be on one device, got {devices}")
    dtypes = sorted({str(p.dtype) for p in trained})
    if len(dtypes) > 1:
        raise ConfigError(
            f"{kind}: parameters must have one dtype, got {dtypes}; use autocast for some layers"
        )


def check_groups(
    kind: str, groups: Sequence[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    """Raises ConfigError unless the groups hold just the parameters that DDP trains."""
    given = {p for group in groups for p in group["params"]}
    unknown = [tuple(p.shape) for p in given if p not in names]
    if unknown:
        raise ConfigError(f"{kind}: parameters of shape {unknown} are not trained by this model")
    missing = [name for parameter, name in names.items() if parameter not in given]
    if missing:
        raise ConfigError(
            f"{kind}: no group has {missing}; DDP exchanges them, so freeze them before DDP is made"
        )
    for group in groups:
        for key in ("lr", "weight_decay"):
            if isinstance(group[key], Tensor):
                continue
            check_number(kind, key, group[key])
            if group[key] < 0:
                raise ConfigError(f"{kind}: {key} must be at least 0, got {group[key]!r}")
        if group.get("maximize"):
            raise ConfigError(f"{kind}: maximize is not supported here; negate the loss")


def read_betas(kind: str, betas: object) -> tuple[float, float]:
    """Returns the two betas; raises ConfigError unless they are numbers in [0, 1)."""
    pair = tuple(betas) if isinstance(betas, tuple | list) else ()
    for beta in pair:
        check_number(kind, "betas", beta)
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise ConfigError(f"{kind}: betas must be two numbers in [0, 1), got {betas!r}")
    return float(pair[0]), float(pair[1])


def check_at_least_zero(kind: str, key: str, value: object) -> None:
    """Raises ConfigError unless the value is a finite number of at least 0."""
    check_number(kind, key, value)
    assert isinstance(value, int | float)
    if value < 0:
        raise ConfigError(f"{kind}: {key} must be at least 0, got {value!r}")
