"""The arrows of the design: who may import whom, and who may know of what is outside."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gradwire"

LEVELS = (
    ("errors", "checks", "version", "types"),
    ("kernels", "comm"),
    ("wire", "testbed"),
    ("base",),
    ("compressors", "memory"),
    ("exchange",),
    ("spec",),
    ("engine", "control"),
    ("catalogue", "checkpoint"),
    ("simulate", "local", "integrations"),
    ("perfmodel",),
    # The package itself: its public names.
    ("gradwire", "keras"),
    ("bench",),
    ("cli", "__main__"),
)
"""Imports point to the same line or a line above."""

ALONE = {
    "comm": {"errors", "types", "comm"},
    "testbed": {"errors", "comm", "testbed"},
    "kernels": {"errors", "types", "kernels"},
}
"""Folders that import nothing else of the package."""

GUESTS = {
    "triton": ("kernels/cuda/",),
    "numba": ("kernels/cpu/",),
    "matplotlib": ("bench/report/figures.py",),
    "pyroute2": ("testbed/",),
    "keras": ("integrations/keras/", "bench/microbench/keras_steps.py"),
    "tensorflow": ("integrations/keras/tensorflow.py", "bench/microbench/keras_steps.py"),
    "typer": ("cli/",),
    "rich": ("cli/", "bench/"),
    "lightning": ("integrations/lightning.py", "bench/microbench/trainers.py"),
    "accelerate": ("integrations/accelerate.py", "bench/microbench/trainers.py"),
    "transformers": ("integrations/transformers.py", "bench/microbench/trainers.py"),
}
"""Optional packages, and where they may be imported."""

ENVIRONMENT = ("cli/", "testbed/")
"""Who may read environment variables: the command line, and what begins a process."""

FILES = sorted(SOURCE.rglob("*.py"))


def place(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def house(file: Path) -> str:
    """The top-level module or folder that a file belongs to."""
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "gradwire" if first == "__init__" else first


HOUSES = sorted({house(file) for file in FILES})


def of_house(name: str) -> list[Path]:
    files = [file for file in FILES if house(file) == name]
    assert files, f"there are no files of {name}"
    return files


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@cache
def imports(file: Path) -> list[str]:
    """All that a file imports, wherever it does, as absolute names down to the imported thing."""
    found: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place(file)}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def neighbours(file: Path) -> set[str]:
    """The parts of the house that a file imports."""
    found = set()
    for name in imports(file):
        first, _, rest = name.partition(".")
        if first == "gradwire":
            second = rest.partition(".")[0]
            inside = (SOURCE / second).is_dir() or (SOURCE / f"{second}.py").is_file()
            found.add(second if second and inside else "gradwire")
    return found


def level(name: str) -> int:
    found = [number for number, row in enumerate(LEVELS) if name in row]
    assert len(found) == 1, f"{name} has no place among the levels: give it one"
    return found[0]


def within(file: Path, places: tuple[str, ...]) -> bool:
    return place(file).startswith(places)


def test_the_source_was_found() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("name", HOUSES)
def test_every_part_has_its_level(name: str) -> None:
    level(name)


@pytest.mark.parametrize("here", HOUSES)
def test_imports_point_down(here: str) -> None:
    for file in of_house(here):
        up = sorted(name for name in neighbours(file) if level(name) > level(here))
        assert not up, f"{place(file)} (in {here}) imports {up}, which are above it"


@pytest.mark.parametrize("here", ALONE)
def test_some_know_nothing_else(here: str) -> None:
    for file in of_house(here):
        others = neighbours(file) - ALONE[here]
        assert not others, f"{place(file)} knows of {sorted(others)}"


@pytest.mark.parametrize("here", HOUSES)
def test_optional_packages_come_in_by_their_own_door(here: str) -> None:
    for file in of_house(here):
        guests = {name.partition(".")[0] for name in imports(file)} & GUESTS.keys()
        wrong = sorted(guest for guest in guests if not within(file, GUESTS[guest]))
        assert not wrong, f"{place(file)} imports {wrong}"


@pytest.mark.parametrize("here", HOUSES)
def test_the_environment_is_read_at_the_edge_only(here: str) -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for file in of_house(here):
        if within(file, ENVIRONMENT):
            continue
        for node in nodes(file):
            assert not (isinstance(node, ast.Attribute) and node.attr in names), place(file)
            assert not (isinstance(node, ast.alias) and node.name in names), place(file)


def test_methods_do_not_know_each_other() -> None:
    """A file of the catalogue builds on the contract, not on another method."""
    for folder in ("compressors", "memory", "exchange"):
        for file in (SOURCE / folder).glob("*.py"):
            siblings = [
                n
                for n in imports(file)
                if n.startswith(f"gradwire.{folder}.") and not n.split(".")[2].startswith("_")
            ]
            assert not siblings, f"{place(file)} imports {siblings}"


BENCH = (
    ("case", "human", "machine"),
    ("datasets",),
    ("records",),
    ("workloads",),
    ("cases",),
    ("worker",),
    ("report",),
    ("runs",),
    ("predictions",),
    ("simulated",),
    ("studies",),
    ("microbench", "fuzz"),
)
"""Parts of the bench; imports point to a line above, and never to a neighbour on the same line."""

INSIDE = SOURCE / "bench"
BENCH_FILES = [file for file in FILES if INSIDE in file.parents and file != INSIDE / "__init__.py"]


def room(file: Path) -> str:
    """The module or folder inside the bench that a file belongs to."""
    return file.relative_to(INSIDE).parts[0].removesuffix(".py")


def rooms(file: Path) -> set[str]:
    """The parts of the bench that a file imports."""
    names = (name.split(".") for name in imports(file))
    return {parts[2] for parts in names if parts[:2] == ["gradwire", "bench"] and len(parts) > 2}


@pytest.mark.parametrize("here", sorted({room(file) for file in BENCH_FILES}))
def test_parts_of_the_bench_import_one_way(here: str) -> None:
    above = [number for number, row in enumerate(BENCH) if here in row]
    assert len(above) == 1, f"bench/{here} has no place among the levels: give it one"
    allowed = {here}.union(*BENCH[: above[0]])
    for file in BENCH_FILES:
        wrong = sorted(rooms(file) - allowed) if room(file) == here else []
        assert not wrong, f"{place(file)} imports {wrong}, which are not above bench/{here}"


def test_every_folder_of_the_bench_says_what_lives_there() -> None:
    for folder in {file.parent for file in BENCH_FILES}:
        told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert told, f"{place(folder)}/__init__.py has no docstring"
