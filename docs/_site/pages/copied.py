"""Pages from outside docs/, such as the changelog, with their links adapted."""

import re
from pathlib import Path

NAMES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def pages(root: Path) -> dict[str, str]:
    """Returns the texts by their name in the site."""
    return {name.lower(): _from_root((root / name).read_text("utf-8")) for name in NAMES}


def _from_root(text: str) -> str:
    """Turns links relative to the repository's root into links relative to docs/."""
    text = text.replace("](docs/", "](")
    return re.sub(rf"\]\(({'|'.join(NAMES)})", lambda m: f"]({m[1].lower()}", text)


def from_docs(text: str, depth: int) -> str:
    """Turns links that leave docs/, on a page `depth` folders deep, into links inside the site."""
    up = re.escape("../" * (depth + 1))
    pattern = rf"\]\({up}({'|'.join(NAMES)})"
    return re.sub(pattern, lambda m: f"]({'../' * depth}{m[1].lower()}", text)
