"""`trl-ulorl doctor`: whether what training rests on holds for a model, an engine and a configuration, here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .inputs import add_engine, check_model_folder, count

if TYPE_CHECKING:
    from ..doctor_patient import Check
    from ..trainer import UloRLTrainer
    from .train import ScriptArguments

logger = logging.getLogger(__name__)

_DESCRIPTION = """
Check a model, an engine and a configuration before a long run: segments, log-probabilities, the length limit, stale
caches, positions, a kill and a resume, and memory; measure the starting entropy and propose sigma and tau. Without
arguments it examines the embedded model on the embedded task. Options of training follow, as of `trl-ulorl train`.
"""
_EXAMPLE = """
example: one of the recipes, on outputs of up to 2,048 tokens, decoded with vLLM
  trl-ulorl doctor --config examples/configs/qwen3_4b_32k.yaml --engine vllm --tokens 2048
"""
_DEFAULTS = {"max_completion_length": 128, "num_segments": 4, "per_device_train_batch_size": 32, "bf16": "false"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check model, engine and configuration before a run",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a training configuration in YAML")
    parser.add_argument(
        "--model", metavar="MODEL", help="path or name on the Hub (default: the configuration's, or embedded)"
    )
    add_engine(parser, help="what decodes (default: the configuration's)")
    parser.add_argument("--problems", type=count, default=32, help="prompts to decode (default: 32)")
    parser.add_argument("--tokens", type=count, default=256, help="most tokens of an output here (default: 256)")
    parser.add_argument(
        "--processes",
        type=count,
        default=1,
        help="processes of the training on this machine, for memory (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, takes_training_options=True)


def run(options: argparse.Namespace) -> int:
    """Run the checks; the exit code is 1 if one fails, 2 for input that no trainer can be built from."""
    with _output_to_stderr(), tempfile.TemporaryDirectory() as folder:
        try:
            trainer = _build_trainer(options, folder)
        except (ValueError, TypeError, ImportError, OSError) as error:
            sys.stderr.write(f"trl-ulorl doctor: {error}\n")
            return 2
        try:
            checks = list(_examined(trainer, options))
        finally:
            trainer.end()
    is_healthy = all(check.ok for check in checks)
    if options.json:
        from ..records import finite

        content = {"ok": is_healthy, "checks": [dataclasses.asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(finite(content), indent=2) + "\n")
    else:
        sys.stdout.write(_table(checks))
    return 0 if is_healthy else 1


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Keep what libraries print out of the report."""
    with redirect_stdout(sys.stderr):
        yield


# ---------------------------------------------------------------------------------------------------------- the patient


def _build_trainer(options: argparse.Namespace, folder: str) -> UloRLTrainer:
    """Build the trainer that the configuration describes, with prompts but without the real rewards."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transformers import AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    from ..data.arithmetic import embedded_model_path
    from ..trainer import UloRLTrainer
    from .training import model_init_kwargs, parse

    data, args, model_args = parse(_arguments(options, folder))
    model_name = options.model or model_args.model_name_or_path or str(embedded_model_path())
    check_model_folder(model_name)
    model_args.model_name_or_path = model_name
    args.model_init_kwargs = model_init_kwargs(args, model_args, data.rope_parameters)
    tokenizer = AutoTokenizer.from_pretrained(model_name, revision=model_args.model_revision, padding_side="left")
    rows = _prompts(data, max(options.problems, args.groups_per_batch), is_chat=tokenizer.chat_template is not None)

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    reward.__name__ = args.correctness_func or "reward"
    return UloRLTrainer(
        model=model_name,
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def _arguments(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the arguments of training: the configuration's, those given, and what an examination changes."""
    given = list(options.training_options)
    arguments = [] if options.config is None else ["--config", str(options.config)]
    if options.config is None:
        for name, value in _DEFAULTS.items():
            if f"--{name}" not in given:
                arguments += [f"--{name}", str(value)]
    arguments += given
    if options.engine is not None:
        arguments += ["--engine", options.engine]
    return [
        *arguments,
        "--output_dir",
        folder,
        "--report_to",
        "none",
        "--log_rollouts",
        "false",
        "--push_to_hub",
        "false",
    ]


def _prompts(data: ScriptArguments, num_rows: int, *, is_chat: bool) -> Any:
    from ..data.arithmetic import arithmetic_dataset
    from ..evaluation.problems import as_messages, load_rows

    if data.dataset_name == "arithmetic":
        return arithmetic_dataset(num_rows, seed=0, split="train")
    rows = load_rows(data.dataset_name, config=data.dataset_config, split=data.dataset_split)
    rows = rows.select(range(min(num_rows, len(rows)))).select_columns(["prompt"])
    return as_messages(rows) if is_chat else rows


def _examined(trainer: UloRLTrainer, options: argparse.Namespace) -> Iterator[Check]:
    from .. import doctor, doctor_needs, doctor_patient
    from ..doctor_resume import check_resume

    patient = doctor_patient.Patient(trainer, num_prompts=options.problems, num_tokens=options.tokens)
    sizes = {"num_segments": trainer.args.num_segments, "num_generations": trainer.args.num_generations}
    checks: list[Callable[[], Check]] = [
        *(partial(check, patient) for check in doctor.CHECKS),
        partial(check_resume, Path(cast(str, trainer.args.output_dir)), **sizes),
        partial(doctor_needs.check_memory, patient, doctor_needs.Machine.here(), options.processes),
        partial(doctor_needs.measure_entropy, patient),
    ]
    for check in checks:
        started = time.perf_counter()
        name = cast(Any, check).func.__name__
        try:
            yield check()
        except Exception as error:  # a check that can't be made has failed; the others still tell more
            logger.exception("%s", name)
            yield doctor_patient.Check(
                name, False, {"error": type(error).__name__}, f"{type(error).__name__}: {error}"
            )
        sys.stderr.write(f"{name}: {time.perf_counter() - started:.0f} s\n")


# --------------------------------------------------------------------------------------------------------------- report


def _table(checks: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = [f"{'ok  ' if check.ok else 'FAIL'}  {check.name.ljust(width)}  {check.message}" for check in checks]
    lines += ["", "Figures"]
    for check in checks:
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in check.figure.items())
        lines.append(f"  {check.name.ljust(width)}  {shown}")
    failed = sum(not check.ok for check in checks)
    return (
        "\n".join([*lines, "", "All is well." if not failed else f"{failed} of {len(checks)} checks failed."]) + "\n"
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)
