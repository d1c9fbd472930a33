"""Blocks of code in the documents, and how they are run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

RUN_AT_ONCE = {"CONTRIBUTING", "data", "evaluation", "rewards"}
RUN_WITH_STAND_INS = {"README", "index", "judge", "plan", "quickstart", "resume"}
"""Pages whose Python needs a download, a server or minutes: tests/integration/test_doc_runs.py."""


def blocks(page, language):
    """Return the blocks of one language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_page(name, replaced=None, namespace=None):
    """Run the Python on a page, one block after the other, as a reader would in one session.

    Args:
        name: Name of the page, without its folder and ending.
        replaced: Texts and what stands for them; each must occur.
        namespace: Names that are there from the start.

    Returns:
        The names that are there at the end.
    """
    (page,) = (page for page in PAGES if page.stem == name)
    source = "\n".join(blocks(page, "python"))
    for old, new in (replaced or {}).items():
        assert old in source, f"{page.name} no longer says {old!r}"
        source = source.replace(old, new)
    namespace = {"__name__": f"docs_{name}", **(namespace or {})}
    exec(compile(source, str(page), "exec"), namespace)  # noqa: S102 - our own text
    return namespace
