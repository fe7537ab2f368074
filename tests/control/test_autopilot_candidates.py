"""The grid of settings that Autopilot selects from."""

import gradwire
from gradwire.control._autopilot.candidates import setting_grid


def test_setting_grids() -> None:
    def names(spec: str, key: str) -> list[str]:
        return [point.label() for point in setting_grid(gradwire.parse(spec), key)]

    top = names("topk:ratio=0.03", "ratio")
    assert top[:2] == ["dense", "bf16"]
    assert top[5:8] == ["topk:ratio=0.05", "topk:ratio=0.03", "topk:ratio=0.02"]
    assert names("powersgd:rank=4", "rank")[-3:] == [f"powersgd:rank={r}" for r in (4, 2)] + [
        "powersgd"
    ]
    # With fewer bits than four it would no longer be a contraction.
    assert names("qsgd:bits=5", "bits")[2:] == [f"qsgd:bits={b}" for b in (8, 7, 6, 5)] + ["qsgd"]
    assert "topk:ratio=0.1 | qsgd" in names("topk:ratio=0.01 | qsgd:bits=4", "ratio")
