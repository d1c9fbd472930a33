"""`trl-ulorl eval`: avg@k, pass@k and maj@k of a model on a set of problems."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import (
    add_engine,
    check_model_folder,
    count,
    count_or_zero,
    load_reward,
    positive,
    read_endpoint,
    share,
    spellings,
)

if TYPE_CHECKING:
    from datasets import Dataset

    from ..endpoint import EndpointSettings
    from ..evaluation.report import OtherRun
    from ..evaluation.served import ServedEvaluation
    from ..evaluation.standalone import Evaluation

_DESCRIPTION = """
Sample a model's answers to a set of problems, k each, judge them, and report avg@k, pass@k and maj@k with standard errors,
lengths and truncation. The result is written as JSON, each sample beside it as it ends: the same command goes on where it
was stopped. Several processes share the problems out under `accelerate launch -m trl_ulorl.cli eval …`.
"""
_EXAMPLE = """
examples: the paper's evaluation, and a comparison of another model with it
  trl-ulorl eval --model Qwen/Qwen3-4B --dataset aime_2025 --output base.json --engine vllm
  trl-ulorl eval --model outputs/mine --dataset aime_2025 --output mine.json --engine vllm --compare base.json
a model that `vllm serve Qwen/Qwen3-4B` serves
  trl-ulorl eval --model Qwen/Qwen3-4B --dataset aime_2025 --output base.json --engine endpoint --base_url http://localhost:8000/v1
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "eval",
        help="measure avg@k, pass@k and maj@k of a model",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model", required=True, help="folder, Hub or endpoint's name; 'embedded' is the package's own"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="where the result goes")
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER.json", help="result to test against, problem by problem"
    )

    data = parser.add_argument_group("problems")
    data.add_argument(
        "--dataset",
        required=True,
        metavar="NAME",
        help="aime_2025, beyond_aime, arithmetic (embedded), a Hub name, or a .jsonl, .json, .parquet or .csv file",
    )
    data.add_argument(*spellings("--dataset_config"), metavar="NAME", help="configuration of a Hub data set")
    data.add_argument(*spellings("--dataset_split"), default="test", metavar="NAME", help="its split (default: test)")
    data.add_argument(
        *spellings("--prompt_column"), metavar="NAME", help="of the questions (default: the first usual name)"
    )
    data.add_argument(
        *spellings("--answer_column"),
        metavar="NAME",
        help="of the references, a.b for a nested one (default: likewise)",
    )
    data.add_argument(*spellings("--num_problems"), type=count, metavar="N", help="only the first N problems")
    data.add_argument(
        "--instruction", metavar="TEXT", help="appended to each question (default: none, as in training)"
    )
    data.add_argument(
        "--reward", default="verifier", metavar="NAME", help="'verifier', or module:function giving 1, 0 or None"
    )

    sampling = parser.add_argument_group("sampling, by default the paper's")
    sampling.add_argument("--k", type=count, default=32, help="of avg@k, pass@k and maj@k (default: 32)")
    sampling.add_argument(
        *spellings("--num_samples"), type=count, metavar="N", help="answers to each problem, at least k (default: k)"
    )
    sampling.add_argument("--temperature", type=positive, default=0.85, help="(default: 0.85)")
    sampling.add_argument(*spellings("--top_p"), type=share, default=0.95, help="1 for no limit (default: 0.95)")
    sampling.add_argument(*spellings("--top_k"), type=count_or_zero, default=20, help="0 for no limit (default: 20)")
    sampling.add_argument(
        *spellings("--max_completion_length"),
        type=count,
        metavar="TOKENS",
        help="(default: what the model's positions leave behind the prompt)",
    )
    sampling.add_argument("--seed", type=count_or_zero, default=0, help="(default: 0)")

    engine = parser.add_argument_group("engine")
    add_engine(
        engine,
        default="transformers",
        help="in this process, or an endpoint that serves the model (default: transformers)",
        has_endpoint=True,
    )
    engine.add_argument(
        "--api", choices=("chat", "completions"), default="chat", help="what the endpoint is asked for (default: chat)"
    )
    engine.add_argument(
        *spellings("--batch_size"), type=count, default=32, help="answers that decode together (default: 32)"
    )
    engine.add_argument(
        *spellings("--rope_parameters"),
        metavar="JSON",
        help="YaRN for more positions, in transformers' spelling (default: the model's own)",
    )
    engine.add_argument(*spellings("--model_revision"), metavar="NAME", help="branch, tag or commit on the Hub")
    engine.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="of the weights"
    )
    engine.add_argument(
        *spellings("--gpu_memory_utilization"), type=share, default=0.9, help="memory share of vLLM (default: 0.9)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code; what fails after the input was read is raised."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see `trl-ulorl train`
    try:
        reward = load_reward(options.reward)
        other, problems, evaluation = _prepared(options)
    except ValueError as error:
        sys.stderr.write(f"trl-ulorl eval: {error}\n")
        return 2
    from ..evaluation.problems import problem_ids
    from ..evaluation.report import figures, table
    from ..records import write_json

    if evaluation.num_kept and evaluation.is_main_process:
        sys.stderr.write(f"{evaluation.num_kept} answers are there already, {evaluation.num_missing} are missing\n")
    if evaluation.num_too_long and evaluation.is_main_process:
        sys.stderr.write(
            f"{evaluation.num_too_long} of {len(problems)} prompts are as long as the model's positions or longer: no answer fits "
            "behind them, and they count as truncated\n"
        )
    result = evaluation.run(reward)
    if evaluation.is_main_process:
        values: dict[str, Any] = figures(result, k=options.k, ids=problem_ids(problems))
        if other is not None:
            values["comparison"] = other.compared(values)
        values["num_too_long"] = evaluation.num_too_long
        write_json(options.output, {**values, "settings": evaluation.description})
        sys.stdout.write(table(values))
    evaluation.close()
    return 0


def _prepared(options: argparse.Namespace) -> tuple[OtherRun | None, Dataset, Evaluation | ServedEvaluation]:
    """Read all input, before a model is loaded."""
    num_samples = options.k if options.num_samples is None else options.num_samples
    if options.k > num_samples:
        raise ValueError(
            f"`--k` ({options.k}) is larger than `--num_samples` ({num_samples}): a figure about k answers needs k of them. "
            "Sample more, or lower `--k`."
        )
    if options.output.is_dir() or not options.output.resolve().parent.is_dir():
        raise ValueError(
            f"`--output` ({options.output}) must be a file in a folder that exists. Make the folder first."
        )
    if not 0 < options.top_p <= 1:
        raise ValueError(f"`--top_p` ({options.top_p:g}) must be above 0: no token would be left. 1 is no limit.")

    endpoint = read_endpoint(options)
    from ..data.arithmetic import embedded_model_path
    from ..evaluation.engines import EvaluationSettings, load_tokenizer
    from ..evaluation.problems import as_messages, load_problems, problem_ids
    from ..evaluation.report import OtherRun
    from ..evaluation.standalone import Evaluation

    other = None if options.compare is None else OtherRun(options.compare)
    problems = load_problems(
        options.dataset,
        config=options.dataset_config,
        split=options.dataset_split,
        prompt_column=options.prompt_column,
        answer_column=options.answer_column,
        needs_answers=options.reward == "verifier",
        num_problems=options.num_problems,
    )
    labels = {name: getattr(options, name) for name in ("dataset", "dataset_config", "dataset_split", "reward")}
    if endpoint is not None:
        problems, served = _served(options, problems, endpoint, labels)
        if other is not None:
            other.check(problem_ids(problems))
        return other, problems, served
    if options.model != "embedded":
        check_model_folder(options.model)
    settings = EvaluationSettings(
        model=embedded_model_path() if options.model == "embedded" else options.model,
        num_samples=num_samples,
        revision=options.model_revision,
        **{
            name: getattr(options, name)
            for name in ("temperature", "top_p", "top_k", "max_completion_length", "engine", "batch_size", "seed")
        },
        dtype=options.dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        rope_parameters=options.rope_parameters,
    )
    tokenizer = load_tokenizer(settings)
    if tokenizer.chat_template is not None or options.instruction:
        problems = as_messages(problems, options.instruction)
    if other is not None:
        other.check(problem_ids(problems))
    return other, problems, Evaluation(problems, settings, options.output, tokenizer, labels)


def _served(
    options: argparse.Namespace, problems: Dataset, endpoint: EndpointSettings, labels: dict[str, Any]
) -> tuple[Dataset, ServedEvaluation]:
    from ..evaluation.problems import as_messages
    from ..evaluation.served import ServedEvaluation, ServedSettings

    settings = ServedSettings(
        model=options.model,
        num_samples=options.k if options.num_samples is None else options.num_samples,
        **{
            name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "max_completion_length", "seed")
        },
    )
    if options.api == "chat":
        problems = as_messages(problems, options.instruction)
    elif options.instruction:
        raise ValueError(
            f"`--instruction` ({options.instruction!r}) goes into a user message, but `--api completions` continues texts as "
            "they are. Write it into the problems, or ask for chat completions."
        )
    elif not isinstance(problems[0]["prompt"], str):
        raise ValueError(
            "The prompts are lists of messages, but `--api completions` continues texts. Ask for chat completions, or pass "
            "prompts as texts."
        )
    return problems, ServedEvaluation(problems, settings, endpoint, options.output, labels)
