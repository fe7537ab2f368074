"""Import rules: the levels of the package, optional dependencies, environment variables."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gradwire"

LEVELS = (
    ("errors", "types", "version"),
    ("checks", "comm", "kernels", "options"),
    ("wire", "testbed", "identity"),
    ("base",),
    ("compressors", "memory"),
    ("exchange",),
    ("registry",),
    ("spec",),
    ("policies",),
    ("engine",),
    ("attacks", "catalogue", "checkpoint", "control", "stages"),
    ("auto", "plugins"),
    ("byzsgd", "integrations", "local", "simulation"),
    ("decentralized", "elastic", "optim", "perfmodel", "testing"),
    # The package itself: its public names.
    ("gradwire", "keras"),
    ("bench",),
    ("cli",),
    ("__main__",),
)
"""Imports point to a row above, never within a row, so there are no cycles between folders."""

ALONE = {
    "comm": {"errors", "types", "comm"},
    "testbed": {"errors", "comm", "testbed"},
    "kernels": {"errors", "types", "kernels"},
}
"""Folders that import no other parts of the package than these."""

OPTIONAL = {
    "pytest": ("testing/pytest_plugin.py",),
    "triton": ("kernels/cuda/",),
    "numba": ("kernels/cpu/",),
    "matplotlib": ("bench/report/figures.py",),
    "pyroute2": ("testbed/",),
    "keras": ("integrations/keras/", "bench/microbench/keras_steps.py"),
    "tensorflow": ("integrations/keras/tensorflow.py", "bench/microbench/keras_steps.py"),
    "torchft": ("bench/elastic/",),
    "typer": ("cli/",),
    "rich": ("cli/", "bench/"),
    "lightning": ("integrations/lightning.py", "bench/microbench/trainers.py"),
    "accelerate": ("integrations/accelerate.py", "bench/microbench/trainers.py"),
    "transformers": ("integrations/transformers.py", "bench/microbench/trainers.py"),
}
"""Optional packages, and the files that may import them."""

ENVIRONMENT = ("cli/", "testbed/")
"""Folders that may read environment variables: the command line, and what starts processes."""

FILES = sorted(SOURCE.rglob("*.py"))


def relative_path(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def part_of(file: Path) -> str:
    """Returns the top-level module or folder that a file belongs to."""
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "gradwire" if first == "__init__" else first


PARTS = sorted({part_of(file) for file in FILES})


def files_of(name: str) -> list[Path]:
    files = [file for file in FILES if part_of(file) == name]
    assert files, f"there are no files of {name}"
    return files


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


@cache
def imports(file: Path) -> list[str]:
    """Returns all imports of a file, also inside functions, as absolute names of the items."""
    found: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{relative_path(file)}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imported_parts(file: Path) -> set[str]:
    """Returns the parts of the package that a file imports."""
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
    assert len(found) == 1, f"{name} has no level: give it one"
    return found[0]


def within(file: Path, places: tuple[str, ...]) -> bool:
    return relative_path(file).startswith(places)


def test_the_source_was_found() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_one_level(name: str) -> None:
    level(name)


@pytest.mark.parametrize("here", PARTS)
def test_imports_point_to_levels_above(here: str) -> None:
    for file in files_of(here):
        others = imported_parts(file) - {here}
        wrong = sorted(name for name in others if level(name) >= level(here))
        assert not wrong, (
            f"{relative_path(file)} (in {here}) imports {wrong}, which are not above it"
        )


@pytest.mark.parametrize("here", ALONE)
def test_some_folders_import_only_a_few_parts(here: str) -> None:
    for file in files_of(here):
        others = imported_parts(file) - ALONE[here]
        assert not others, f"{relative_path(file)} imports {sorted(others)}"


@pytest.mark.parametrize("here", PARTS)
def test_optional_packages_are_imported_in_their_own_files(here: str) -> None:
    for file in files_of(here):
        optional = {name.partition(".")[0] for name in imports(file)} & OPTIONAL.keys()
        wrong = sorted(name for name in optional if not within(file, OPTIONAL[name]))
        assert not wrong, f"{relative_path(file)} imports {wrong}"


@pytest.mark.parametrize("here", PARTS)
def test_environment_variables_are_read_only_by_the_command_line_and_testbed(here: str) -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for file in files_of(here):
        if within(file, ENVIRONMENT):
            continue
        for node in nodes(file):
            assert not (isinstance(node, ast.Attribute) and node.attr in names), relative_path(file)
            assert not (isinstance(node, ast.alias) and node.name in names), relative_path(file)


def test_methods_do_not_import_each_other() -> None:
    """A file of the catalogue builds on the base classes, not on another method."""
    for folder in ("compressors", "memory", "exchange"):
        for file in (SOURCE / folder).glob("*.py"):
            siblings = [
                n
                for n in imports(file)
                if n.startswith(f"gradwire.{folder}.") and not n.split(".")[2].startswith("_")
            ]
            assert not siblings, f"{relative_path(file)} imports {siblings}"


BENCH = (
    ("case", "human", "machine"),
    ("time_left",),
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
    ("microbench", "fuzz", "faults"),
    ("elastic",),
)
"""Parts of the bench; imports point to a line above, never to another part on the same line."""

INSIDE = SOURCE / "bench"
BENCH_FILES = [file for file in FILES if INSIDE in file.parents and file != INSIDE / "__init__.py"]


def bench_part_of(file: Path) -> str:
    """Returns the module or folder inside the bench that a file belongs to."""
    return file.relative_to(INSIDE).parts[0].removesuffix(".py")


def imported_bench_parts(file: Path) -> set[str]:
    """Returns the parts of the bench that a file imports."""
    names = (name.split(".") for name in imports(file))
    return {parts[2] for parts in names if parts[:2] == ["gradwire", "bench"] and len(parts) > 2}


@pytest.mark.parametrize("here", sorted({bench_part_of(file) for file in BENCH_FILES}))
def test_parts_of_the_bench_import_one_way(here: str) -> None:
    above = [number for number, row in enumerate(BENCH) if here in row]
    assert len(above) == 1, f"bench/{here} has no level: give it one"
    allowed = {here}.union(*BENCH[: above[0]])
    for file in BENCH_FILES:
        wrong = sorted(imported_bench_parts(file) - allowed) if bench_part_of(file) == here else []
        assert not wrong, f"{relative_path(file)} imports {wrong}, which are not above bench/{here}"


def test_every_folder_of_the_bench_has_a_docstring() -> None:
    for folder in {file.parent for file in BENCH_FILES}:
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring, f"{relative_path(folder)}/__init__.py has no docstring"
