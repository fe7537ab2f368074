"""The commands of the recipe pages are valid for torchrun and Kubernetes."""

import ast
import os
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from recipe_files import files_of
from torch.distributed.run import get_args_parser

import gradwire
from deadlines import scaled

NODES = ("node-a", "node-b", "node-c")

SRUN = """#!/bin/bash
# A fake of Slurm: one task per node, as with --ntasks-per-node=1.
[ "$1" = --kill-on-bad-exit=1 ] && shift
for node in 0 1 2; do SLURM_NODEID=$node "$@"; done
"""


def read_torchrun(words: list[str]) -> Namespace:
    """Parses arguments as torchrun does."""
    return get_args_parser().parse_args(words)


def fake_command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


def test_slurm_starts_one_torchrun_per_node(tmp_path: Path) -> None:
    fake_command(tmp_path, "srun", SRUN)
    fake_command(tmp_path, "scontrol", "#!/bin/sh\nprintf '%s\\n' " + " ".join(NODES) + "\n")
    fake_command(tmp_path, "torchrun", "#!/bin/sh\nprintf '%s\\n' \"$*\"\n")
    (tmp_path / "job.sbatch").write_text(files_of("slurm")["job.sbatch"])
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_JOB_NUM_NODES": str(len(NODES)),
        "SLURM_JOB_ID": "70001",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=scaled(20),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launches = [read_torchrun(shlex.split(line)) for line in done.stdout.splitlines()]
    assert [t.node_rank for t in launches] == [0, 1, 2]
    assert {(t.nnodes, t.nproc_per_node, t.master_addr) for t in launches} == {("3", "8", "node-a")}
    assert {t.master_port for t in launches} == {20000 + 70001 % 20000}
    assert all(t.training_script == "train.py" for t in launches)


def test_kubernetes_pods_find_each_other() -> None:
    manifests: dict[str, Any] = {
        m["kind"]: m for m in yaml.safe_load_all(files_of("kubernetes")["job.yaml"])
    }
    service, job = manifests["Service"], manifests["Job"]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == env["NODES"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert {m["name"] for m in container["volumeMounts"]} == set(volumes)
    claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifests["PersistentVolumeClaim"]["metadata"]["name"]

    line = Template(container["args"][0]).substitute(env, JOB_COMPLETION_INDEX="3")
    words = shlex.split(line)
    assert words[:2] == ["exec", "torchrun"]
    launches = read_torchrun(words[2:])
    assert (launches.nnodes, launches.node_rank, launches.master_port) == ("4", 3, 29500)
    assert launches.training_script_args[-2:] == ["--checkpoints", "/checkpoints"]

    [policy] = yaml.safe_load_all(files_of("kubernetes")["policy.yaml"])
    assert policy["spec"]["podSelector"]["matchLabels"] == {"job-name": name}


@pytest.mark.parametrize(("page", "name"), [("torchrun", "train.py"), ("ray", "train_ray.py")])
def test_scripts_use_existing_names_of_gradwire(page: str, name: str) -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(files_of(page)[name]))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "gradwire"
    }
    assert "attach" in used
    assert used <= set(gradwire.__all__)
