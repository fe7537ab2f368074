"""Controllers by name: the folder is the registry."""

import laconic.control
from laconic.control.base import Controller
from laconic.errors import ConfigError
from laconic.spec import build_from


def find_controller(given: Controller | str | None) -> Controller | None:
    """The controller that a spec string describes; or the given one itself."""
    if isinstance(given, str):
        # mypy takes an abstract class for none that may be asked for.
        return build_from(laconic.control, Controller, "controller", given)  # type: ignore[type-abstract]
    if given is not None and not isinstance(given, Controller):
        raise ConfigError(f"expected a controller or its spec, got {given!r}")
    return given
