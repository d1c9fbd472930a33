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

# From the models' config.json on the Hub, so that a plan of them needs no network.
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e6}
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        "model_type": "qwen3",
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
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

    if not path.is_file():
        raise ValueError(f"There is no file {str(path)!r}: check `--config`.")

    class PlannedConfig(UloRLConfig):
        """The configuration, whose process group is not there yet."""

        @property
        def world_size(self) -> int:
            return num_processes

    try:
        return parse(["--config", str(path), *arguments, "--use_cpu", "true"], PlannedConfig)
    except (TypeError, OSError) as error:
        raise ValueError(f"`--config` ({path}) can't be parsed: {error}") from error


# --------------------------------------------------------------------------------------------------- launch and model


def read_launch(path: Path | None, num_processes: int | None) -> Launch:
    """Return what accelerate's launch file says; without one it is DDP.

    Raises:
        ValueError: If the file can't be read, or asks for what is not planned for.
    """
    import yaml

    from ..memory import Launch

    if path is None:
        return Launch(num_processes=num_processes or 1)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"`--launch` ({path}) can't be read ({error}). Pass a file of `accelerate config`."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"`--launch` ({path}) holds no settings. Pass a file of `accelerate config`.")
    kind, deepspeed = values.get("distributed_type", "NO"), values.get("deepspeed_config") or {}
    fsdp = values.get("fsdp_config") or {}
    offload = [
        name
        for name, value in {**deepspeed, **fsdp}.items()
        if "offload" in name and value not in ("none", None, False)
    ]
    if offload:
        raise ValueError(
            f"`--launch` ({path}) sets {offload}: memory of a host in the place of a device is not planned for."
        )
    backends = {("DEEPSPEED", 2): "zero2", ("DEEPSPEED", 3): "zero3", ("FSDP", 2): "fsdp2"}
    version = deepspeed.get("zero_stage") if kind == "DEEPSPEED" else fsdp.get("fsdp_version")
    backend = "ddp" if kind in ("NO", "MULTI_GPU") else backends.get((kind, version))
    if backend is None:
        raise ValueError(
            f"`--launch` ({path}) has `distributed_type` {kind!r} with stage or version {version!r}. Planned for are DDP, ZeRO-2, "
            "ZeRO-3 and FSDP2: see examples/accelerate_configs."
        )
    processes, machines = int(values.get("num_processes", 1)), int(values.get("num_machines", 1))
    per_host = max(1, processes // machines)
    return Launch(backend=backend, num_processes=num_processes or processes, processes_per_host=per_host)


def _model_name(model_args: Any) -> str:
    from ..data.arithmetic import embedded_model_path

    return model_args.model_name_or_path or str(embedded_model_path())


def model_config(name: str, revision: str | None = None) -> Any:
    """Return a model's configuration: of the ones in the recipes from here, of others from their folder or the Hub.

    Raises:
        ValueError: If there is none.
    """
    from transformers import AutoConfig

    if name in KNOWN_MODELS:
        return AutoConfig.for_model(**KNOWN_MODELS[name], rope_parameters=dict(_QWEN3_ROPE))
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The model {name!r} has no configuration that can be read ({error}). Pass the folder of a saved model, or a name "
            "on the Hub."
        ) from error


def model_shape(config: Any, model_args: Any) -> tuple[ModelShape, int | None]:
    """Return a model's dimensions, and the parameters of its adapter if it gets one: both are counted on a model without memory.

    Raises:
        ValueError: If it is no decoder of this kind.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from trl import get_peft_config

    from ..memory import ModelShape

    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM).from_config(config)
    layers = getattr(model.base_model, "layers", None)
    text = config.get_text_config()
    if layers is None or getattr(text, "intermediate_size", None) is None:
        raise ValueError(
            f"A model of the type {config.model_type!r} is built in another way than the decoders that memory is planned for. "
            "`trl-ulorl doctor` adds up what it takes on one device."
        )
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    expert_size = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shape = ModelShape(
        num_parameters=_count(model),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp_size=expert_size if num_experts else text.intermediate_size,
        vocab_size=text.vocab_size,
        layer_parameters=max(_count(layer) for layer in layers),
        num_experts=num_experts,
        num_active_experts=text.num_experts_per_tok if num_experts else 0,
    )
    peft_config = get_peft_config(model_args)
    if peft_config is None:
        return shape, None
    from peft import get_peft_model

    return shape, _count(get_peft_model(model, peft_config), trained_only=True)


def _count(module: Any, *, trained_only: bool = False) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad or not trained_only)


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
