"""Conversion of GRACE's parameter dictionaries."""

import logging
from typing import Any

import pytest
import torch

import gradwire
from gradwire.engine.make_plan import make_plan
from gradwire.errors import ConfigError
from gradwire.integrations.grace import COMMUNICATORS, COMPRESSORS, MEMORIES, translate

TENSORS = [torch.zeros(64, 64)]


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_every_combination_is_accepted(compressor: str, memory: str, communicator: str) -> None:
    params = {"compressor": compressor, "memory": memory, "communicator": communicator}
    method, _ = translate(params)
    make_plan(method["compressor"], method["memory"], method["exchange"], TENSORS, 4)


def test_the_usual_dictionary() -> None:
    params = {
        "compressor": "topk",
        "memory": "residual",
        "communicator": "allgather",
        "compress_ratio": 0.01,
        "world_size": 4,
    }
    expected = {
        "compressor": "topk:ratio=0.01,values=fp32",
        "memory": "residual",
        "exchange": "gather",
    }
    assert translate(params) == (expected, [])


def test_grace_defaults_are_kept() -> None:
    assert translate({"compressor": "randomk"}).method["compressor"] == "randomk:ratio=0.3"
    assert translate({}).method == {"compressor": "none", "memory": "none", "exchange": "auto"}


def test_levels_become_bits() -> None:
    found = translate({"compressor": "qsgd", "quantum_num": 127, "bucket_size": 128})
    assert found == (
        {"compressor": "qsgd:bits=8,bucket=128,norm=l2", "memory": "none", "exchange": "auto"},
        [],
    )
    found = translate({"compressor": "qsgd", "quantum_num": 5, "bucket_size": 512})
    assert found.method["compressor"] == "qsgd:bits=4,bucket=512,norm=l2"
    assert found.notes == ["quantum_num=5 becomes bits=4, which is 7 levels"]
    assert translate({"compressor": "sketch", "quantiles": 256}).method["compressor"] == (
        "sketchml:bits=8"
    )


def test_inceptionn_has_the_bound_that_grace_applied() -> None:
    assert gradwire.parse(translate({"compressor": "inceptionn"}).method["compressor"]) == (
        gradwire.parse("inceptionn")
    )


@pytest.mark.parametrize(
    ("params", "key", "value", "note"),
    [
        ({"compressor": "terngrad", "memory": "residual"}, "memory", "none", "memory is none"),
        ({"compressor": "powersgd", "memory": "none"}, "memory", "residual", "GRACE fails"),
        (
            {"compressor": "topk", "communicator": "allreduce"},
            "exchange",
            "auto",
            "does not go with",
        ),
        ({"compressor": "efsignsgd", "memory": "efsignsgd"}, "memory", "residual", "averaged"),
        (
            {"compressor": "topk", "communicator": "broadcast"},
            "exchange",
            "gather",
            "one collective",
        ),
        ({"compressor": "dgc", "memory": "dgc"}, "memory", "momentum:momentum=0.9", ""),
    ],
)
def test_defects_of_grace_are_corrected(
    params: dict[str, object], key: str, value: str, note: str
) -> None:
    method, notes = translate(params)
    assert method[key] == value  # type: ignore[literal-required]
    assert note in " ".join(notes)
    assert bool(notes) == bool(note)


def test_notes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        method = gradwire.from_grace({"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.1})
    assert method["compressor"] == "efsign"
    assert "from_grace: efsign keeps its residual in units of the gradient" in caplog.text


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"compressr": "topk"}, r"unknown parameter \['compressr'\]"),
        ({"compressor": "topkk"}, "no compressor named 'topkk'; did you mean 'topk'"),
        ({"memory": "xyz"}, "no memory named 'xyz'; there are none, residual"),
        ({"compressor": "topk", "compress_ratio": 2}, r"topk: ratio must be in \(0, 1\], got 2"),
        ({"compressor": "topk", "compress_ratio": "1"}, "compress_ratio must be a number, got '1'"),
        ({"compressor": "qsgd", "quantum_num": 0}, "bits must be"),
        ({"compressor": "inceptionn", "error_bound": 0}, "error_bound must be positive"),
        (None, "^from_grace: expected a dictionary of parameters, got None$"),
        ("topk", "^from_grace: expected a dictionary of parameters, got 'topk'$"),
    ],
)
def test_bad_dictionaries_are_refused(params: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        gradwire.from_grace(params)
