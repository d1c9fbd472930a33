"""The plan of a training configuration: what a step is, and what it takes in memory under a launch file."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from trl import ModelConfig

    from ..config import UloRLConfig
    from ..memory import Launch, MemoryPlan, ModelShape, Run
    from .train import ScriptArguments

PROMPT_TOKENS = 2048  # of the longest prompt, where the plan is not told and the positions leave as much


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """What a configuration comes to.

    Args:
        sizes: Of a step, by name.
        shape: The model's dimensions.
        launch: Over how many devices, and how.
        run: The sizes that memory depends on.
        memory: In bytes.
        device_gib: Memory of a device, if it is known.
    """

    sizes: dict[str, Any]
    shape: ModelShape
    launch: Launch
    run: Run
    memory: MemoryPlan
    device_gib: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the larger phase fits a device; None where its memory is not known."""
        return None if self.device_gib is None else self.memory.peak <= self.device_gib * 2**30

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**dataclasses.asdict(self), "fits": self.fits}


def plan_recipe(options: argparse.Namespace) -> RecipePlan:
    """Parse a configuration as `trl-ulorl train` does, for as many processes as its launch has, and add it up.

    Args:
        options: `config`, `launch`, `num_processes`, `gpu_gib`, `prompt_length` and `training_options`.

    Raises:
        ValueError: If configuration, model and launch do not fit together.
    """
    from ..memory import memory_plan
    from .dimensions import model_config, model_shape, read_launch
    from .training import model_init_kwargs

    launch = read_launch(options.launch, options.num_processes)
    script_args, args, model_args = parse_recipe(options.config, launch.num_processes, options.training_options)
    kwargs = model_init_kwargs(args, model_args, script_args.rope_parameters, load_config=model_config)
    config = model_config(_model_name(model_args), model_args.model_revision)
    config.get_text_config().update({name: kwargs[name] for name in ("max_position_embeddings",) if name in kwargs})
    shape, adapter = model_shape(config, model_args)
    run = run_sizes(args, config, kwargs.get("dtype"), adapter, options.prompt_length)
    device_bytes = None if options.gpu_gib is None else options.gpu_gib * 2**30
    return RecipePlan(
        sizes=step_sizes(args, run),
        shape=shape,
        launch=launch,
        run=run,
        memory=memory_plan(shape, launch, run, device_bytes),
        device_gib=options.gpu_gib,
    )


def parse_recipe(
    path: Path, num_processes: int, arguments: Sequence[str] = ()
) -> tuple[ScriptArguments, UloRLConfig, ModelConfig]:
    """Parse a training configuration as each of `num_processes` processes of `trl-ulorl train` would.

    Raises:
        ValueError: If it can't be parsed or contradicts itself.
    """
    from ..config import UloRLConfig
    from .training import parse

    class PlannedConfig(UloRLConfig):
        """The configuration, whose process group is not there yet."""

        @property
        def world_size(self) -> int:
            return num_processes

    try:
        return parse(["--config", str(path), *arguments, "--use_cpu", "true"], PlannedConfig)
    except (TypeError, OSError) as error:
        raise ValueError(f"`--config` ({path}) can't be parsed: {error}") from error


def _model_name(model_args: Any) -> str:
    from ..data.arithmetic import embedded_model_path

    return model_args.model_name_or_path or str(embedded_model_path())


# ------------------------------------------------------------------------------------------------------------- the run


def run_sizes(
    args: UloRLConfig, config: Any, dtype: str | None, adapter: int | None, prompt_length: int | None
) -> Run:
    """Return the sizes that memory depends on.

    Raises:
        ValueError: If prompt and completion don't fit the model's positions.
    """
    from ..memory import Run

    positions = config.get_text_config().max_position_embeddings
    room = positions - args.max_completion_length
    if room < max(1, prompt_length or 0):
        raise ValueError(
            f"`max_completion_length` ({args.max_completion_length}) leaves {max(0, room)} of the model's {positions} positions to the "
            f"prompt ({prompt_length or 'at least 1'} needed). Lower it, or extend the model with `rope_parameters`."
        )
    prompt = min(PROMPT_TOKENS, room) if prompt_length is None else prompt_length
    engine = "transformers" if not args.use_vllm else "server" if args.vllm_mode == "server" else "vllm"
    return Run(
        engine=engine,
        max_tokens=prompt + args.max_completion_length,
        max_completion_length=args.max_completion_length,
        num_generations=args.num_generations,
        groups_per_batch=args.groups_per_batch,
        max_inflight_groups=cast(int, args.max_inflight_groups),
        rows_per_micro_batch=args.per_device_train_batch_size,
        decode_batch_size=args.decode_batch_size or args.per_device_train_batch_size * args.steps_per_generation,
        weight_bytes=4 if dtype in (None, "float32") else 2,
        is_autocast=bool(args.bf16),
        adapter_parameters=adapter,
        tensor_parallel_size=args.ranks_per_engine,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        sleeps=args.vllm_enable_sleep_mode,
    )


def step_sizes(args: UloRLConfig, run: Run) -> dict[str, Any]:
    """Return what a rollout step decodes and an update trains on, and how many there are."""
    updates = args.micro_steps_per_batch / args.gradient_accumulation_steps
    completions = args.generation_batch_size
    held = run.max_inflight_groups * args.num_generations
    return {
        "prompts_per_step": args.groups_per_batch,
        "completions_per_step": completions,
        "tokens_per_step_at_most": completions * args.max_completion_length,
        "updates_per_step": updates,
        "micro_batches_per_device": args.micro_steps_per_batch,
        "num_segments": args.num_segments,
        "segment_length": args.segment_length,
        "rollouts_held_at_most": held,
        "engines": args.world_size // args.ranks_per_engine,
        # Of an update there may be several in a step, or several steps in one.
        "updates": args.max_steps if args.max_steps > 0 else None,
        "rollout_steps": math.ceil(args.max_steps / updates) if args.max_steps > 0 else None,
        "completions": math.ceil(args.max_steps / updates) * completions if args.max_steps > 0 else None,
    }


# -------------------------------------------------------------------------------------------------------------- report

_STEP_LABELS = {
    "prompts_per_step": "prompts",
    "completions_per_step": "completions",
    "tokens_per_step_at_most": "tokens, at most",
    "updates_per_step": "updates",
    "micro_batches_per_device": "micro-batches of a device",
    "num_segments": "segments of a rollout, at most",
    "segment_length": "tokens of a segment, at most",
    "rollouts_held_at_most": "rollouts held, at most",
    "engines": "rollout engines",
    "updates": "updates of the run",
    "rollout_steps": "rollout steps of the run",
    "completions": "completions of the run",
}


def report(plan: RecipePlan) -> str:
    """Return the plan as text."""
    shape, memory, run = plan.shape, plan.memory, plan.run
    adapter = "" if run.adapter_parameters is None else f", an adapter of {run.adapter_parameters / 1e6:.1f}M"
    lines = ["Model", f"  {shape.num_parameters / 1e9:.2f}B parameters{adapter}"]
    lines += [f"  {memory.kv_bytes_per_token:,} bytes of keys and values for each token", "", "A rollout step"]
    for name, label in _STEP_LABELS.items():
        value = plan.sizes[name]
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            lines.append(f"  {label:32} {shown:>16}")
    lines += ["", f"Memory of a device, {plan.launch.backend} on {plan.launch.num_processes}, in GiB"]
    lines += [f"  {label:48} {value / 2**30:8.1f}" for label, value in memory_rows(plan).items()]
    lines += ["", f"Memory of a host, in GiB: pools {memory.pools / 2**30:.1f}, if every rollout had the full length"]
    if memory.kv_tokens is not None:
        lines.append(
            f"Keys and values: room for {memory.kv_tokens:,} tokens in an engine, {memory.kv_tokens // run.max_tokens} sequences of "
            f"{run.max_tokens:,}"
        )
    if plan.fits is not None:
        verdict = "fits" if plan.fits else "does NOT fit"
        lines.append(f"It {verdict} {plan.device_gib:g} GiB, of which it needs {memory.peak / 2**30:.1f}.")
    return "\n".join(lines) + "\n"


def memory_rows(plan: RecipePlan) -> dict[str, float]:
    """Return the terms of a device's memory in bytes, by label."""
    memory = plan.memory
    rows = {
        "weights": memory.state.weights,
        "gradients": memory.state.gradients,
        "optimizer": memory.state.optimizer,
        "buffers of the update": memory.state.buffers,
        f"activations of {plan.run.rows_per_micro_batch} x {plan.run.max_tokens:,} tokens": memory.activations,
    }
    if memory.gathered:
        rows["whole weights, while rollouts decode"] = memory.gathered
    if plan.run.engine == "transformers":
        rows[f"keys and values of {plan.run.decode_batch_size} sequences"] = memory.kv_cache
    elif plan.run.engine == "vllm":
        rows["vLLM's share, keys and values included"] = memory.engine
        rows["keys and values in it"] = memory.kv_cache
    return {**rows, "peak while rollouts decode": memory.rollout, "peak during the update": memory.update}
