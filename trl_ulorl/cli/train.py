"""`trl-ulorl train`: train from a configuration file or options."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field, fields

_DESCRIPTION = """
Train with UloRL on your data, from a configuration file, options, or both: options win. It runs under `accelerate launch -m
trl_ulorl.cli train …` on several processes. The output folder gets the model, summary.json, plots and checkpoints.
"""
_EPILOG = """
every field of UloRLConfig, of TRL's GRPOConfig and of its ModelConfig is an option too, such as
  --model_name_or_path NAME  --output_dir DIR  --max_completion_length TOKENS  --num_segments N  --dmmpts none
  --resume_from_checkpoint True  --push_to_hub True  --hub_model_id NAME
`--help_all` lists them all, after some seconds; docs/config.md explains those that UloRL adds

examples:
  trl-ulorl train --config examples/configs/qwen3_4b_32k.yaml
  trl-ulorl train --model_name_or_path Qwen/Qwen3-4B --dataset_name mine.jsonl --output_dir outputs/mine --push_to_hub True \
      --max_completion_length 16384 --num_segments 4 --gradient_accumulation_steps 16
`--model_name_or_path embedded` is the package's own small model, which needs no download
"""


@dataclass
class ScriptArguments:
    """What to train on, and how to judge it."""

    dataset_name: str = field(
        default="arithmetic",
        metadata={"help": "A Hub name, a local .jsonl/.json/.parquet/.csv file, or 'arithmetic', the embedded task."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    reward: str = field(
        default="verifier", metadata={"help": "'verifier', or 'module:function' for a reward function of your own."}
    )
    num_train_problems: int = field(default=20_000, metadata={"help": "Problems drawn for the arithmetic task."})
    eval_dataset_name: str | None = field(
        default=None,
        metadata={"help": "Held-out problems, as `dataset_name`, or a benchmark; the arithmetic task has its own."},
    )
    eval_problems: int = field(default=256, metadata={"help": "Held-out problems before and after; 0 for none."})
    eval_k: int = field(default=4, metadata={"help": "Answers per held-out problem: the k of avg@k."})
    eval_every: int | None = field(
        default=None, metadata={"help": "Steps between evaluations on them during training; None for none."}
    )
    engine: str | None = field(
        default=None,
        metadata={"help": "What decodes the rollouts: 'transformers' or 'vllm'. None: as `use_vllm` says."},
    )
    rope_parameters: dict | str | None = field(  # type: ignore[type-arg]
        default=None,
        metadata={
            "help": "YaRN for more positions, as JSON in transformers' spelling; the model's rope_theta is kept."
        },
    )


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser; its options are parsed by TRL, which takes seconds to import."""
    rows = ["options", f"  {'--config FILE.yaml':22} Configuration file, for instance one of examples/configs."]
    for each in fields(ScriptArguments):
        default = "" if each.default is None else f" (default: {each.default})"
        rows.append(f"  {'--' + each.name:22} {each.metadata['help']}{default}")
    parser = commands.add_parser(
        "train",
        help="train with UloRL",
        description=_DESCRIPTION,
        epilog="\n".join(rows) + "\n" + _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="trl-ulorl train [--config FILE.yaml] [options]",
    )
    parser.set_defaults(run=run, takes_training_options=True)
    parser.add_argument("--help_all", action="store_true", help="show every option and exit")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    # Before torch starts its threads: where another process wants a core, threads that spin while they wait slow a small
    # model down twentyfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments: list[str] = ["--help"] if options.help_all else options.training_options
    if not {"--config", "--model_name_or_path", "--help"} & {each.partition("=")[0] for each in arguments}:
        sys.stderr.write(
            "trl-ulorl train: neither a configuration nor a model is given, and one of them says what to train. Pass "
            "`--config FILE.yaml` or `--model_name_or_path NAME`.\n"
        )
        return 2
    from .training import main

    return main(arguments)
