"""Extracts the files that the recipe pages contain."""

import re
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "docs" / "how-to" / "launchers"


def files_of(page: str) -> dict[str, str]:
    """Returns the titled code blocks of a page, by title."""
    text = (RECIPES / f"{page}.md").read_text("utf-8")
    found = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.M | re.S))
    assert found, f"{page}.md has no titled block"
    return found
