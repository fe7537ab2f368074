"""Gradwire: communication-efficient distributed training for PyTorch.

Every name is imported when it is first used: torch takes seconds to import, which the command line
must not wait for when it prints its help.
"""

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from gradwire.version import VERSION

if TYPE_CHECKING:
    from gradwire import decentralized, elastic, local, optim
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
    from gradwire.integrations.pipeline import Stages, attach_pipeline
    from gradwire.integrations.reducer import Reducer
    from gradwire.integrations.settings import Settings
    from gradwire.perfmodel.advise import Advice, advise
    from gradwire.perfmodel.doctor import Diagnosis, doctor
    from gradwire.plugins import register
    from gradwire.policies import Policies, Policy
    from gradwire.simulation import Simulation, simulate
    from gradwire.spec import format_spec, methods, parse
    from gradwire.stages.gravac import StageGraVAC
    from gradwire.stages.samples import SampleMemory

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
    "Diagnosis",
    "GraVAC",
    "GradwireError",
    "Link",
    "MissingExtra",
    "NonFiniteError",
    "PeerError",
    "Policies",
    "Policy",
    "Reducer",
    "SampleMemory",
    "Schedule",
    "Settings",
    "Shards",
    "Simulation",
    "StageGraVAC",
    "Stages",
    "WireError",
    "advise",
    "attach",
    "attach_fsdp",
    "attach_pipeline",
    "comm_hook",
    "decentralized",
    "doctor",
    "elastic",
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

_MODULES = {
    "Accordion": "gradwire.control.accordion",
    "Advice": "gradwire.perfmodel.advise",
    "Auto": "gradwire.auto.auto",
    "Autopilot": "gradwire.control.autopilot",
    "CheckpointError": "gradwire.errors",
    "Checkpoints": "gradwire.checkpoint.files",
    "Compressor": "gradwire.base",
    "ConfigError": "gradwire.errors",
    "Diagnosis": "gradwire.perfmodel.doctor",
    "GraVAC": "gradwire.control.gravac",
    "GradwireError": "gradwire.errors",
    "Link": "gradwire.integrations.ddp",
    "MissingExtra": "gradwire.errors",
    "NonFiniteError": "gradwire.errors",
    "PeerError": "gradwire.errors",
    "Policies": "gradwire.policies",
    "Policy": "gradwire.policies",
    "Reducer": "gradwire.integrations.reducer",
    "SampleMemory": "gradwire.stages.samples",
    "Schedule": "gradwire.control.schedule",
    "Settings": "gradwire.integrations.settings",
    "Shards": "gradwire.integrations.fsdp",
    "Simulation": "gradwire.simulation",
    "StageGraVAC": "gradwire.stages.gravac",
    "Stages": "gradwire.integrations.pipeline",
    "WireError": "gradwire.errors",
    "advise": "gradwire.perfmodel.advise",
    "attach": "gradwire.integrations.ddp",
    "attach_fsdp": "gradwire.integrations.fsdp",
    "attach_pipeline": "gradwire.integrations.pipeline",
    "comm_hook": "gradwire.integrations.comm_hook",
    "doctor": "gradwire.perfmodel.doctor",
    "format_spec": "gradwire.spec",
    "from_grace": "gradwire.integrations.grace",
    "handle_of": "gradwire.integrations.optimizer",
    "methods": "gradwire.spec",
    "parse": "gradwire.spec",
    "reduce_gradients": "gradwire.integrations.optimizer",
    "register": "gradwire.plugins",
    "simulate": "gradwire.simulation",
    "wrap_optimizer": "gradwire.integrations.optimizer",
}
"""The modules of the names in `__all__`; those that are not here are modules themselves."""


def __getattr__(name: str) -> "type[Compressor] | ModuleType":
    """Imports a public name, a module, or a class of the catalogue (`gradwire.TopK`)."""
    value: type[Compressor] | ModuleType
    if name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    elif not name.startswith("_") and find_spec(f"gradwire.{name}") is not None:
        # Those that need an extra, such as `gradwire.keras`, name it in their error.
        value = import_module(f"gradwire.{name}")
    else:
        value = _class_of_the_catalogue(name)
    globals()[name] = value
    return value


def _class_of_the_catalogue(name: str) -> type["Compressor"]:
    for cls in _catalogue():
        if cls.__name__ == name:
            return cls
    known = {known.lower(): known for known in __dir__() if not known.startswith("_")}
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {known[close[0]]!r}?" if close else ""
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}{hint}")


def _catalogue() -> list[type["Compressor"]]:
    from gradwire.spec import compressor_classes

    return list(compressor_classes().values())


def __dir__() -> list[str]:
    """Lists public names and classes of the catalogue, without `keras`, which may not import."""
    private = {"TYPE_CHECKING", "ModuleType", "find_spec", "get_close_matches"}
    return sorted({*globals(), *__all__, *(cls.__name__ for cls in _catalogue())} - private)
