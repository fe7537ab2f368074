"""The code and the commands of how-to pages run, in small form."""

import doctest
import re
from pathlib import Path

import pytest
from page_blocks import DOCS, run_shell, shortened, titled_blocks
from page_jobs import run_script

from gradwire.bench.predictions.forecast_records import read_predictions
from processes import Ranks

HOW_TO = DOCS / "how-to"


def last_number(text: str) -> tuple[int, str]:
    """Returns the first step of a run of resumable.py, and the sum of its weights."""
    [(first, total)] = re.findall(r"^rank \d: steps (\d+) to \d+, ([-\d.]+)$", text, re.M)
    return int(first), total


def test_a_resumed_run_is_bitwise_one_run(two_ranks: Ranks, tmp_path: Path) -> None:
    script = titled_blocks("how-to/resume.md")["resumable.py"]
    stopped, whole = str(tmp_path / "stopped"), str(tmp_path / "whole")
    two_ranks.run(run_script, script, stopped, "20")
    resumed = [last_number(text) for text in two_ranks.run(run_script, script, stopped, "40")]
    once = [last_number(text) for text in two_ranks.run(run_script, script, whole, "40")]
    assert [first for first, _ in resumed] == [20, 20]
    assert [total for _, total in resumed] == [total for _, total in once]


def test_a_run_continues_with_fewer_ranks(
    four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    blocks = titled_blocks("how-to/resume.md")
    four_ranks.run(run_script, blocks["resumable.py"], str(tmp_path), "20")
    out = two_ranks.run(run_script, blocks["resized.py"], str(tmp_path), "4")
    assert out == ["step 20: 4 ranks are 2 now\n"] * 2


def test_the_commands_that_resume_are_those_of_the_scripts() -> None:
    blocks = titled_blocks("how-to/resume.md")
    for line in (blocks["twice"] + blocks["fewer"]).splitlines():
        launcher, _, ranks, script, folder, number = line.split()
        assert (launcher, folder, script in blocks) == ("torchrun", "checkpoints", True)
        assert int(ranks) <= int(number)


@pytest.mark.parametrize(("page", "least"), [("choose-a-method", 20), ("size-an-llm", 3)])
def test_every_figure_that_links_to_a_result_is_on_its_page(page: str, least: int) -> None:
    text = (HOW_TO / f"{page}.md").read_text("utf-8")
    links = re.findall(r"\[([^\]]*\d[^\]]*)\]\((\.\./results/[\w-]+\.md)\)", text)
    assert len(links) >= least
    for figure, target in links:
        assert figure in (HOW_TO / target).read_text("utf-8"), f"{figure} is not in {target}"


def test_the_arithmetic_of_a_large_model() -> None:
    found = doctest.testfile(str(HOW_TO / "size-an-llm.md"), module_relative=False)
    assert found.attempted >= 12
    assert found.failed == 0


def test_bytes_of_a_predicted_step(tmp_path: Path) -> None:
    """Runs the page's command with a tiny model; bytes are a fixed share of the dense ones."""
    command = shortened(
        titled_blocks("how-to/size-an-llm.md")["simulate"],
        {"gpt2:synthetic=true,size=30,batch_size=1,context=32": "gpt2-tiny"},
    )
    run_shell(f"{command.rstrip()} --json out.jsonl", tmp_path)
    runs = {run.spec: run.sent_bytes for run in read_predictions(tmp_path / "out.jsonl")}
    assert set(runs) == {"ddp-fp32", "torch-fp16", "int4", "powersgd:rank=4"}
    assert runs["torch-fp16"] == pytest.approx(runs["ddp-fp32"] / 2, rel=0.02)
