"""How `make book` turns the lessons into a site: Sphinx with MyST-NB, from the stored outputs."""

import base64
import hashlib
import json
from pathlib import Path

import jupyter_server_mathjax
from docutils import nodes
from sphinx.application import Sphinx

project = "cpref"
author = "the authors of cpref"
project_copyright = "the authors of cpref, CC BY 4.0"
extensions = ["myst_nb", "sphinx.ext.mathjax"]
nb_execution_mode = "off"  # why: the lessons are stored executed, and tested so
nb_mime_priority_overrides = [  # why: a widget without its kernel shows nothing; its picture does
    ("html", "application/vnd.jupyter.widget-view+json", None),
]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["build"]
suppress_warnings = [
    "mystnb.unknown_mime_type",
    "misc.highlighting_failure",  # why: a cell with a magic is not Python
]
html_static_path = [str(Path(jupyter_server_mathjax.__file__).parent / "static")]
mathjax_path = "MathJax.js?config=TeX-AMS-MML_HTMLorMML-full"  # why: the site works offline
html_theme = "furo"
html_title = "Context parallelism, built by hand"
html_show_sourcelink = False


def _words() -> dict[str, str]:
    """The alternative text of each stored picture, by the name that MyST-NB gives to its file."""
    words = {}
    for path in Path(__file__).parent.glob("*/*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                alt = output.get("metadata", {}).get("image/png", {}).get("alt")
                if alt:
                    png = base64.b64decode(output["data"]["image/png"])
                    words[hashlib.sha256(png).hexdigest()] = alt
    return words


def _say_what_pictures_show(app: Sphinx, doctree: nodes.document) -> None:
    for image in doctree.findall(nodes.image):
        image["alt"] = _WORDS.get(Path(image["uri"]).stem, image.get("alt", ""))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _say_what_pictures_show)


_WORDS = _words()
