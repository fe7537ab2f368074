"""The code of the pages about integrations, migration and usage runs, in small form."""

import re
from pathlib import Path

import pytest
import snippet_jobs as jobs
from page_blocks import DOCS, shortened

from processes import Ranks


def blocks_of(page: str, heading: str) -> list[str]:
    """Returns the blocks of Python below a heading, up to the next one."""
    text = (DOCS / page).read_text("utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.M)[1]
    section = re.split(r"^#+ ", section, flags=re.M)[0]
    found = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert found, f"{page} has no code below {heading!r}"
    return found


def test_one_object_with_all_settings(two_ranks: Ranks) -> None:
    [code] = blocks_of("how-to/integrations.md", "Integrations")
    stats = two_ranks.run(jobs.on_ddp, code)[0]
    assert (stats["spec"], stats["memory"], stats["steps"]) == ("powersgd:rank=4", "residual", 1)


@pytest.mark.parametrize("heading", ["DistributedDataParallel", "torch's own registration"])
def test_ddp(two_ranks: Ranks, heading: str) -> None:
    [code] = blocks_of("how-to/integrations.md", heading)
    stats = two_ranks.run(jobs.on_ddp, code)[0]
    assert (stats["spec"], stats["steps"]) == ("powersgd:rank=4", 1)


def test_a_loop_without_ddp(two_ranks: Ranks) -> None:
    [code] = blocks_of("how-to/integrations.md", "A loop without DDP")
    assert two_ranks.run(jobs.in_a_loop, code)[0]["steps"] == 1


def test_fsdp(four_ranks: Ranks) -> None:
    [code, *_] = blocks_of("how-to/fsdp2.md", "FSDP2 and HSDP")
    legs, scatter, replicas = code.split("\n\n")
    stats = four_ranks.run(jobs.on_shards, legs, False)[0]
    assert (stats["spec"], stats["weights"]) == ("int4", "int8")
    assert four_ranks.run(jobs.on_shards, scatter, False)[0]["exchange"] == "sharded"
    assert four_ranks.run(jobs.on_shards, replicas, True)[0]["spec"] == "powersgd:rank=4"


def test_accelerate(two_ranks: Ranks, tmp_path: Path) -> None:
    [code, _] = blocks_of("how-to/integrations.md", "Accelerate")
    stats, files = two_ranks.run(jobs.under_accelerate, code, str(tmp_path))[0]
    assert (stats["spec"], stats["steps"], files) == ("int4", 1, 2)


def test_transformers(two_ranks: Ranks, tmp_path: Path) -> None:
    [code] = blocks_of("how-to/integrations.md", "Hugging Face Trainer")
    stats = two_ranks.run(jobs.under_transformers, code, str(tmp_path))[0]
    assert (stats["spec"], stats["steps"]) == ("int4", 2)


def test_lightning(two_ranks: Ranks) -> None:
    [code, *_] = blocks_of("how-to/integrations.md", "Lightning")
    small = shortened(code, {"devices=8": "devices=2"})
    made = two_ranks.run(jobs.under_lightning, small)[0]
    assert made == ["GradwireCallback", "GradwireStrategy"]


@pytest.mark.parametrize("compressor", ["topk", "qsgd", "powersgd"])
def test_migration_from_grace(two_ranks: Ranks, compressor: str) -> None:
    [code] = blocks_of("how-to/migration.md", "GRACE")
    before, after = code.split("\n\n")
    assert "grace_from_params" in before
    params = {"compressor": compressor, "memory": "residual", "communicator": "allgather"}
    own = {"topk": {"compress_ratio": 0.1}, "qsgd": {"quantum_num": 64}, "powersgd": {}}
    two_ranks.run(jobs.from_grace, after, {**params, **own[compressor]})


def test_usage(two_ranks: Ranks) -> None:
    first, second = blocks_of("reference/usage.md", "In a script")
    assert two_ranks.run(jobs.statements, first)[0] >= 10
    assert two_ranks.run(jobs.statements, second)[0] >= 7


def test_keras() -> None:
    """Parses the blocks; tests/tf runs the same calls where TensorFlow is installed."""
    for code in blocks_of("how-to/integrations.md", "TensorFlow and Keras"):
        compile(code, "integrations.md", "exec")
        assert "gradwire.keras.Distributed" in code
