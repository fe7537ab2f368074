"""Names with settings, such as "mlp:batch_size=32", for what is no compressor."""

from typing import NamedTuple

from laconic.errors import ConfigError


class Named(NamedTuple):
    name: str
    texts: dict[str, str]


def read_settings(text: str) -> Named:
    name, _, rest = text.partition(":")
    texts = {}
    for setting in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not value:
            raise ConfigError(f"{name}: expected key=value, got {setting!r} in {text!r}")
        texts[key] = value
    return Named(name.strip(), texts)
