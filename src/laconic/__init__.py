"""Laconic: distributed training that says the most in the fewest bytes."""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from laconic import local
from laconic.checkpoint_files import Checkpoints
from laconic.contract import Compressor
from laconic.control.accordion import Accordion
from laconic.control.autopilot import Autopilot
from laconic.control.gravac import GraVAC
from laconic.control.schedule import Schedule
from laconic.errors import (
    ConfigError,
    LaconicError,
    MissingExtra,
    NonFiniteError,
    PeerError,
    WireError,
)
from laconic.forecast.advice import Advice
from laconic.forecast.advise import advise
from laconic.migrate import from_grace
from laconic.mount.ddp import Link, attach
from laconic.mount.fsdp import Shards, attach_fsdp
from laconic.mount.optimizer import reduce_gradients, wrap_optimizer
from laconic.mount.reducer import Reducer
from laconic.simulate import Simulation, simulate
from laconic.spec import compressor_classes, format_spec, methods, parse
from laconic.version import VERSION

__version__ = VERSION

__all__ = [
    "Accordion",
    "Advice",
    "Autopilot",
    "Checkpoints",
    "Compressor",
    "ConfigError",
    "GraVAC",
    "LaconicError",
    "Link",
    "MissingExtra",
    "NonFiniteError",
    "PeerError",
    "Reducer",
    "Schedule",
    "Shards",
    "Simulation",
    "WireError",
    "advise",
    "attach",
    "attach_fsdp",
    "format_spec",
    "from_grace",
    "local",
    "methods",
    "parse",
    "reduce_gradients",
    "simulate",
    "wrap_optimizer",
]


def __getattr__(name: str) -> type[Compressor] | ModuleType:
    """The classes of the catalogue (`laconic.TopK`), and `laconic.keras`, which needs an extra."""
    if name == "keras":
        return import_module("laconic.keras")
    for cls in compressor_classes().values():
        if cls.__name__ == name:
            return cls
    known = {known.lower(): known for known in __dir__() if not known.startswith("_")}
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {known[close[0]]!r}?" if close else ""
    raise AttributeError(f"module 'laconic' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """What is here and the classes of the catalogue; no `keras`, whose import may fail."""
    classes = (cls.__name__ for cls in compressor_classes().values())
    return sorted({*globals(), *classes})
