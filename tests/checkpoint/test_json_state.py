"""States as one JSON string, from which they are restored."""

import io

import pytest
import torch

from gradwire.checkpoint.json_state import from_json, to_json
from gradwire.errors import ConfigError

STATE = {
    "numbers": [1, 2.5, None, "text", True],
    "by name": {"a": torch.arange(6.0).view(2, 3), "none": torch.zeros(0), "one": torch.tensor(3)},
    "deep": [{"x": [torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)]}],
}


def test_a_state_survives_a_file() -> None:
    file = io.BytesIO()
    torch.save(to_json(STATE), file)
    file.seek(0)
    back = from_json(torch.load(file, weights_only=True), torch.device("cpu"))
    assert isinstance(back, dict)
    assert back["numbers"] == STATE["numbers"]
    for name, tensor in STATE["by name"].items():  # type: ignore[attr-defined]
        assert torch.equal(back["by name"][name], tensor)
        assert back["by name"][name].dtype == tensor.dtype
    assert str(back["deep"][0]["x"][0].tolist()) == "[1.5, nan]"


def test_restored_tensors_are_writable() -> None:
    back = from_json(to_json({"a": torch.ones(3)}), torch.device("cpu"))
    assert isinstance(back, dict)
    assert torch.equal(back["a"].mul_(2), torch.full((3,), 2.0))


def test_the_result_is_a_string() -> None:
    assert isinstance(to_json(STATE), str)


@pytest.mark.parametrize("text", [None, 5, {}, "", "garbage", to_json(STATE)[:-9]])
def test_broken_json_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^state: a JSON part "):
        from_json(text, torch.device("cpu"))
