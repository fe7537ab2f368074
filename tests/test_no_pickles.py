"""Nothing that comes from the network is unpickled or executed."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gradwire"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({file.relative_to(SOURCE).parts[0] for file in FILES})

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.distributed.rpc"}
NAMES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "eval", "exec",
}  # fmt: skip
"""torch's collectives of objects use pickle."""

READERS = {"bench/datasets/cifar10.py"}
"""Reads a public data set from disk, with an unpickler restricted to a few harmless names."""


def test_the_source_was_found() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_pickles(folder: str) -> None:
    for file in FILES:
        if file.relative_to(SOURCE).parts[0] == folder:
            check(file)


def check(file: Path) -> None:
    place = file.relative_to(SOURCE).as_posix()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            allowed = {"pickle"} if place in READERS else set()
            assert not (MODULES - allowed) & {alias.name for alias in node.names}, place
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in MODULES, place
            assert not NAMES & {alias.name for alias in node.names}, place
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            assert node.attr in ("Unpickler", "UnpicklingError"), place
        elif isinstance(node, ast.Attribute):
            # `model.eval()` is harmless, and so is `torch.load` with weights only.
            assert node.attr not in NAMES - {"eval"}, place
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in NAMES, place
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node), place
