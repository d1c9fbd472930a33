"""`trl-ulorl report`: a run in one HTML file."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from .inputs import check_output

_DESCRIPTION = """
Write what a training run was and came to into one HTML file that needs no network: settings, curves, the rollout timeline,
lengths and ages of what was generated against what was trained on, the ledger, times, the verifier's stages and sample
completions. It may be called while the run goes on.
"""
_EXAMPLE = """
example
  trl-ulorl report outputs/demo
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="write a run's report as one HTML file",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the `output_dir` of the run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="where to write it (default: RUN_DIR/report.html)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    output = options.output or options.folder / "report.html"
    try:
        _check_packages()
        from ..report.run import read_run

        content = read_run(options.folder)
        if output.is_dir():
            raise ValueError(f"`--output` ({output}) is a folder. Name a file.")
        check_output(output)
    except (ValueError, ImportError) as error:
        sys.stderr.write(f"trl-ulorl report: {error}\n")
        return 2
    from ..records import write_text
    from ..report.page import render

    write_text(output, render(content))
    sys.stdout.write(f"{output} ({output.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def _check_packages() -> None:
    for module in ("plotly", "jinja2"):
        if find_spec(module) is None:
            raise ImportError(f'the report needs {module}, which is not installed: `pip install "trl-ulorl[report]"`.')
