"""What can go wrong, by whose fault: the settings, the bytes, a peer, or the installation."""


class GradwireError(Exception):
    """Base of every error that Gradwire raises on purpose."""


class ConfigError(GradwireError, ValueError):
    """A setting cannot work; the message names the thing, the rule and the value."""


class WireError(GradwireError):
    """A message does not have the form that both sides agreed on; the gradient is untouched."""


class PeerError(GradwireError, RuntimeError):
    """Another rank is gone or out of step."""


class NonFiniteError(GradwireError, ArithmeticError):
    """A gradient is infinite or NaN on some rank, and `nan_policy="raise"` was asked for."""


class MissingExtra(GradwireError, ImportError):
    """A feature needs a package that is not installed; the message has the install line."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        ImportError.__init__(
            self, f"{feature} needs {package}: pip install 'gradwire[{extra}]'", name=package
        )
