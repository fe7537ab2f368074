"""Saves states of controllers and local optimisers by torch.distributed.checkpoint."""

from pathlib import Path

import dcp_jobs as jobs
import pytest

from processes import Ranks


@pytest.mark.parametrize(
    "controller",
    [
        "schedule:first=0.1,last=0.01,stages=4,length=8",
        "accordion:low=0.5,high=0.1,epoch_steps=2,interval=1",
        "gravac:low=2,high=50,window=2",
    ],
)
def test_controllers(four_ranks: Ranks, tmp_path: Path, controller: str) -> None:
    for back, goes_on in four_ranks.run(jobs.controlled, str(tmp_path), controller, 6):
        assert back
        # GraVAC decides by measured times, which vary between runs.
        assert goes_on or controller.startswith("gravac")


@pytest.mark.parametrize("name", sorted(jobs.LOCAL))
def test_local_optimisers(four_ranks: Ranks, tmp_path: Path, name: str) -> None:
    for back, goes_on in four_ranks.run(jobs.local, str(tmp_path), name, 5):
        assert back
        assert goes_on
