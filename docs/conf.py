"""The site that `make docs` builds. Its pages are plain Markdown, to be read on a code host too."""

project = "ultraep_serve"
extensions = ["myst_parser"]
exclude_patterns = ["images", "examples"]
html_theme = "furo"
html_title = "ultraep_serve"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"

myst_heading_anchors = 3  # as code hosts make them, so that links lead there in both places
nitpicky = True
