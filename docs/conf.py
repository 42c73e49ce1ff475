"""The site of these pages, which are Markdown that GitHub shows, too: ``make docs``
writes docs/_build.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
project = html_title = "UNO on Ray"
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "beside": "{{path}}"}
smartquotes = False  # -- stays what a flag begins with
copybutton_prompt_text = "$ "
html_theme = "furo"
html_static_path, html_css_files = ["site.css"], ["site.css"]
html_copy_source = html_show_copyright = False


class Notebook(MystParser):
    """A notebook's cells as one page of Markdown, code in fences."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Add the cells of ``inputstring``, a notebook's JSON, to ``document``."""
        cells = [
            (cell["cell_type"], "".join(cell["source"]))
            for cell in json.loads(inputstring)["cells"]
        ]
        texts = [
            f"```python\n{text}\n```" if kind == "code" else text
            for kind, text in cells
        ]
        super().parse("\n\n".join(texts), document)


def link_beside_the_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """A link to what lies beside docs/, as ``../README.md``, leads there from the page
    that is built; one to nothing stays, for the parser to warn of.
    """
    here, built = app.env.doc2path(page).parent, Path(app.outdir, page).parent

    def there(match: re.Match[str]) -> str:
        target = (here / match[1]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return match[0]
        return f"](beside:{Path(os.path.relpath(target, built)).as_posix()})"

    source[0] = re.sub(r"\]\((\.\./[^()\s#]+)(?:#[\w-]+)?\)", there, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """What the pages need beyond the extensions."""
    app.add_source_parser(Notebook)
    app.add_lexer("mermaid", TextLexer)  # GitHub draws it
    app.connect("source-read", link_beside_the_pages)
    return {"parallel_read_safe": True}
