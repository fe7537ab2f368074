"""Pages that lie outside docs/: the changelog and the like, with their links made to fit."""

import re
from pathlib import Path

NAMES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def pages(root: Path) -> dict[str, str]:
    """The texts by the name that they have in the site."""
    return {name.lower(): _from_root((root / name).read_text("utf-8")) for name in NAMES}


def _from_root(text: str) -> str:
    """Links from the root of the repository as links from docs/."""
    text = text.replace("](docs/", "](")
    return re.sub(rf"\]\(({'|'.join(NAMES)})", lambda m: f"]({m[1].lower()}", text)


def from_docs(text: str, depth: int) -> str:
    """Links that leave docs/, from a page so many folders deep, to the pages in the site."""
    up = re.escape("../" * (depth + 1))
    pattern = rf"\]\({up}({'|'.join(NAMES)})"
    return re.sub(pattern, lambda m: f"]({'../' * depth}{m[1].lower()}", text)
