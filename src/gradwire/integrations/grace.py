"""Converts GRACE's parameter dictionary to our settings; defects of GRACE are corrected and logged.

GRACE: Xu et al. 2021, "GRACE: A compressed communication framework", ICDCS.
"""

import logging
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import NamedTuple, TypedDict

from gradwire.base import Compressor
from gradwire.engine.legality import check_exchange, check_memory
from gradwire.errors import ConfigError
from gradwire.spec import parse, parse_memory

log = logging.getLogger("gradwire")

KEYS = (
    "compressor",
    "memory",
    "communicator",
    "compress_ratio",
    "quantum_num",
    "bucket_size",
    "threshold",
    "momentum",
    "momentum_factor",
    "quantiles",
    "error_bound",
    "lr",
    "gradient_clipping",
    "compress_rank",
    "kernel",
    "world_size",
)
"""Keys that any of GRACE's helpers reads; those that a method does not use are ignored."""


class Method(TypedDict):
    """A method as all integrations take it: `gradwire.attach(model, **method)`."""

    compressor: str
    memory: str
    exchange: str


class GraceParams:
    """A parameter dictionary with GRACE's defaults, and notes on how its meaning changes."""

    def __init__(self, params: Mapping[str, object]) -> None:
        if not isinstance(params, Mapping):
            raise ConfigError(f"from_grace: expected a dictionary of parameters, got {params!r}")
        unknown = sorted(params.keys() - set(KEYS))
        if unknown:
            raise ConfigError(f"from_grace: unknown parameter {unknown}, expected {sorted(KEYS)}")
        self.params = params
        self.notes: list[str] = []

    def number(self, key: str, default: float) -> float:
        value = self.params.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"from_grace: {key} must be a number, got {value!r}")
        return value

    def choice(self, key: str, default: str, known: Mapping[str, object]) -> str:
        value = self.params.get(key, default)
        if value not in known:
            close = get_close_matches(str(value), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"from_grace: no {key} named {value!r}; {hint}")
        return str(value)


def _ratio(grace: GraceParams, name: str, settings: str = "") -> str:
    return f"{name}:ratio={grace.number('compress_ratio', 0.3)}{settings}"


def _qsgd(grace: GraceParams) -> str:
    levels = grace.number("quantum_num", 127)
    bits = min(8, max(2, math.ceil(math.log2(levels + 1)) + 1)) if levels >= 1 else 0
    if bits and levels != 2 ** (bits - 1) - 1:
        grace.notes.append(
            f"quantum_num={levels:g} becomes bits={bits}, which is {2 ** (bits - 1) - 1} levels"
        )
    if "bucket_size" not in grace.params:
        grace.notes.append(
            "qsgd has a norm for every 128 entries; one for a whole tensor drowns it in noise"
        )
    return f"qsgd:bits={bits},bucket={grace.number('bucket_size', 128):g},norm=l2"


def _sketch(grace: GraceParams) -> str:
    quantiles = grace.number("quantiles", 64)
    bits = min(8, max(1, math.ceil(math.log2(quantiles)))) if quantiles >= 1 else 0
    if bits and quantiles != 2**bits:
        grace.notes.append(f"quantiles={quantiles:g} becomes bits={bits}, which is {2**bits} bins")
    return f"sketchml:bits={bits}"


def _inceptionn(grace: GraceParams) -> str:
    wanted = grace.number("error_bound", 2e-10)
    if not wanted > 0:
        raise ConfigError(f"from_grace: error_bound must be positive, got {wanted}")
    bound = 2.0 ** math.floor(math.log10(wanted))
    grace.notes.append(
        f"error_bound={wanted:g} becomes bound={bound:g}: GRACE used a decimal logarithm instead "
        "of a binary one, so this is the bound it applied"
    )
    return f"inceptionn:bound={bound}"


def _efsign(grace: GraceParams) -> str:
    if "lr" in grace.params:
        grace.notes.append(
            "efsign keeps its residual in units of the gradient, lr is not needed; when a schedule "
            "changes the rate, call learning_rate_changed of the link"
        )
    grace.notes.append("efsign is averaged over ranks; GRACE summed it up under PyTorch")
    return "efsign"


def _powersgd(grace: GraceParams) -> str:
    if "momentum" in grace.params or "momentum_factor" in grace.params:
        grace.notes.append("powersgd leaves momentum to the optimiser")
    return f"powersgd:rank={grace.number('compress_rank', 1):g}"


COMPRESSORS: Mapping[str, Callable[[GraceParams], str]] = {
    "none": lambda _: "none",
    "fp16": lambda _: "fp16",
    "u8bit": lambda _: "eightbit",
    "onebit": lambda _: "onebit",
    "signsgd": lambda _: "signsgd",
    "signum": lambda grace: f"signum:beta={grace.number('momentum', 0.9)}",
    "qsgd": _qsgd,
    "natural": lambda _: "natural",
    "terngrad": lambda _: "terngrad:clip=2.5",
    "efsignsgd": _efsign,
    "inceptionn": _inceptionn,
    "randomk": lambda grace: _ratio(grace, "randomk"),
    "topk": lambda grace: _ratio(grace, "topk", ",values=fp32"),
    "threshold": lambda grace: f"threshold:value={grace.number('threshold', 0.01)}",
    "dgc": lambda grace: _ratio(grace, "dgc", ",values=fp32"),
    "adaq": lambda grace: _ratio(grace, "adaq"),
    "adapsparse": lambda grace: _ratio(grace, "wangni"),
    "sketch": _sketch,
    "powersgd": _powersgd,
}


def _momentum(grace: GraceParams) -> str:
    if grace.params.get("gradient_clipping"):
        grace.notes.append(
            "gradient_clipping has no effect in GRACE; here memory momentum:clip=NORM clips"
        )
    return f"momentum:momentum={grace.number('momentum', 0.9)}"


MEMORIES: Mapping[str, Callable[[GraceParams], str]] = {
    "none": lambda _: "none",
    "residual": lambda _: "residual",
    "dgc": _momentum,
    "efsignsgd": lambda _: "residual",
    "powersgd": lambda _: "residual",
}

COMMUNICATORS = {"allreduce": "mean", "allgather": "gather", "broadcast": "gather"}


class Translation(NamedTuple):
    method: Method
    notes: list[str]
    """Differences from GRACE, with reasons."""


def translate(params: Mapping[str, object]) -> Translation:
    """Converts GRACE's parameters to ours, with notes on what changes."""
    grace = GraceParams(params)
    spec = COMPRESSORS[grace.choice("compressor", "none", COMPRESSORS)](grace)
    compressor = parse(spec)
    memory = _memory(grace, spec, compressor)
    exchange = _exchange(grace, compressor, memory)
    if "kernel" in params:
        grace.notes.append(
            "kernel is ignored: kernels are chosen by device, see stats()['backend']"
        )
    return Translation({"compressor": spec, "memory": memory, "exchange": exchange}, grace.notes)


def _memory(grace: GraceParams, spec: str, compressor: Compressor) -> str:
    memory = MEMORIES[grace.choice("memory", "none", MEMORIES)](grace)
    if memory == "none" and spec.startswith("powersgd"):
        grace.notes.append("powersgd goes with memory residual; without, GRACE fails")
        return "residual"
    try:
        check_memory(compressor, parse_memory(memory))
    except ConfigError as error:
        grace.notes.append(f"memory is none: {error}")
        return "none"
    return memory


def _exchange(grace: GraceParams, compressor: Compressor, memory: str) -> str:
    if "communicator" not in grace.params:
        return "auto"
    requested = grace.choice("communicator", "allreduce", COMMUNICATORS)
    if requested == "broadcast":
        grace.notes.append(
            "broadcast becomes gather, which sends the same to all ranks in one collective"
        )
    exchange = COMMUNICATORS[requested]
    if compressor.traits().is_vote and exchange == "gather":
        # 'auto' is gather with a majority vote.
        return "auto"
    try:
        check_exchange(compressor, parse_memory(memory), exchange)
    except ConfigError as error:
        grace.notes.append(f"{requested} becomes 'auto': {error}")
        return "auto"
    return exchange


def from_grace(params: Mapping[str, object]) -> Method:
    """Converts a GRACE parameter dictionary to a method: `gradwire.attach(model, **method)`.

    Unknown keys are errors. Where GRACE's code deviates from its documentation, this follows the
    documentation; each such change is a line in the log.
    """
    method, notes = translate(params)
    for note in notes:
        log.warning("from_grace: %s", note)
    return method
