"""Exceptions by cause: the settings, a message, a peer, a gradient, a file, the installation."""


class GradwireError(Exception):
    """Base class of every error that Gradwire raises on purpose."""


class ConfigError(GradwireError, ValueError):
    """A setting is invalid; the message names the setting, the rule and the value."""


class WireError(GradwireError):
    """A message does not have the agreed format; the gradient is untouched."""


class PeerError(GradwireError, RuntimeError):
    """Another rank is lost or out of step."""


class NonFiniteError(GradwireError, ArithmeticError):
    """A gradient is infinite or NaN on some rank, and `nan_policy="raise"` is set."""


class CheckpointError(GradwireError, OSError):
    """A checkpoint file cannot be read, written or moved; the message has the file or the rank."""


class MissingExtra(GradwireError, ImportError):
    """A feature needs a package that is not installed; the message has the install line."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        ImportError.__init__(
            self, f"{feature} needs {package}: pip install 'gradwire[{extra}]'", name=package
        )
