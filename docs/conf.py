"""The site (``make docs``): the Markdown files of the repository as they are, and a reference made from the code.

The repository's root is the folder of sources, so that links between README.md, docs/ and bench/results are right both
on the site and where the files are browsed as files.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT / "src")]

from reference import write_pages  # noqa: E402  its folder is on the path from here on

import shardwise  # noqa: E402  see above

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "shardwise"
author = "The shardwise authors"
project_copyright = f"{author}, Apache-2.0"
version = release = shardwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "bench/results/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]

myst_heading_anchors = 4
smartquotes = False  # words of messages and of code stay as they are written

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Collective", "notes_style")]

html_theme = "furo"
html_title = f"shardwise {release}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

#: Asked for by `make docs-links` alone, since it needs the network.
linkcheck_anchors = False
linkcheck_timeout = 20

#: The bar at the left. A page that is in none of these lists is an error.
contents: dict[str, tuple[str, ...]] = {
    "Start": (
        "Start here <docs/start>",
        "Which plan? <docs/which-plan>",
        "Your own model, data and loss <docs/your-own>",
        "Fine-tune <docs/fine-tuning>",
        "Checkpoints <docs/checkpoints>",
        "Launch <docs/launching>",
        "On GPUs <docs/gpus>",
        "Troubleshooting <docs/troubleshooting>",
        "Recipes at scale <docs/recipes>",
    ),
    "Come from": (
        "FSDP, DeepSpeed, Accelerate <docs/migrating>",
        "Other trainers <docs/integrations>",
    ),
    "Guides": (
        "Optimizers <docs/optimizers>",
        "Memory <docs/memory>",
        "Planning <docs/planning>",
        "Tensor parallelism <docs/tensor-parallelism>",
        "Pipeline parallelism <docs/pipeline-parallelism>",
        "Context parallelism <docs/context-parallelism>",
        "Expert parallelism <docs/expert-parallelism>",
        "Evaluate and serve <docs/evaluate-and-serve>",
        "Reports <docs/reports>",
    ),
    "How it works": (
        "What moves when <docs/how-it-works>",
        "Architecture <docs/architecture>",
        "Decisions <docs/reference/decisions>",
    ),
    "Proof": (
        "How it is tested <docs/testing>",
        "What works together <docs/support>",
        "Limits, and other engines <docs/limits>",
        "Measurements <docs/reference/measurements>",
    ),
    "Reference": (
        "Python <docs/reference/api>",
        "Command line <docs/reference/command>",
        "Configuration <docs/reference/configuration>",
        "Examples <docs/reference/examples>",
    ),
    "Project": (
        "Changes <CHANGELOG>",
        "Contribute <CONTRIBUTING>",
        "Security <SECURITY>",
        "Releases <docs/releasing>",
    ),
}

#: Links that work where files are browsed as files, and what they are on the site.
LINKS = (
    (re.compile(r"\]\((?:\.\./)*(?:docs/)?adr\)"), "](/docs/reference/decisions.md)"),
    (re.compile(r"\]\((?:\.\./)*bench/results\)"), "](/docs/reference/measurements.md)"),
    (re.compile(r"\]\((?:\.\./)*examples\)"), "](/docs/reference/examples.md)"),
    (re.compile(r"\]\((?:\.\./)*examples/(\w+)\.py\)"), r"](/docs/reference/examples.md#\1-py)"),
)


def adapt(_: Sphinx, docname: str, source: list[str]) -> None:
    """Give the first page the contents, and every page links to pages in place of folders and programs."""
    for link, target in LINKS:
        source[0] = link.sub(target, source[0])
    if docname == root_doc:
        for caption, pages in contents.items():
            lines = "\n".join(re.sub(r"<(.*)>", r"</\1>", page) for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def leave_out(*asked: object) -> bool | None:
    """Of a class its methods alone are listed: its fields are in its docstring."""
    value = asked[3]
    return None if callable(value) or isinstance(value, property) else True


def describe_calls(*asked: object) -> None:
    """``sw.train`` and ``sw.launch`` are packages that can be called: show the function's text, not the package's."""
    value, lines = asked[3], asked[5]
    if isinstance(value, ModuleType) and isinstance(lines, list):
        lines[:] = (inspect.getdoc(inspect.unwrap(value)) or "").splitlines()  # type: ignore[arg-type]  callable


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    os.environ |= {"NO_COLOR": "1", "COLUMNS": "88", "TERM": "dumb"}
    write_pages(DOCS / "reference")
    app.add_config_value("contents", {}, "env")  # so that a change of it has all pages made again
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", describe_calls, priority=100)  # before napoleon reads it
    app.connect("autodoc-skip-member", leave_out)
