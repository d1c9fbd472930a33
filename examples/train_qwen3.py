"""Train with UloRL: from the demo on a CPU to the paper's runs on Qwen3.

Without arguments it trains the embedded model on the embedded arithmetic task (examples/configs/demo.yaml):

    python examples/train_qwen3.py
    accelerate launch examples/train_qwen3.py

One of the paper's settings (examples/configs/):

    accelerate launch --config_file examples/accelerate_configs/zero3.yaml \
        examples/train_qwen3.py --config examples/configs/qwen3_4b_128k.yaml

`--engine vllm` decodes with vLLM in the same processes, where it is installed.

Your own data and reward, with rows of `prompt` (or `problem`, `question`) and the columns that the reward reads, such as
{"prompt": "What is 3 + 5?", "answer": "8"}; a text becomes a user message where the tokenizer has a chat template:

    accelerate launch examples/train_qwen3.py --model_name_or_path Qwen/Qwen3-4B --output_dir outputs/mine \
        --dataset_name mine.jsonl --reward my_rewards:my_reward

`--resume_from_checkpoint True` goes on from the newest checkpoint in `output_dir`, a path from that one.
"""

from __future__ import annotations

import os

# Before torch starts its threads: where another process wants a core, threads that spin while they wait slow a small
# model down twentyfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_ulorl import UloRLConfig, UloRLTrainer, VerifierReward
from trl_ulorl.data.arithmetic import arithmetic_dataset, embedded_model_path
from trl_ulorl.evaluation import EvaluationResult, sample_and_score
from trl_ulorl.plots import read_rollouts, rollout_lengths, save_plots
from trl_ulorl.progress import RolloutProgress

DEMO_CONFIG = Path(__file__).parent / "configs" / "demo.yaml"
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


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
        default=None, metadata={"help": "Held-out problems, as `dataset_name`; the arithmetic task has its own."}
    )
    eval_problems: int = field(default=256, metadata={"help": "Held-out problems before and after; 0 for none."})
    eval_k: int = field(default=4, metadata={"help": "Answers per held-out problem: the k of avg@k."})
    engine: str | None = field(
        default=None,
        metadata={"help": "What decodes the rollouts: 'transformers' or 'vllm'. None: as `use_vllm` says."},
    )


def load_rows(name: str, config: str | None, split: str, *, is_chat: bool) -> Dataset:
    """Load rows with a `prompt` column; with a chat template a text becomes a user message."""
    suffix = Path(name).suffix
    if suffix in LOADERS:
        if not Path(name).is_file():
            raise ValueError(f"There is no file {name!r}: check the path given as a data set.")
        rows = load_dataset(LOADERS[suffix], data_files=name, split="train")
    else:
        rows = load_dataset(name, config, split=split)
    column = next((column for column in ("prompt", "problem", "question") if column in rows.column_names), None)
    if column is None:
        raise ValueError(f"{name!r} has the columns {rows.column_names}: name the one with the questions `prompt`.")
    rows = rows.rename_column(column, "prompt") if column != "prompt" else rows
    if is_chat and isinstance(rows[0]["prompt"], str):
        rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return rows


def load_data(script_args: ScriptArguments, seed: int, *, is_chat: bool) -> tuple[Dataset, Dataset | None]:
    """Return the training rows and the held-out ones."""
    if script_args.dataset_name == "arithmetic":
        train = arithmetic_dataset(script_args.num_train_problems, seed=seed, split="train")
    else:
        train = load_rows(
            script_args.dataset_name, script_args.dataset_config, script_args.dataset_split, is_chat=is_chat
        )
    if not script_args.eval_problems:
        return train, None
    if script_args.eval_dataset_name:
        held_out = load_rows(script_args.eval_dataset_name, None, "test", is_chat=is_chat)
        return train, held_out.select(range(min(script_args.eval_problems, len(held_out))))
    if script_args.dataset_name == "arithmetic":
        return train, arithmetic_dataset(script_args.eval_problems, seed=0, split="test")  # the same for every seed
    return train, None


def load_reward(name: str) -> Callable[..., list[float | None]]:
    """Return the verifier, or the function that `module:function` names."""
    if name == "verifier":
        return VerifierReward()
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"`reward` ({name!r}) must be 'verifier' or 'module:function', for instance 'my_rewards:f'.")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), function, None)
    if found is None:
        raise ValueError(f"`reward` ({name!r}): the module {module!r} has no function {function!r}.")
    return found


def model_init_kwargs(training_args: UloRLConfig, model_args: ModelConfig) -> dict[str, Any]:
    """Merge the model arguments into those of the configuration, such as the recipes' rope parameters."""
    kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return {name: value for name, value in kwargs.items() if value is not None}


def with_engine(arguments: list[str]) -> list[str]:
    """Add the `--use_vllm` that `--engine` stands for: the configuration is checked as it is made."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", choices=("transformers", "vllm"))
    engine = parser.parse_known_args(arguments)[0].engine
    if "--use_vllm" in arguments:
        return arguments  # said already; a contradiction is refused below
    return arguments if engine is None else [*arguments, "--use_vllm", str(engine == "vllm")]


def main() -> None:
    arguments = sys.argv[1:]
    if not {"--config", "--model_name_or_path"} & set(arguments):
        arguments = ["--config", str(DEMO_CONFIG), *arguments]
    if not torch.accelerator.is_available() and "--use_cpu" not in arguments:
        arguments += ["--use_cpu", "true"]
    parser = TrlParser((ScriptArguments, UloRLConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(with_engine(arguments))
    if script_args.engine not in (None, "vllm" if training_args.use_vllm else "transformers"):
        raise ValueError(
            f"`engine` ({script_args.engine!r}) contradicts `use_vllm` ({training_args.use_vllm}): in a configuration file "
            "set only `use_vllm`."
        )
    resume = {"true": True, "false": None}.get(
        str(training_args.resume_from_checkpoint).lower(), training_args.resume_from_checkpoint
    )

    model_name = model_args.model_name_or_path or embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(model_name, revision=model_args.model_revision, padding_side="left")
    train, held_out = load_data(script_args, training_args.seed, is_chat=tokenizer.chat_template is not None)
    reward = load_reward(script_args.reward)
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args)
    trainer = UloRLTrainer(
        model=model_name,
        reward_funcs=reward,
        args=training_args,
        train_dataset=train,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RolloutProgress())

    evaluation = None
    if held_out is not None:
        evaluation = HeldOutEvaluation(trainer, held_out, script_args.eval_k, reward, is_resumed=resume is not None)
        trainer.add_callback(evaluation)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        finish(trainer, evaluation)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    trainer.end()  # the trackers, vLLM and the process group


class HeldOutEvaluation(TrainerCallback):
    """Samples the held-out problems before and after training, while the model is set up for generation.

    The result before is kept in the output folder, so that a resumed run still knows it.
    """

    def __init__(
        self, trainer: UloRLTrainer, problems: Dataset, k: int, reward: Callable[..., Any], *, is_resumed: bool
    ) -> None:
        self._sample = partial(sample_and_score, trainer, problems, k=k, reward=reward)
        self._path = Path(trainer.args.output_dir) / "held_out_before.json"
        self._is_resumed = is_resumed
        self.k = k
        self.seconds_before = 0.0
        self.before: EvaluationResult | None = None
        self.after: EvaluationResult | None = None

    def on_train_begin(self, args: UloRLConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_resumed and self._path.exists():
            self.before = EvaluationResult.from_json(self._path.read_text(encoding="utf-8"))
            return
        self.before = self._sample(name="held-out, before")
        self.seconds_before = self.before.seconds
        if state.is_world_process_zero:
            self._path.write_text(self.before.to_json(), encoding="utf-8")

    def on_train_end(self, args: UloRLConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.after = self._sample(name="held-out, after")


def finish(trainer: UloRLTrainer, evaluation: HeldOutEvaluation | None) -> None:
    """Write summary.json and the plots, and print what the run came to."""
    before, after = (evaluation.before, evaluation.after) if evaluation else (None, None)
    folder = Path(trainer.args.output_dir)
    history = trainer.state.log_history
    log = folder / "rollouts.jsonl"
    records = read_rollouts(log) if log.exists() else []
    lengths = rollout_lengths(records)
    entropies = [entry["entropy"] for entry in history if entry.get("entropy") is not None]
    batches_per_step = trainer.args.gradient_accumulation_steps / trainer.args.micro_steps_per_batch
    times = phase_seconds(history, batches_per_step)
    summary: dict[str, Any] = {
        "steps": trainer.state.global_step,
        "train_seconds": train_seconds(history, evaluation),
        "phase_seconds": times,
        "sigma": trainer.args.dmmpts.sigma if trainer.args.dmmpts else None,
        "entropy_first_third": mean(entropies[: len(entropies) // 3]),
        "entropy_last_third": mean(entropies[-(len(entropies) // 3) :]),
        "lengths": {
            "p50": float(np.percentile(lengths, 50)),
            "p99": float(np.percentile(lengths, 99)),
            "max": int(lengths.max()),
        }
        if lengths.size
        else None,
        "ledger": trainer.ledger(),
    }
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            summary[f"accuracy_{name}"] = result.accuracy
            summary[f"standard_error_{name}"] = result.standard_error
            summary[f"truncated_{name}"] = result.truncated_fraction
            summary[f"length_mean_{name}"] = float(result.lengths.mean())
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plots = save_plots(history, records, folder)

    print()
    if before is not None and after is not None:
        print_table(before, after, evaluation.k)
    print_ledger(summary["ledger"])
    print("Where the time went: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items()))
    if summary["lengths"] and entropies:
        sigma = "off" if summary["sigma"] is None else f"{summary['sigma']:g}"
        print(
            f"Output lengths: median {summary['lengths']['p50']:.0f}, p99 {summary['lengths']['p99']:.0f} tokens. "
            f"Entropy in the last third of the steps: {summary['entropy_last_third']:.3f} nats (sigma {sigma})."
        )
    print(f"Saved to {folder}: the model, summary.json, {', '.join(path.name for path in plots)}")


def mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def train_seconds(history: list[dict[str, Any]], evaluation: HeldOutEvaluation | None) -> float:
    """Return the wall-clock time of training, without the evaluation that was made at its start."""
    total = sum(entry.get("train_runtime") or 0.0 for entry in history[-1:])
    return total - (evaluation.seconds_before if evaluation else 0.0)


def phase_seconds(history: list[dict[str, Any]], batches_per_step: float) -> dict[str, float]:
    """Share the seconds of all steps out over decoding, waiting for rewards and ranks, and updating the model.

    A logged value is the mean over the steps since the last log, and for the rollout over their batches.
    """
    seconds = dict.fromkeys(("decode", "score", "exchange", "update"), 0.0)
    last_step = 0
    for entry in (entry for entry in history if "step_time" in entry):
        steps, last_step = entry["step"] - last_step, entry["step"]
        parts = {name: entry.get(f"rollout/{name}_seconds") or 0.0 for name in ("decode", "score", "exchange")}
        for name, value in parts.items():
            seconds[name] += value * batches_per_step * steps
        seconds["update"] += (entry["step_time"] - sum(parts.values()) * batches_per_step) * steps
    return seconds


def print_table(before: EvaluationResult, after: EvaluationResult, k: int) -> None:
    problems = len(before.is_correct)
    gain = 100 * (after.accuracy - before.accuracy)
    print(f"Held-out problems: {problems}, {k} answers each")
    print(f"            avg@{k:<3} standard error   truncated   mean length")
    for name, result in (("before", before), ("after", after)):
        print(
            f"  {name:8}  {100 * result.accuracy:5.1f} %  {100 * result.standard_error:12.1f}   "
            f"{result.truncated_fraction:8.1%}   {result.lengths.mean():8.1f}"
        )
    print(f"  gain      {gain:+5.1f} points")


def print_ledger(ledger: dict[str, dict[str, int]]) -> None:
    print("Ledger, in which the first number is the sum of the others:")
    for part, entries in ledger.items():
        (first, total), *rest = entries.items()
        print(f"  {part}: {total} {first} = " + " + ".join(f"{n} {name.replace('_', ' ')}" for name, n in rest))


if __name__ == "__main__":
    main()
