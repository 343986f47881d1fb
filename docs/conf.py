"""How Sphinx builds the site: ``make docs`` writes it to build/docs. Every warning is an error."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = "Tandem"
with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as pyproject:
    release = tomllib.load(pyproject)["project"]["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_show_copyright = False
html_title = f"Tandem {release}"
html_static_path = ["_static"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
