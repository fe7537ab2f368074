"""Gradwire: communication-efficient distributed training for PyTorch."""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from gradwire import local, optim
from gradwire.auto.auto import Auto
from gradwire.base import Compressor
from gradwire.checkpoint.files import Checkpoints
from gradwire.control.accordion import Accordion
from gradwire.control.autopilot import Autopilot
from gradwire.control.gravac import GraVAC
from gradwire.control.schedule import Schedule
from gradwire.errors import (
    CheckpointError,
    ConfigError,
    GradwireError,
    MissingExtra,
    NonFiniteError,
    PeerError,
    WireError,
)
from gradwire.integrations.comm_hook import comm_hook
from gradwire.integrations.ddp import Link, attach
from gradwire.integrations.fsdp import Shards, attach_fsdp
from gradwire.integrations.grace import from_grace
from gradwire.integrations.optimizer import handle_of, reduce_gradients, wrap_optimizer
from gradwire.integrations.reducer import Reducer
from gradwire.integrations.settings import Settings
from gradwire.perfmodel.advise import Advice, advise
from gradwire.plugins import register
from gradwire.policies import Policies, Policy
from gradwire.simulate import Simulation, simulate
from gradwire.spec import compressor_classes, format_spec, methods, parse
from gradwire.version import VERSION

__version__ = VERSION

__all__ = [
    "Accordion",
    "Advice",
    "Auto",
    "Autopilot",
    "CheckpointError",
    "Checkpoints",
    "Compressor",
    "ConfigError",
    "GraVAC",
    "GradwireError",
    "Link",
    "MissingExtra",
    "NonFiniteError",
    "PeerError",
    "Policies",
    "Policy",
    "Reducer",
    "Schedule",
    "Settings",
    "Shards",
    "Simulation",
    "WireError",
    "advise",
    "attach",
    "attach_fsdp",
    "comm_hook",
    "format_spec",
    "from_grace",
    "handle_of",
    "local",
    "methods",
    "optim",
    "parse",
    "reduce_gradients",
    "register",
    "simulate",
    "wrap_optimizer",
]


def __getattr__(name: str) -> type[Compressor] | ModuleType:
    """Returns classes of the catalogue (`gradwire.TopK`), and modules that few programs need.

    Those are `gradwire.testing`, and `gradwire.keras`, which needs an extra.
    """
    if name in ("keras", "testing"):
        return import_module(f"gradwire.{name}")
    for cls in compressor_classes().values():
        if cls.__name__ == name:
            return cls
    known = {known.lower(): known for known in __dir__() if not known.startswith("_")}
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {known[close[0]]!r}?" if close else ""
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """Lists public names and classes of the catalogue, without `keras`, which may not import."""
    classes = (cls.__name__ for cls in compressor_classes().values())
    return sorted({*globals(), *classes})
