"""Settings of Sphinx for the sources that assemble.py writes."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from gradwire.version import VERSION

project = "Gradwire"
author = "The Gradwire authors"
version = release = VERSION

extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Log messages and prompts are text; what Pygments cannot read is shown as it is.
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]
python_maximum_signature_line_length = 80
toc_object_entries = False
add_module_names = False

html_theme = "furo"
html_title = f"Gradwire {VERSION}"
html_static_path = [str(Path(__file__).parents[1] / "site.css")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
# A page that is opened from disk cannot read others to quote them.
html_show_search_summary = False

FOREIGN = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//|<link[^>]+rel=\"stylesheet\"[^>]+https?://"
)


def refuse_foreign(app: Sphinx, error: Exception | None) -> None:
    """Raises an error for a page that would load resources from another server."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        if found := FOREIGN.search(page.read_text("utf-8")):
            raise SphinxError(f"{page.name}: loads from another server: {found[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", refuse_foreign)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
