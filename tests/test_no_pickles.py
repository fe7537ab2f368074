"""Nothing that comes from the network is unpickled or executed."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gradwire"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({file.relative_to(SOURCE).parts[0] for file in FILES})

MODULES = {
    "pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "torch.distributed.rpc",
    "multiprocessing.managers",
}  # fmt: skip
NAMES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "eval", "exec",
}  # fmt: skip
"""torch's collectives of objects use pickle."""

SOCKETS = {"multiprocessing.connection.Listener", "multiprocessing.connection.Client"}
"""They use pickle, too; pipes between processes of one machine are no network."""

LOADS = {"torch.load", "torch.serialization.load", "torch.jit.load", "torch.hub.load"}
"""They unpickle, with weights only or not."""

READERS = {"bench/datasets/cifar10.py"}
"""Reads a public data set from disk, with an unpickler restricted to a few harmless names."""

CHECKPOINTS = {"checkpoint/files.py", "checkpoint/atomic_write.py"}
"""Read files of the own machine with `torch.load`; no bytes of a message reach them."""

MESSAGES = {"io", "BytesIO", "frombuffer", "recv", "irecv", "tobytes", "gather_states"}
"""Names without which bytes in memory cannot be made a file, or received."""


def test_the_source_was_found() -> None:
    assert len(FILES) > 40
    assert {SOURCE / place for place in READERS | CHECKPOINTS} <= {*FILES}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_pickles(folder: str) -> None:
    for file in FILES:
        place = file.relative_to(SOURCE)
        if place.parts[0] == folder:
            assert not violations(file.read_text(), place.as_posix()), place


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("comm/tcp.py", "import pickle"),
        ("comm/tcp.py", "from dill import loads"),
        ("comm/tcp.py", "dist.gather_object(x, None)"),
        ("comm/tcp.py", "from multiprocessing.connection import Listener"),
        ("comm/tcp.py", "eval(text)"),
        ("checkpoint/gather.py", "torch.load(BytesIO(received), weights_only=True)"),
        ("checkpoint/gather.py", "from torch import load"),
        ("checkpoint/gather.py", "read = torch.serialization.load"),
        ("checkpoint/files.py", "torch.load(path)"),
        ("checkpoint/files.py", "torch.load(path, weights_only=False)"),
        ("checkpoint/files.py", "torch.load(io.BytesIO(x), weights_only=True)"),
        ("checkpoint/files.py", "dist.recv(content, rank)"),
        ("bench/datasets/source.py", "np.load(file, allow_pickle=True)"),
        ("bench/datasets/cifar10.py", "pickle.loads(content)"),
    ],
)
def test_violations_are_found(place: str, source: str) -> None:
    assert violations(source, place)


def violations(source: str, place: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            bad = bool({alias.name for alias in node.names} & forbidden_modules(place))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            paths = {f"{node.module}.{name}" for name in names}
            bad = node.module in MODULES or bool(NAMES & names) or bool((LOADS | SOCKETS) & paths)
        elif isinstance(node, ast.Attribute):
            bad = is_bad_attribute(node, place)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOADS:
            bad = "weights_only=True" not in ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            bad = node.func.id in NAMES | (MESSAGES if place in CHECKPOINTS else set())
        else:
            bad = isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True"
        if bad:
            found.append(ast.unparse(node))
    return found


def forbidden_modules(place: str) -> set[str]:
    if place in READERS:
        return MODULES - {"pickle"}
    return MODULES | {"io"} if place in CHECKPOINTS else MODULES


def is_bad_attribute(node: ast.Attribute, place: str) -> bool:
    if ast.unparse(node.value) == "pickle":
        return node.attr not in ("Unpickler", "UnpicklingError")
    if ast.unparse(node) in LOADS:
        return place not in CHECKPOINTS
    # `model.eval()` is harmless.
    return node.attr in NAMES - {"eval"} | (MESSAGES if place in CHECKPOINTS else set())
