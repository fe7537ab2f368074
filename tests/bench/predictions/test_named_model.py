"""Models named by users, and errors for those that cannot be measured."""

from pathlib import Path

import pytest
from torch import nn

from gradwire.bench.predictions.advise import named_model
from gradwire.errors import ConfigError

SOURCE = """
import torch
from torch import nn

def model():
    return nn.Linear(6, 2)

def pair():
    return nn.Embedding(5, 2), lambda net: net(torch.tensor([1, 3])).square().sum()

def nothing():
    return 3

def returns_dict():
    return nn.LSTM(6, 2)

number = 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own.py").write_text(SOURCE)
    (tmp_path / "users_broken.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_model_without_a_loss_gets_random_inputs() -> None:
    model, loss = named_model("users_own:model", "4x6", "cpu")
    assert isinstance(model, nn.Linear)
    assert loss(model).item() > 0


def test_a_model_may_bring_its_loss() -> None:
    model, loss = named_model("users_own:pair", None, "cpu")
    loss(model).backward()
    assert next(model.parameters()).grad is not None


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("users_own", None, "model: expected module:function, got 'users_own'"),
        ("no_such_module:f", None, "model: cannot import 'no_such_module': No module"),
        ("users_broken:f", None, "cannot import 'users_broken': No module named 'no_such_package'"),
        ("users_own:missing", None, "model: 'users_own' has no function 'missing'"),
        ("users_own:number", None, "model: 'users_own' has no function 'number'"),
        ("users_own:nothing", None, "must return a torch.nn.Module, or a pair .* got int"),
        ("users_own:model", None, "users_own:model returns a model alone; give the shape"),
        ("users_own:model", "4,6", "input: expected numbers such as 32x3x224x224, got '4,6'"),
        ("users_own:model", "4x0", "input: expected numbers such as 32x3x224x224, got '4x0'"),
    ],
)
def test_a_wrong_model_is_refused(name: str, shape: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_model(name, shape, "cpu")


def test_a_batch_that_does_not_fit_is_named() -> None:
    model, loss = named_model("users_own:model", "4x7", "cpu")
    refusal = (
        r"users_own:model cannot take \(4, 7\): .*; give another --input, or return \(model, loss"
    )
    with pytest.raises(ConfigError, match=refusal):
        loss(model)


def test_an_output_that_is_no_tensor_needs_a_loss() -> None:
    model, loss = named_model("users_own:returns_dict", "3x4x6", "cpu")
    with pytest.raises(ConfigError, match="gives tuple, not a tensor; return"):
        loss(model)
