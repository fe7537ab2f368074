"""Per-parameter policies: patterns of parameter names, each with a method of its own.

As a string `"*.embed*: int4; *.norm*: none; default: powersgd:rank=4"`, in which patterns may have
quotes, or as a mapping from pattern to method. A method may set its own memory and exchange:
`topk:ratio=0.01 @ memory=none, exchange=gather`. The first pattern that matches a name counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from gradwire.base import Compressor, Memory
from gradwire.errors import ConfigError
from gradwire.options import read_options
from gradwire.spec import (
    POLICY_DEFAULT,
    ExchangeConfig,
    compressor_of,
    exchange_of,
    format_spec,
    is_policy_text,
    memory_of,
)

OPTIONS = ("memory", "exchange")
"""What a policy may set beside its method."""


@dataclass(frozen=True)
class Policy:
    """The method of the parameters that match a pattern; None leaves memory or exchange open."""

    pattern: str
    compressor: Compressor
    memory: Memory | None = None
    exchange: ExchangeConfig | None = None

    def __str__(self) -> str:
        own = {"memory": "" if self.memory is None else format_spec(self.memory)}
        own["exchange"] = "" if self.exchange is None else str(self.exchange)
        # Brackets keep the commas of a setting apart from those between settings.
        texts = [f"{k}=({v})" if "," in v else f"{k}={v}" for k, v in own.items() if v]
        options = f" @ {', '.join(texts)}" if texts else ""
        quoted = self.pattern if self.pattern == POLICY_DEFAULT else f'"{self.pattern}"'
        return f"{quoted}: {format_spec(self.compressor)}{options}"


@dataclass(frozen=True)
class Policies:
    """Methods by pattern of parameter name, in order; a pattern of "default" comes last."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        patterns = [policy.pattern for policy in self.policies]
        if not patterns:
            raise ConfigError("policies: expected at least one pattern with its method, got none")
        if "" in patterns:
            raise ConfigError(f"policies: a pattern must not be empty, got {patterns}")
        twice = sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})
        if twice:
            raise ConfigError(f"policies: {twice[0]!r} is given twice")
        if POLICY_DEFAULT in patterns[:-1]:
            raise ConfigError(
                "policies: default must come last, since the first match counts, got "
                f"{patterns[-1]!r} after it"
            )

    def __str__(self) -> str:
        return "; ".join(map(str, self.policies))

    def assign(self, names: Iterable[str]) -> list[tuple[Policy, list[str]]]:
        """Returns the policies in order, each with the names that it is for.

        Raises ConfigError if a pattern or a name is left over.
        """
        found: dict[str, list[str]] = {policy.pattern: [] for policy in self.policies}
        some = list(names)
        for name in some:
            policy = self._match(name)
            if policy is None:
                raise ConfigError(
                    f"policies: parameter {name!r} matches no pattern; add {POLICY_DEFAULT!r}, "
                    "with the method of all other parameters"
                )
            found[policy.pattern].append(name)
        for policy in self.policies:
            if not found[policy.pattern] and policy.pattern != POLICY_DEFAULT:
                raise ConfigError(self._unmatched(policy, some))
        return [(policy, found[policy.pattern]) for policy in self.policies]

    def restricted(self, names: Iterable[str]) -> "Policies":
        """Returns the policies of some parameters, without patterns that match none of them."""
        matched = {id(self._match(name)) for name in names}
        return Policies(tuple(policy for policy in self.policies if id(policy) in matched))

    def _match(self, name: str) -> Policy | None:
        for policy in self.policies:
            if policy.pattern == POLICY_DEFAULT or fnmatchcase(name, policy.pattern):
                return policy
        return None

    def _unmatched(self, policy: Policy, names: list[str]) -> str:
        earlier = [name for name in names if fnmatchcase(name, policy.pattern)]
        if earlier:
            first = self._match(earlier[0])
            assert first is not None
            return (
                f"policies: all parameters of pattern {policy.pattern!r}, such as {earlier[0]!r}, "
                f"match {first.pattern!r} before it; the first match counts"
            )
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        return f"policies: no parameter matches {policy.pattern!r}; there are {shown}"


MethodSpec: TypeAlias = Compressor | str | Policies | Mapping[str, object]
"""A method for all parameters, or policies: as an object, as text, or as a mapping."""


def find_policies(given: object) -> Policies | None:
    """Returns policies given as such, as text or as a mapping; None if it is a single method."""
    if isinstance(given, Policies):
        return given
    if isinstance(given, Mapping):
        return Policies(tuple(_of_item(pattern, value) for pattern, value in given.items()))
    if isinstance(given, str) and is_policy_text(given):
        return Policies(tuple(map(_of_text, filter(str.strip, given.split(";")))))
    return None


def check_method(given: MethodSpec) -> None:
    """Raises ConfigError for what is known to be wrong of a method without parameters."""
    if find_policies(given) is None:
        compressor_of(given)  # type: ignore[arg-type]


def _of_text(text: str) -> Policy:
    """Parses one policy, such as "*.embed*: int4 @ memory=none"."""
    stripped = text.strip()
    quote = stripped[0]
    if quote in "\"'":
        pattern, _, rest = stripped[1:].partition(quote)
        head, colon, method = rest.partition(":")
        if head.strip():
            raise ConfigError(f"policies: expected a colon after the quotes in {stripped!r}")
    else:
        pattern, colon, method = (part.strip() for part in stripped.partition(":"))
    if not colon or not method.strip():
        raise ConfigError(f"policies: expected 'pattern: method', got {stripped!r}")
    spec, at, options = method.partition("@")
    if at and not options.strip():
        raise ConfigError(f"policies: nothing after the @ in {stripped!r}")
    return _policy(pattern, spec.strip(), read_options(options))


def _of_item(pattern: object, value: object) -> Policy:
    """Reads one entry of a mapping: a method, or a mapping with `method` and options."""
    if not isinstance(pattern, str):
        raise ConfigError(f"policies: a pattern must be a string, got {pattern!r}")
    if isinstance(value, Mapping):
        options = {str(key): option for key, option in value.items()}
        if "method" not in options:
            raise ConfigError(f"policies: {pattern!r} has no 'method', got {sorted(options)}")
        return _policy(pattern, options.pop("method"), options)
    if isinstance(value, str):
        spec, _, texts = value.partition("@")
        return _policy(pattern, spec.strip(), read_options(texts))
    return _policy(pattern, value, {})


def _policy(pattern: str, method: object, options: Mapping[str, object]) -> Policy:
    try:
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            raise ConfigError(f"unknown option {unknown}, expected {[*OPTIONS]}")
        # Both check the type of what they are given.
        policy = Policy(pattern, compressor_of(method))  # type: ignore[arg-type]
        if "memory" in options:
            policy = replace(policy, memory=memory_of(options["memory"]))  # type: ignore[arg-type]
        if "exchange" in options and options["exchange"] != "auto":
            exchange = exchange_of(options["exchange"])  # type: ignore[arg-type]
            policy = replace(policy, exchange=exchange)
    except ConfigError as error:
        raise policy_error(pattern, error) from None
    return policy


def policy_error(pattern: str, error: ConfigError) -> ConfigError:
    """Returns an error about the method of a pattern, which names the pattern."""
    return ConfigError(f"policy {pattern!r}: {error}")
