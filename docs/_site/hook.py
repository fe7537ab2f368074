"""Hooks of mkdocs: add the generated pages, and check that pages need no other server."""

import re
from pathlib import Path
from typing import Any

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from gradwire import kernels
from pages import api, copied, methods

OVERVIEW = "<!-- generated: methods -->"
API = "<!-- generated: api -->"
FOREIGN = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+href=\"?https?://"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Completes the navigation: a page per method and study, and pages not listed yet."""
    # Reference kernels need no compiler: quick to start, and the same everywhere.
    kernels.use("reference")
    torch.set_num_threads(1)
    assert config.nav is not None
    named = str(config.nav)
    for section in config.nav:
        if "Methods" in section:
            section["Methods"] += _by_family()
        if "Results" in section:
            pages = sorted(Path(config.docs_dir, "results").glob("*.md"))
            section["Results"] += [f"results/{p.name}" for p in pages if p.name != "index.md"]
        if "Guides" in section:
            others = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
            section["Guides"] += [name for name in others if f"'{name}'" not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    texts = {f"reference/methods/{m.name}.md": methods.page(m) for m in methods.methods()}
    for name, text in (texts | copied.pages(Path(config.docs_dir).parent)).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if OVERVIEW in markdown:
        markdown = markdown.replace(OVERVIEW, methods.overview(methods.methods()))
    if API in markdown:
        markdown = markdown.replace(API, api.page())
    return copied.from_docs(markdown, page.file.src_uri.count("/"))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raises an error for a page that would load resources from another server."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri}: loads from another server: {found[0]}")
    return output


def _by_family() -> list[Any]:
    found: dict[str, list[Any]] = {}
    for m in methods.methods():
        found.setdefault(m.row.family.capitalize(), []).append(f"reference/methods/{m.name}.md")
    return [{family: pages} for family, pages in found.items()]
