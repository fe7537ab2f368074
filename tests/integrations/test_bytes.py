"""`stats()["sent_bytes"]` agrees with the operating system's counters, and with simulations."""

import json
import sys
from pathlib import Path

import counted_jobs as jobs
import pytest

import gradwire
from gradwire.testbed.cluster import TestbedCluster
from gradwire.testbed.hosts import Testbed
from processes import Ranks

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


COUNTS = (
    "calls",
    "sent_bytes",
    "received_bytes",
    "inside_bytes",
    "message_bytes",
    "dense_bytes",
    "ratio",
)


@pytest.mark.parametrize(
    ("spec", "exchange"),
    [
        ("none", "mean"),
        ("topk:ratio=0.05", "gather"),
        ("efsign", "sharded"),
        ("powersgd:rank=2", "auto"),
        ("efsign", "hierarchical:node=2"),
    ],
)
@pytest.mark.parametrize("integration", ["ddp", "reducer"])
def test_real_and_simulated_ranks_count_the_same_bytes(
    four_ranks: Ranks, integration: str, spec: str, exchange: str
) -> None:
    results = four_ranks.run(jobs.counted_job, integration, spec, exchange, 3)
    simulation = gradwire.simulate(jobs.mlp(), spec, workers=4, exchange=exchange)
    for step in range(3):
        simulation.step([local[step] for local, _ in results])
    for rank, (_, stats) in enumerate(results):
        expected = simulation.workers[rank].stats(simulation.network.meters[rank])
        assert {key: stats[key] for key in COUNTS} == {key: expected[key] for key in COUNTS}
        # The settings that ranks compare, and the parameters.
        assert stats["auxiliary_bytes"] > 0
        # Only DDP goes on computing during the exchange.
        assert ("hidden" in stats) == (integration == "ddp")


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.05"])
def test_the_ratio_of_fsdp_is_against_what_fsdp_would_send(
    four_ranks: Ranks, spec: str, replicated: bool
) -> None:
    for stats, dense_bytes in four_ranks.run(jobs.fsdp_ratio_job, spec, replicated):
        assert stats["dense_bytes"] == dense_bytes
        assert stats["ratio"] == stats["dense_bytes"] / stats["sent_bytes"]
        assert spec != "none" or stats["ratio"] == 1
