"""What a plan reads: a launch file's devices, and a model's dimensions, counted on a model without memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ..memory import Launch, ModelShape

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
        kind, deepspeed = values["distributed_type"], values.get("deepspeed_config") or {}
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise ValueError(
            f"`--launch` ({path}) can't be read ({type(error).__name__}: {error}). Pass a file of `accelerate config`, which has a "
            "`distributed_type`."
        ) from error
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
    backends: dict[tuple[Any, Any], str] = {("DEEPSPEED", 2): "zero2", ("DEEPSPEED", 3): "zero3", ("FSDP", 2): "fsdp2"}
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

    from ..memory import ModelShape, key_value_sizes

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
    num_kv_heads, head_size = key_value_sizes(text)
    shape = ModelShape(
        num_parameters=_count(model),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
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
