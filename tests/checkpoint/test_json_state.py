"""States as one JSON string, from which they are restored."""

import io

import pytest
import torch

from gradwire.checkpoint.json_state import from_json, to_json
from gradwire.errors import ConfigError

STATE = {
    "numbers": [1, 2.5, None, "text", True],
    "by name": {"a": torch.arange(6.0).view(2, 3), "none": torch.zeros(0), "one": torch.tensor(3)},
    "deep": [{"x": [torch.tensor([1.5, 2.5], dtype=torch.bfloat16)]}],
}


def test_a_state_survives_a_file() -> None:
    file = io.BytesIO()
    torch.save(to_json(STATE), file)
    file.seek(0)
    back = from_json("controller", torch.load(file, weights_only=True), torch.device("cpu"))
    assert isinstance(back, dict)
    assert back["numbers"] == STATE["numbers"]
    for name, tensor in STATE["by name"].items():  # type: ignore[attr-defined]
        assert torch.equal(back["by name"][name], tensor)
        assert back["by name"][name].dtype == tensor.dtype
    assert back["deep"][0]["x"][0].tolist() == [1.5, 2.5]


def test_restored_tensors_are_writable() -> None:
    back = from_json("controller", to_json({"a": torch.ones(3)}), torch.device("cpu"))
    assert isinstance(back, dict)
    assert torch.equal(back["a"].mul_(2), torch.full((3,), 2.0))


def test_the_result_is_a_string() -> None:
    assert isinstance(to_json(STATE), str)


BROKEN_TENSORS = [
    '{"dtype": "float7", "shape": [1], "base64": "AAAAAA=="}',
    '{"dtype": "float32", "shape": [2], "base64": "AAAAAA=="}',
    '{"dtype": "float32", "shape": "x", "base64": "AAAAAA=="}',
    '{"dtype": "float32", "shape": [1], "base64": 3}',
    '{"dtype": 3, "shape": [1], "base64": "AAAAAA=="}',
]


@pytest.mark.parametrize(
    "text", [None, 5, {}, "", "garbage", to_json(STATE)[:-9], "[" * 100_000, *BROKEN_TENSORS]
)
def test_broken_json_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^state: controller: "):
        from_json("controller", text, torch.device("cpu"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), torch.tensor([1.0, -float("inf")])])
def test_nonfinite_numbers_are_refused_by_place(bad: object) -> None:
    message = r"^state: controller: deep\[1\]\.x (is|has) .*not finite$"
    with pytest.raises(ConfigError, match=message):
        from_json("controller", to_json({"deep": [0, {"x": bad}]}), torch.device("cpu"))
