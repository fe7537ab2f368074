"""`stats()["sent_bytes"]` agrees with the operating system's counters, framing included."""

import json
import sys
from pathlib import Path

import pytest

from gradwire.testbed.cluster import TestbedCluster
from gradwire.testbed.hosts import Testbed

WORKER = Path(__file__).with_name("counted_worker.py")


CASES = [
    ("none", "mean"),
    ("fp16", "mean"),
    ("topk:ratio=0.05", "gather"),
    ("efsign", "gather"),
    ("efsign", "sharded"),
    ("qsgd:bits=4", "sharded"),
    ("efsign", "hierarchical:node=2"),
    ("qsgd:bits=4", "hierarchical:node=2,between=sharded"),
]


@pytest.mark.usefixtures("emulated")
def test_stats_agree_with_the_interface() -> None:
    answers: list[dict[str, int]] = []
    with Testbed(workers=4, rate="1gbit") as testbed:
        code = TestbedCluster(testbed).launch(
            [sys.executable, str(WORKER), json.dumps(CASES)],
            on_line=lambda _, line: answers.append(json.loads(line)),
            extra_env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
    assert code == 0
    assert len(answers) == 4 * len(CASES)
    for answer in answers:
        assert answer["reported"] <= answer["counted"] <= 1.05 * answer["reported"], answer
