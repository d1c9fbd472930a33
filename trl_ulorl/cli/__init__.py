"""The command line: `trl-ulorl <command>`. Arguments are parsed first; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import clean, doctor, plan, report, train, verify
from . import eval as evaluate
from .inputs import CommandParser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all commands; each leaves the function that runs it in `run`."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="trl-ulorl", description="Reinforcement learning on ultra-long outputs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train.add_parser(commands)
    evaluate.add_parser(commands)
    clean.add_parser(commands)
    verify.add_parser(commands)
    plan.add_parser(commands)
    doctor.add_parser(commands)
    report.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those of the command line if None.

    Returns:
        The exit code: 0 done, 1 failed, 2 bad input.
    """
    options, others = build_parser().parse_known_args(arguments)
    options.training_options = others
    return int(options.run(options))
