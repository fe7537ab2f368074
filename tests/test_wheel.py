"""The files that would be published: what is inside, their size, and their long description."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from deadlines import scaled

ROOT = Path(__file__).parents[1]
LARGEST_BYTES = 2_000_000


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=scaled(50),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Builds the source archive, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    run("build", "--no-isolation", "--outdir", str(folder))
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def test_an_index_would_accept_both(built: tuple[Path, Path]) -> None:
    run("twine", "check", "--strict", *map(str, built))
    run("check_wheel_contents", str(built[0]))
    assert all(file.stat().st_size < LARGEST_BYTES for file in built)


def test_the_source_archive_has_the_package_and_no_records(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    first = {name.partition("/")[0] for name in names}
    assert {"src", "README.md", "LICENSE", "pyproject.toml"} <= first
    assert not first & {"results", "tests", "docs", "examples"}
    own = {f.relative_to(ROOT).as_posix() for f in (ROOT / "src").rglob("*.py")}
    assert own <= set(names)


def test_the_long_description_has_no_link_that_needs_the_repository(
    built: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        text = str(message_from_string(archive.read(name).decode()).get_payload())
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert not [link for link in links if not re.match(r"https?://|#|mailto:", link)]
    # The README itself has such links, and its words are all kept.
    assert "](docs/" in (ROOT / "README.md").read_text()
    assert "docs/" not in "".join(links)
    assert "gradwire.attach(model" in text
