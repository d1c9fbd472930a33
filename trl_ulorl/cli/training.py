"""The training script: what `trl-ulorl train` and examples/train_qwen3.py run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from .. import UloRLConfig, UloRLTrainer
from ..checkpoints import newest_step
from ..data.arithmetic import arithmetic_dataset, embedded_model_path
from ..data.sources import is_local
from ..evaluation import EvaluationCallback
from ..evaluation.problems import as_messages, load_problems, load_rows, with_answer_column
from ..positions import check_complete, extended_positions
from ..progress import RolloutProgress
from ..rollout.state import StateError
from .inputs import check_config_file, check_model_folder, load_reward, refuse_unknown, with_use_vllm
from .summary import finish
from .train import ScriptArguments


def main(arguments: list[str]) -> int:
    """Train from command-line arguments: data, trainer, evaluation before and after, the model, and the Hub.

    Args:
        arguments: `--config` and options of `ScriptArguments`, `UloRLConfig` and TRL's `ModelConfig`.

    Returns:
        The exit code: 0 done, 2 bad input, which is explained; what fails in the run is raised.
    """
    try:
        script_args, training_args, model_args = parse(arguments)
        trainer, evaluation = build(script_args, training_args, model_args)
    except (ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"trl-ulorl train: {error}\n")
        return 2
    try:
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(training_args))
    except StateError as error:  # of the checkpoint to resume from
        sys.stderr.write(f"trl-ulorl train: {error}\n")
        return 2
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        finish(trainer, evaluation)
    # A model card links its data set on the Hub, where a file or the embedded task is not to be found.
    is_on_hub = script_args.dataset_name != "arithmetic" and not is_local(script_args.dataset_name)
    dataset_name = script_args.dataset_name if is_on_hub else None
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    else:
        trainer.create_model_card(model_name=Path(trainer.args.output_dir or "").name, dataset_name=dataset_name)
    trainer.end()  # the trackers, vLLM and the process group
    return 0


def parse(
    arguments: list[str], config_class: type[UloRLConfig] = UloRLConfig
) -> tuple[ScriptArguments, UloRLConfig, ModelConfig]:
    """Parse options and configuration file.

    Args:
        arguments: As in `main`.
        config_class: What the training arguments become.

    Raises:
        ValueError: If one is unknown, or they contradict each other.
    """
    if not torch.accelerator.is_available() and "--use_cpu" not in arguments:
        arguments = [*arguments, "--use_cpu", "true"]
    check_config_file(arguments)
    parser = TrlParser((ScriptArguments, config_class, ModelConfig))  # type: ignore[arg-type]
    script_args, training_args, model_args, of_file, of_line = parser.parse_args_and_config(
        with_use_vllm(arguments), return_remaining_strings=True, separate_remaining_strings=True
    )
    known = [name for part in (script_args, training_args, model_args) for name in vars(part)]
    refuse_unknown([name.removeprefix("--") for name in of_file[::2]], of_line, known)
    if script_args.engine not in (None, "vllm" if training_args.use_vllm else "transformers"):
        raise ValueError(
            f"`engine` ({script_args.engine!r}) contradicts `use_vllm` ({training_args.use_vllm}): in a configuration file "
            "set only `use_vllm`."
        )
    return script_args, training_args, model_args


def build(
    script_args: ScriptArguments, training_args: UloRLConfig, model_args: ModelConfig
) -> tuple[UloRLTrainer, EvaluationCallback | None]:
    """Load data, model and reward, and return the trainer, with what evaluates it.

    Raises:
        ValueError: If the input does not fit together.
    """
    given = model_args.model_name_or_path
    model_name = embedded_model_path() if given in (None, "embedded") else given
    check_model_folder(str(model_name))
    _make_output_dir(training_args)
    _check_resume(training_args)
    tokenizer = AutoTokenizer.from_pretrained(model_name, revision=model_args.model_revision, padding_side="left")
    train, held_out = load_data(script_args, training_args.seed, is_chat=tokenizer.chat_template is not None)
    reward = load_reward(script_args.reward)
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args, script_args.rope_parameters)
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
    if held_out is None:
        return trainer, None
    evaluation = EvaluationCallback(
        trainer,
        held_out,
        k=script_args.eval_k,
        reward=reward,
        every_steps=script_args.eval_every,
        at_ends=True,
        is_resumed=checkpoint_to_resume(training_args) is not None,
    )
    trainer.add_callback(evaluation)
    return trainer, evaluation


def _make_output_dir(training_args: UloRLConfig) -> None:
    output_dir = cast(str, training_args.output_dir)
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`output_dir` ({output_dir!r}) can't be made a folder ({error.strerror}). Pass one that can be written."
        ) from error


def _check_resume(training_args: UloRLConfig) -> None:
    """Refuse to start anew over a run that could go on: its logs would be lost, and its checkpoints taken for the new one's."""
    folder = cast(str, training_args.output_dir)
    if checkpoint_to_resume(training_args) is None and (step := newest_step(folder)) is not None:
        raise ValueError(
            f"`output_dir` ({folder!r}) holds checkpoints of an earlier run, up to step {step}. Add `--resume_from_checkpoint "
            "True` to go on with it, pass another `--output_dir`, or delete the folder to start anew."
        )


def load_data(script_args: ScriptArguments, seed: int, *, is_chat: bool) -> tuple[Dataset, Dataset | None]:
    """Return the training rows and the held-out ones; with a chat template a text becomes a user message."""
    name, held_out_name = script_args.dataset_name, script_args.eval_dataset_name
    if name == "arithmetic":
        train = arithmetic_dataset(script_args.num_train_problems, seed=seed, split="train")
        held_out_name = held_out_name or "arithmetic"  # its test problems are the same for every seed
    else:
        train = load_rows(name, config=script_args.dataset_config, split=script_args.dataset_split)
        if script_args.reward == "verifier" and "solution" not in train.column_names:
            train = with_answer_column(train, name)
        train = as_messages(train) if is_chat else train
    if held_out_name is None or not script_args.eval_problems:
        return train, None
    if held_out_name == "arithmetic":
        return train, load_problems(held_out_name, num_problems=script_args.eval_problems)
    held_out = load_problems(held_out_name, needs_answers=script_args.reward == "verifier")
    held_out = held_out.select(range(min(script_args.eval_problems, len(held_out))))
    return train, as_messages(held_out) if is_chat else held_out


def model_init_kwargs(
    training_args: UloRLConfig,
    model_args: ModelConfig,
    rope_parameters: dict[str, Any] | str | None = None,
    load_config: Callable[[str, str], Any] = lambda name, revision: AutoConfig.from_pretrained(
        name, revision=revision
    ),
) -> dict[str, Any]:
    """Merge the model arguments into those of the configuration, such as the recipes' rope parameters.

    Args:
        training_args: Its `model_init_kwargs` win.
        model_args: Of the command line.
        rope_parameters: YaRN's, completed from the model's own configuration.
        load_config: Returns that, for the name and revision of a model.

    Raises:
        ValueError: If rope parameters are incomplete, or given twice.
    """
    kwargs: dict[str, Any] = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **cast(dict[str, Any], training_args.model_init_kwargs or {}),
    }
    check_complete(kwargs)
    if rope_parameters is not None:
        clashes = sorted({"rope_parameters", "max_position_embeddings"} & kwargs.keys())
        if clashes:
            raise ValueError(
                f"`rope_parameters` ({rope_parameters}) and `model_init_kwargs` ({clashes} in it) are both given, and state the "
                "same in two ways. Leave one of them out; `--model_init_kwargs` takes the place of a recipe's."
            )
        config = load_config(model_args.model_name_or_path or str(embedded_model_path()), model_args.model_revision)
        kwargs.update(extended_positions(config, rope_parameters))
    return {name: value for name, value in kwargs.items() if value is not None}


def checkpoint_to_resume(training_args: UloRLConfig) -> str | bool | None:
    """Return what `train` takes for `--resume_from_checkpoint`: a path, True for the newest, None for none."""
    given = training_args.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(given).lower(), given)
