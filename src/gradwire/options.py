"""Parses nested options: "memory=none, controller=(gravac:low=10,high=1000)".

Commas inside round brackets do not separate options; brackets around a whole value are dropped.
"""

from gradwire.errors import ConfigError


def split_commas(text: str) -> list[str]:
    """Splits text at the commas outside brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    if depth:
        raise ConfigError(f"brackets do not match in {text!r}")
    return [piece.strip() for piece in found]


def read_options(text: str) -> dict[str, str]:
    """Parses the keys and values of "key=value, key=(value,with,commas)"."""
    found: dict[str, str] = {}
    for piece in filter(None, split_commas(text)):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if value.startswith("(") and value.endswith(")"):
            value = value[1:-1].strip()
        if not equals or not value:
            raise ConfigError(f"expected key=value, got {piece!r} in {text.strip()!r}")
        if key in found:
            raise ConfigError(f"{key} is set twice in {text.strip()!r}")
        found[key] = value
    return found
