"""`trl-ulorl clean`: a data set of questions with references, cleaned by rules and models, with an audit of every row."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .inputs import add_engine, count, count_or_zero, number, positive, read_endpoint

if TYPE_CHECKING:
    from ..data.audit import Summary
    from ..data.cleaning import CleaningSettings

_DESCRIPTION = """
Clean training data: take out what can't be verified, guessed answers, duplicates, leaked evaluation problems and, with
models, what is too easy or wrong. Writes kept.jsonl, audit.jsonl (the fate of every row), audit.html and summary.json. If it
is interrupted, start it again: it goes on where it stopped.
"""
_EXAMPLE = """
examples
  trl-ulorl clean BytedTsinghua-SIA/DAPO-Math-17k --output outputs/clean --against aime_2025 beyond_aime
  trl-ulorl clean problems.jsonl --output outputs/clean --model Qwen/Qwen3-4B --engine vllm
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "clean",
        help="clean training data, with an audit",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("input", metavar="INPUT", help="a .jsonl, .json, .parquet or .csv file, or a name on the Hub")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the results")

    data = parser.add_argument_group("data")
    data.add_argument("--config", help="configuration of a Hub data set")
    data.add_argument("--split", default="train", help="split of a Hub data set (default: train)")
    data.add_argument("--streaming", action="store_true", help="read rows on the way, without a copy in the cache")
    data.add_argument(
        "--prompt_column", metavar="NAME", help="column of the questions, if its name is not a usual one"
    )
    data.add_argument("--answer_column", metavar="NAME", help="column of the references; a.b is a nested one")
    data.add_argument(
        "--num_proc",
        type=count,
        default=_usable_cpus(),
        metavar="N",
        help="processes for the rules (default: all cores)",
    )

    rules = parser.add_argument_group("rules")
    rules.add_argument("--skip", nargs="+", default=[], metavar="RULE", help="rules to leave out")
    rules.add_argument(
        "--max_answer_characters",
        type=count,
        default=100,
        metavar="N",
        help="longest reference to keep (default: 100)",
    )
    rules.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SET",
        help="evaluation sets that must not leak: aime_2025, beyond_aime, files, Hub names",
    )

    models = parser.add_argument_group("models")
    models.add_argument("--model", metavar="MODEL", help="drop what this model always answers correctly")
    models.add_argument("--samples", type=count, default=8, metavar="K", help="its tries of each row (default: 8)")
    models.add_argument(
        "--reference_models",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="drop references that these models agree against",
    )
    models.add_argument(
        "--rewrite_model", metavar="MODEL", help="rewrite what no rule can turn into short-answer form"
    )
    add_engine(
        models,
        default="transformers",
        help="in this process, or an endpoint that serves the models (default: transformers)",
        has_endpoint=True,
    )
    models.add_argument(
        "--instruction", metavar="TEXT", help="added to questions to answer (default: reason, and box the answer)"
    )
    models.add_argument("--temperature", type=positive, default=0.85, help="(default: 0.85)")
    models.add_argument("--top_p", type=partial(number, least=1e-6, most=1), default=0.95, help="(default: 0.95)")
    models.add_argument("--top_k", type=count_or_zero, default=20, help="0 for no limit (default: 20)")
    models.add_argument("--max_tokens", type=count, default=8192, metavar="N", help="of an answer (default: 8192)")
    models.add_argument("--batch_size", type=count, default=32, metavar="N", help="answers side by side (default: 32)")
    models.add_argument("--seed", type=count_or_zero, default=0, help="of the sampling (default: 0)")


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from ..data.cleaning import clean

    try:
        summary = clean(_settings(options), options.output, num_proc=options.num_proc)
    except ValueError as error:
        sys.stderr.write(f"trl-ulorl clean: {error}\n")
        return 2
    sys.stdout.write(_report(summary, options.output))
    return 0


def _settings(options: argparse.Namespace) -> CleaningSettings:
    from ..data.cleaning import CleaningSettings
    from ..data.model_rules import INSTRUCTION, ModelSettings
    from ..data.models import SamplingSettings

    return CleaningSettings(
        source=options.input,
        config=options.config,
        split=options.split,
        streaming=options.streaming,
        prompt_column=options.prompt_column,
        answer_column=options.answer_column,
        skip=tuple(options.skip),
        max_answer_characters=options.max_answer_characters,
        against=tuple(options.against),
        models=ModelSettings(
            model=options.model,
            samples=options.samples,
            reference_models=tuple(options.reference_models),
            rewrite_model=options.rewrite_model,
            instruction=INSTRUCTION if options.instruction is None else options.instruction,
            seed=options.seed,
            sampling=SamplingSettings(
                engine=options.engine,
                endpoint=read_endpoint(options),
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                max_tokens=options.max_tokens,
                batch_size=options.batch_size,
            ),
        ),
    )


def _report(summary: Summary, output: Path) -> str:
    lines = [f"{'rule':16} {'changed':>9} {'dropped':>9}"]
    lines += [f"{name:16} {count['changed']:9,} {count['dropped']:9,}" for name, count in summary.counts.items()]
    lines += [
        "",
        f"{summary.rows:,} rows: {summary.kept:,} kept, {summary.changed:,} of them changed; {summary.rows - summary.kept:,} dropped.",
        f"Read {output / 'audit.html'}; every row stands in {output / 'audit.jsonl'}.",
    ]
    return "\n".join(lines) + "\n"
