"""Settings: an object or keyword arguments, checked in the same way for all integrations."""

import re
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any, get_type_hints

import pytest

import gradwire
from gradwire.compressors.topk import TopK
from gradwire.control.gravac import GraVAC
from gradwire.errors import ConfigError
from gradwire.integrations.settings import Options, Settings, settings_of

FULL: dict[str, Any] = {
    "memory": "ef21",
    "exchange": "gather",
    "seed": 7,
    "nan_policy": "raise",
    "check_every": 10,
    "checksum": True,
    "controller": "autopilot",
    "cuda_graphs": False,
    "least_bytes": 1000,
    "chunk_bytes": 4096,
}
"""A value other than the default for every option."""

DEFAULTS = {f.name: f.default for f in fields(Settings) if f.name != "compressor"}
NAMES = [*DEFAULTS]


def test_the_options_are_the_fields_of_settings() -> None:
    assert [*get_type_hints(Options)] == NAMES
    hints = get_type_hints(Settings)
    assert get_type_hints(Options) == {name: hints[name] for name in NAMES}
    assert Options.__required_keys__ == frozenset()


def test_every_option_is_tested_with_another_value_than_its_default() -> None:
    assert [*FULL] == NAMES
    assert all(FULL[name] != DEFAULTS[name] for name in NAMES)


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"least_bytes": 0}, FULL], ids=len)
@pytest.mark.parametrize(
    "compressor", ["topk:ratio=0.01", TopK(ratio=0.01)], ids=["spec", "object"]
)
def test_settings_and_keyword_arguments_give_the_same(
    compressor: Any, options: dict[str, Any]
) -> None:
    given = Settings(compressor, **options)
    made = settings_of(compressor, options)
    assert made == given
    assert asdict(made) == {**asdict(given), **options}
    assert settings_of(given, {}) is given


@pytest.mark.parametrize("name", NAMES)
def test_settings_together_with_an_option_are_refused_by_name(name: str) -> None:
    message = f"settings: put ['{name}'] into the Settings, not beside them"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        settings_of(Settings("efsign"), {name: DEFAULTS[name]})


def test_all_options_beside_settings_are_named() -> None:
    message = "settings: put ['checksum', 'seed'] into the Settings, not beside them"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        settings_of(Settings("efsign"), {"seed": 1, "checksum": True})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("exchnage", "did you mean 'exchange'?"),
        ("nanpolicy", "did you mean 'nan_policy'?"),
        ("cuda_graph", "did you mean 'cuda_graphs'?"),
        ("zzz", f"there are {', '.join(NAMES)}"),
        # Not an option: the compressor is the first argument.
        ("compressor", f"there are {', '.join(NAMES)}"),
    ],
)
def test_an_unknown_option_is_refused_with_a_hint(name: str, hint: str) -> None:
    message = f"settings: no option named {name!r}; {hint}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        settings_of("efsign", {"seed": 1, name: 1})


@pytest.mark.parametrize("name", ["check_every", "least_bytes"])
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (-1, "at least 0, got -1"),
        (1.5, "a whole number, at least 0, got 1.5"),
        (True, "a whole number, at least 0, got True"),
        ("1", "a whole number, at least 0, got '1'"),
    ],
)
def test_counts_are_validated(name: str, value: Any, rule: str) -> None:
    message = f"settings: {name} must be {rule}"
    for call in (settings_of, lambda spec, options: Settings(spec, **options)):
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            call("efsign", {name: value})


def test_the_length_of_merged_messages_may_be_left_open_but_not_the_interval_of_checks() -> None:
    assert Settings("efsign", least_bytes=None).least_bytes is None
    assert Settings("efsign", check_every=0, least_bytes=0) == Settings("efsign", least_bytes=0)
    with pytest.raises(ConfigError, match="settings: check_every must be a whole number"):
        Settings("efsign", check_every=None)  # type: ignore[arg-type]


def test_a_wrong_controller_is_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="no controller named 'autopilto'; did you mean"):
        Settings("efsign", controller="autopilto")
    with pytest.raises(ConfigError, match="expected a controller or its spec, got 3"):
        Settings("efsign", controller=3)  # type: ignore[arg-type]


def test_a_controller_is_a_spec_or_an_instance() -> None:
    controller = GraVAC()
    assert Settings("efsign").make_controller() is None
    assert Settings("efsign", controller=controller).make_controller() is controller
    assert Settings("efsign", controller="gravac").make_controller() == controller


@pytest.mark.parametrize("name", NAMES)
def test_an_integration_refuses_what_it_does_not_support(name: str) -> None:
    message = f"attach_x: {name} is not supported here, leave it out"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Settings("efsign", **{name: FULL[name]}).refuse("attach_x", name)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Settings("efsign", **{name: FULL[name]}).refuse("attach_x", *NAMES)


def test_an_integration_accepts_defaults_and_other_options() -> None:
    Settings("efsign").refuse("attach_x", *NAMES)
    Settings("efsign", **DEFAULTS).refuse("attach_x", *NAMES)
    for name in NAMES:
        Settings("efsign", **{name: FULL[name]}).refuse("attach_x", *(set(NAMES) - {name}))
    Settings("efsign", **FULL).refuse("attach_x")


def test_settings_are_public_and_frozen() -> None:
    settings = gradwire.Settings("topk:ratio=0.01")
    assert isinstance(settings, Settings)
    with pytest.raises(FrozenInstanceError):
        settings.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["checksum", "cuda_graphs"])
def test_flags_must_be_true_or_false(name: str) -> None:
    with pytest.raises(ConfigError, match=f"settings: {name} must be True or False, got 'false'"):
        settings_of("efsign", {name: "false"})
