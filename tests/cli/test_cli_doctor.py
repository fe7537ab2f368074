"""`gradwire doctor` puts itself in front of a script, and names what keeps it from measuring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.cli.diagnosis import with_doctor
from gradwire.errors import ConfigError
from gradwire.testbed.hosts import Testbed
from processes import free_port

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert sys.argv[1:] == ["--epochs", "3"] and __name__ == "__main__"
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
"""


def test_the_command_goes_between_torchrun_and_the_script() -> None:
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node=4", "train.py", "--lr", "-m"]
    expected = ["torchrun", "--nnodes", "2", "--nproc-per-node=4", "-m", "gradwire", "doctor"]
    assert with_doctor(command, 30) == [*expected, "--seconds=30", "train.py", "--lr", "-m"]


def test_a_module_stays_a_module() -> None:
    command = ["python3", "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "my.train"]
    found = with_doctor(command, 30)
    assert found[-2:] == ["--module", "my.train"]
    assert found.count("-m") == 2


@pytest.mark.parametrize("command", [["srun", "python", "train.py"], ["python", "train.py"]])
def test_other_launchers_are_told_what_to_start(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="start your script as: python -m gradwire doctor"):
        with_doctor(command, 30)


def doctored(script: str, folder: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "gradwire", "doctor", "--seconds", "3", "train.py"]
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [*launcher, *command, "--epochs", "3"],
        cwd=folder,
        env={**os.environ, **({} if launcher else env), "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=58,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("print('no model here')", "ended without two training steps of a DistributedDataParallel"),
        (SCRIPT.replace("STEPS", "9"), "one rank exchanges nothing; start several processes"),
    ],
)
def test_a_script_that_cannot_be_measured_is_a_named_error(
    script: str, error: str, tmp_path: Path
) -> None:
    done = doctored(script, tmp_path)
    assert done.returncode != 0
    assert f"gradwire: doctor: {'train.py ' if 'ended' in error else ''}{error}" in done.stderr


def test_a_slow_link_is_found_in_an_unchanged_script(tmp_path: Path) -> None:
    reason = Testbed.reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    net = [sys.executable, "-m", "gradwire", "net", "--workers", "2", "--rate", "50mbit", "--"]
    done = doctored(SCRIPT.replace("STEPS", "1000"), tmp_path, *net)
    assert done.returncode == 0, done.stderr
    assert "bottleneck: the links" in done.stdout
    assert 'link = gradwire.attach(model, "' in done.stdout
