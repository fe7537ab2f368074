"""The files that the pages of recipes consist of."""

import re
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def files_of(page: str) -> dict[str, str]:
    """The titled blocks of a page, by their titles."""
    text = (RECIPES / f"{page}.md").read_text("utf-8")
    found = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.M | re.S))
    assert found, f"{page}.md has no titled block"
    return found
