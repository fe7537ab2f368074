"""The official data files, in the folder given by `--data DIR`."""

from pathlib import Path

import pytest
import torch

from gradwire.bench.workloads.base import parse_workload, workload_classes

READERS = sorted(workload_classes().keys() - {"mlp", "resnet18", "resnet20", "vgg16"})


# The first run of gpt2 trains a tokeniser.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_the_official_files_can_be_learnt_from(name: str, pytestconfig: pytest.Config) -> None:
    folder = pytestconfig.getoption("--data")
    if folder is None:
        pytest.skip("reads public data sets: name their folder with --data DIR")
    workload = parse_workload(name, Path(folder))
    first, other = (workload.batch(step=0, rank=rank, workers=2, seed=0) for rank in (0, 1))
    assert len(first.inputs) == len(first.targets) == workload.batch_size
    assert not torch.equal(first.inputs, other.inputs)
    assert first.inputs.float().std() > 0
