"""States in one piece: a text, from which all comes back."""

import io

import pytest
import torch

from gradwire.checkpoint.json_state import seal, unseal
from gradwire.errors import ConfigError

STATE = {
    "numbers": [1, 2.5, None, "text", True],
    "by name": {"a": torch.arange(6.0).view(2, 3), "none": torch.zeros(0), "one": torch.tensor(3)},
    "deep": [{"x": [torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)]}],
}


def test_all_comes_back_by_way_of_a_file() -> None:
    file = io.BytesIO()
    torch.save(seal(STATE), file)
    file.seek(0)
    back = unseal(torch.load(file, weights_only=True), torch.device("cpu"))
    assert isinstance(back, dict)
    assert back["numbers"] == STATE["numbers"]
    for name, tensor in STATE["by name"].items():  # type: ignore[attr-defined]
        assert torch.equal(back["by name"][name], tensor)
        assert back["by name"][name].dtype == tensor.dtype
    assert str(back["deep"][0]["x"][0].tolist()) == "[1.5, nan]"


def test_what_comes_back_can_be_written() -> None:
    back = unseal(seal({"a": torch.ones(3)}), torch.device("cpu"))
    assert isinstance(back, dict)
    assert torch.equal(back["a"].mul_(2), torch.full((3,), 2.0))


def test_it_is_one_text() -> None:
    assert isinstance(seal(STATE), str)


@pytest.mark.parametrize("text", [None, 5, {}, "", "garbage", seal(STATE)[:-9]])
def test_what_is_broken_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^state: a sealed part "):
        unseal(text, torch.device("cpu"))
