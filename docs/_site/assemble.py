"""Assembles the sources of the documentation site: pages of docs/, generated ones, and contents."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import torch

import gradwire
from gradwire import kernels
from pages import (
    api,
    cli,
    copied,
    method_results,
    methods,
    paper_studies,
    records_format,
    spec_names,
    versions,
)

ROOT = Path(__file__).parents[2]

GENERATED: Mapping[str, Callable[[], str]] = {
    "methods": lambda: methods.overview(methods.methods()),
    "api": api.page,
    "cli": cli.page,
    "records": records_format.page,
    "paper studies": lambda: paper_studies.page(ROOT / "results"),
    "spec names": spec_names.page,
    "versions": lambda: versions.page(ROOT),
}
"""Texts that replace the mark <!-- generated: NAME --> of a page."""

API_PAGE = PurePosixPath("reference/api.md")

SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "explanation": "Explanation",
    "results": "Results",
}
"""Folders of docs/ and their captions; the project's own pages come last."""

FIRST = (
    "index",
    "first-run",
    "is-my-network-the-bottleneck",
    "own-compressor",
    "local-sgd-across-sites",
    "choose-a-method",
    "doctor",
    "integrations",
    "usage",
    "api",
    "cli",
    "spec",
    "methods",
    "table",
    "stats",
    "local-sgd",
    "adaptive",
)
"""Pages that come first in their section; others follow by name."""


def assemble(docs: Path, site: Path) -> None:
    """Writes all sources of the site into the folder `site`, which is emptied first."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(docs, site, ignore=shutil.ignore_patterns("_site"))
    accuracy = method_results.by_method(ROOT / "results")
    generated = {
        f"reference/methods/{m.name}.md": methods.page(m, accuracy.get(m.name, ()))
        for m in methods.methods()
    }
    for name, text in (generated | copied.pages(docs.parent)).items():
        (site / name).write_text(text, "utf-8")
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.md"))
    for name in pages:
        path = site / name
        text = _filled(path.read_text("utf-8"))
        text = copied.from_docs(text, name.count("/"))
        text = with_captions(without_headings_in_folds(text))
        if PurePosixPath(name) != API_PAGE:
            text = link_names(text, name)
        path.write_text(f"{text}\n{_contents(name, pages)}", "utf-8")


def _filled(text: str) -> str:
    """Replaces the marks of generated texts."""
    for name, generate in GENERATED.items():
        if (mark := f"<!-- generated: {name} -->") in text:
            text = text.replace(mark, generate())
    return text


def without_headings_in_folds(text: str) -> str:
    """Makes headings inside <details> bold lines: a section cannot begin inside raw HTML."""

    def bold(match: re.Match[str]) -> str:
        return re.sub(r"^#+ (.+)$", r"**\1**", match[0], flags=re.MULTILINE)

    return re.sub(r"<details.*?</details>", bold, text, flags=re.DOTALL)


def with_captions(text: str) -> str:
    """Shows the title of a code block that is a file's name; other titles are for the tests."""
    pattern = r'^```(\w+) title="([^"]*\.[^"]*)"$'
    return re.sub(pattern, r"```{code-block} \1\n:caption: \2\n", text, flags=re.MULTILINE)


def link_names(text: str, page: str) -> str:
    """Links public names in code spans, such as `gradwire.attach(...)`, to the API's page."""
    target = f"{'../' * page.count('/')}{API_PAGE}"
    public = "|".join(sorted(name for name in gradwire.__all__ if not name.startswith("_")))
    pattern = re.compile(rf"(?<!\[)`gradwire\.({public})(\([^`]*\))?`(?!\])")

    def linked(match: re.Match[str]) -> str:
        return f"[{match[0]}]({target}#{match[1].lower()})"

    parts = re.split(r"(^```.*?^```$|^#.*$|<details.*?</details>)", text, flags=re.M | re.S)
    return "".join(part if i % 2 else pattern.sub(linked, part) for i, part in enumerate(parts))


def _contents(name: str, pages: list[str]) -> str:
    """Returns the table of contents that a page adds to the site's navigation."""
    path = PurePosixPath(name)
    if name == "index.md":
        trees = [_tree(caption, _section(folder, pages)) for folder, caption in SECTIONS.items()]
        return "\n".join([*trees, _tree("Project", ["changelog", "contributing", "security"])])
    folder = path.parent.as_posix()
    if path.name == "index.md" and (folder not in SECTIONS or folder == "results"):
        return _tree(None, [PurePosixPath(p).stem for p in _ordered(_inside(folder, pages))])
    return ""


def _section(folder: str, pages: list[str]) -> list[str]:
    """Returns the pages of a section; a folder inside it is its index page."""
    if folder == "results":
        return ["results/index"]
    folders = {p.parent.as_posix() for p in map(PurePosixPath, pages) if len(p.parts) == 3}
    inner = [f"{f}/index.md" for f in folders if f.startswith(f"{folder}/")]
    own = [f"{folder}/index.md"] if f"{folder}/index.md" in pages else []
    ordered = _ordered([*own, *_inside(folder, pages), *inner])
    return [page.removesuffix(".md") for page in ordered]


def _inside(folder: str, pages: list[str]) -> list[str]:
    """Returns the pages of one folder but its index."""
    found = [p for p in map(PurePosixPath, pages) if p.parent.as_posix() == folder]
    return [p.as_posix() for p in found if p.name != "index.md"]


def _ordered(pages: list[str]) -> list[str]:
    def rank(page: str) -> tuple[int, str]:
        path = PurePosixPath(page)
        nested = path.name == "index.md" and len(path.parts) == 3
        stem = path.parent.name if nested else path.stem
        return (FIRST.index(stem) if stem in FIRST else len(FIRST), stem)

    return sorted(pages, key=rank)


def _tree(caption: str | None, pages: list[str]) -> str:
    def lines() -> Iterator[str]:
        yield "```{toctree}"
        yield ":hidden:"
        if caption is not None:
            yield f":caption: {caption}"
        yield ""
        yield from pages
        yield "```\n"

    return "\n".join(lines())


if __name__ == "__main__":
    # Reference kernels need no compiler: quick to start, and the same everywhere.
    kernels.use("reference")
    torch.set_num_threads(1)
    assemble(ROOT / "docs", Path(sys.argv[1]))
