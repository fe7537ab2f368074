"""What can go wrong, by whose fault: the settings, the bytes, a peer, or the installation."""


class LaconicError(Exception):
    """Base of every error that Laconic raises on purpose."""


class ConfigError(LaconicError, ValueError):
    """A setting cannot work; the message names the thing, the rule and the value."""


class WireError(LaconicError):
    """A message does not have the form that both sides agreed on; the gradient is untouched."""


class PeerError(LaconicError, RuntimeError):
    """Another rank is gone or out of step."""


class NonFiniteError(LaconicError, ArithmeticError):
    """A gradient is infinite or NaN on some rank, and `nan_policy="raise"` was asked for."""


class MissingExtra(LaconicError, ImportError):
    """A feature needs a package that is not installed; the message has the install line."""

    def __init__(self, feature: str, package: str, extra: str) -> None:
        ImportError.__init__(
            self, f"{feature} needs {package}: pip install 'laconic[{extra}]'", name=package
        )
