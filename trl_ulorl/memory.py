"""What a training takes in memory, of a device and of a host, from dimensions alone: nothing is built or measured.

Counted from what DeepSpeed, PyTorch, transformers and TRL allocate for decoders of Qwen3's kind in bfloat16. Pure
arithmetic on bytes; docs/scaling.md says what each term is and what is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .planner import BYTES_PER_HELD_TOKEN

GIB = 2**30
BACKENDS = ("ddp", "zero2", "zero3", "fsdp2")

_HALF, _SINGLE = 2, 4  # bytes of a number in bfloat16 and float32
_ADAM_MOMENTS = 2
_ZERO_BUCKET = 500_000_000  # numbers: DeepSpeed's `reduce_bucket_size`
_ZERO_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's `stage3_max_live_parameters`
_LOGIT_TILE = 4096 * 32_768  # numbers of the tile over which TRL computes log-probabilities
# Allowances: CUDA context, NCCL and cuBLAS of a process; the profiled forward pass and CUDA graphs of vLLM.
PROCESS_BYTES = 2 * GIB
ENGINE_BYTES = 3 * GIB


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder-only model.

    Args:
        num_parameters: All of them, each shared one once.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_size: Width of a head.
        mlp_size: Width of the MLP, of one expert in a mixture of experts.
        vocab_size: Rows of the head.
        layer_parameters: Of the largest layer.
        num_experts: 0 for a dense model.
        num_active_experts: Experts of a token.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    vocab_size: int
    layer_parameters: int
    num_experts: int = 0
    num_active_experts: int = 0

    def kv_bytes_per_token(self, bytes_per_number: int = _HALF) -> int:
        """Return the size of a token in the key-value cache: a key and a value for each layer and head.

        Example:
            >>> shape = ModelShape(num_parameters=8_190_735_360, num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8,
            ...     head_size=128, mlp_size=12_288, vocab_size=151_936, layer_parameters=192_946_432)
            >>> shape.kv_bytes_per_token()  # 2 x 36 x 8 x 128 x 2
            147456
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * bytes_per_number

    def layer_bytes_per_token(self) -> int:
        """Return what backward through one recomputed layer holds at its peak, per token, in bfloat16 with autocast.

        `H`, `Q`, `K`, `I` are the widths of hidden states, queries, keys and MLP. Both norms keep a float32 and a bfloat16
        copy beside their output, and the residual stream is kept once (18 H); queries keep two copies for their norm, what is
        rotated and the output of attention (10 Q), keys and values the like (10 K), the MLP four of its width (8 I), and its
        backward pass adds 4 I + 2 H. In a mixture of experts each of the `k` experts of a token takes 8 I + 4 H and some
        indices, the router 4 bytes for each expert, and backward through the sorted copies adds (6 k + 2) H.
        """
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        statistics = _SINGLE * (2 * self.num_heads + self.num_kv_heads + 2)
        kept = 18 * self.hidden_size + 10 * queries + 10 * keys + statistics
        if not self.num_experts:
            return kept + 12 * self.mlp_size + 2 * self.hidden_size
        active = self.num_active_experts
        routed = active * (8 * self.mlp_size + 4 * self.hidden_size + 34) + _SINGLE * self.num_experts
        return kept + routed + (6 * active + 2) * self.hidden_size


def key_value_sizes(text_config: Any) -> tuple[int, int]:
    """Return key-value heads and the width of a head as a configuration of transformers tells them, or leaves them open."""
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_size = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return num_kv_heads, head_size


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a training is spread over devices.

    Args:
        backend: One of `BACKENDS`.
        num_processes: One per device.
        processes_per_host: Of them on one machine.
    """

    backend: str = "ddp"
    num_processes: int = 1
    processes_per_host: int = 8

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` ({self.backend!r}) must be one of {', '.join(BACKENDS)}.")
        if self.num_processes < 1 or self.processes_per_host < 1:
            raise ValueError(
                f"`num_processes` ({self.num_processes}) and `processes_per_host` ({self.processes_per_host}) must be at "
                "least 1."
            )

    @property
    def shards_weights(self) -> bool:
        """Whether a device holds only its part of the weights."""
        return self.backend in ("zero3", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a device holds all the time.

    Args:
        weights: Its weights, as they are computed with.
        gradients: Accumulated gradients.
        optimizer: Adam's moments and, where weights are in bfloat16, float32 master copies.
        buffers: Gathered weights and buckets of gradients while a layer is computed.
    """

    weights: float
    gradients: float
    optimizer: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.buffers


def state_bytes(
    shape: ModelShape, launch: Launch, *, weight_bytes: int = _HALF, adapter_parameters: int | None = None
) -> StateBytes:
    """Return weights, gradients and AdamW's state on one device.

    Args:
        shape: The model.
        launch: Over how many devices, and how.
        weight_bytes: Of a number as it was loaded. DeepSpeed in bfloat16 converts it and keeps float32 masters; FSDP2
            under mixed precision holds what is trained in float32; DDP leaves it as it is.
        adapter_parameters: Trained parameters of a LoRA adapter, in float32 beside frozen weights; None: all are
            trained.
    """
    parts = launch.num_processes
    is_zero = launch.backend in ("zero2", "zero3")
    frozen = 0 if adapter_parameters is None else shape.num_parameters
    trained = shape.num_parameters if adapter_parameters is None else adapter_parameters
    trained_bytes = weight_bytes if adapter_parameters is None else _SINGLE
    frozen_bytes = float(frozen * (_HALF if is_zero else weight_bytes))
    if is_zero:
        weights = frozen_bytes + _HALF * trained
        gradients = _HALF * trained / parts
        optimizer = (1 + _ADAM_MOMENTS) * _SINGLE * trained / parts
    elif launch.backend == "fsdp2":
        weights = frozen_bytes + _SINGLE * trained
        gradients = _SINGLE * trained / parts
        optimizer = _ADAM_MOMENTS * _SINGLE * trained / parts
    else:
        weights = frozen_bytes + trained_bytes * trained
        gradients = float(trained_bytes * trained)
        optimizer = float(_ADAM_MOMENTS * trained_bytes * trained)
    return StateBytes(
        weights=weights / parts if launch.shards_weights else weights,
        gradients=gradients,
        optimizer=optimizer,
        buffers=_buffer_bytes(shape, launch, trained, trained_bytes),
    )


def _buffer_bytes(shape: ModelShape, launch: Launch, trained: int, trained_bytes: int) -> float:
    if launch.num_processes == 1:
        return 0.0
    if launch.backend == "ddp":  # its buckets hold every gradient once more
        return float(trained_bytes * trained)
    bucket = _HALF * min(_ZERO_BUCKET, trained)
    if launch.backend == "zero2":
        return float(bucket)
    if launch.backend == "zero3":
        return float(bucket + _HALF * min(_ZERO_LIVE_PARAMETERS, shape.num_parameters))
    # Two layers gathered, one of them ahead, the gradients of one, and what lies outside of the layers.
    outside = shape.num_parameters - shape.num_layers * shape.layer_parameters
    gradients = min(shape.layer_parameters, trained)
    return float(_HALF * (2 * shape.layer_parameters + gradients + max(0, outside)))


def activation_bytes(
    shape: ModelShape, num_tokens: int, *, trains_head: bool = True, residual_bytes: int = _HALF
) -> float:
    """Return the peak of forward and backward over one micro-batch, with gradient checkpointing of each layer.

    The hidden states before every layer, and on top either one recomputed layer or the head, which comes first. The head's
    part is TRL's tiled one: no row of logits is kept.

    Args:
        shape: The model.
        num_tokens: Of the micro-batch: rows times its longest row, prompts included.
        trains_head: Whether the head's weights have a gradient; an adapter leaves them out.
        residual_bytes: Of a number in the residual stream: 4 where weights are float32 under autocast.
    """
    checkpoints = shape.num_layers * shape.hidden_size * residual_bytes * num_tokens
    layer = shape.layer_bytes_per_token() * num_tokens
    # The last norm (8), its output without what is not scored (2), and the gradient in float32 and bfloat16 (4 + 2).
    head = 16 * shape.hidden_size * num_tokens + _HALF * _LOGIT_TILE
    if trains_head:
        head += (_SINGLE + _HALF) * shape.vocab_size * shape.hidden_size
    return float(checkpoints + max(layer, head))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Sizes of a training that memory depends on.

    Args:
        engine: "transformers", "vllm" (on the devices that train) or "server".
        max_tokens: Of a sequence: the longest prompt and `max_completion_length`.
        max_completion_length: In tokens.
        num_generations: Rollouts per group.
        groups_per_batch: Groups that a rollout step trains on, over all processes.
        max_inflight_groups: Most groups held, over all processes.
        rows_per_micro_batch: `per_device_train_batch_size`.
        decode_batch_size: Rollouts that decode together on a device, on transformers.
        weight_bytes: Of a number of the loaded weights.
        is_autocast: Whether the forward pass is in bfloat16 (`bf16`).
        adapter_parameters: As in `state_bytes`.
        tensor_parallel_size: Devices that share a vLLM engine.
        gpu_memory_utilization: vLLM's share of a device.
        sleeps: Whether vLLM frees its share during the update.
    """

    engine: str
    max_tokens: int
    max_completion_length: int
    num_generations: int
    groups_per_batch: int
    max_inflight_groups: int
    rows_per_micro_batch: int = 1
    decode_batch_size: int = 1
    weight_bytes: int = _HALF
    is_autocast: bool = True
    adapter_parameters: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    sleeps: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of a device in the two phases of a step, and of a host.

    Args:
        state: What a device holds all the time.
        activations: Of the longest micro-batch, during the update.
        gathered: Whole weights while transformers decodes with sharded ones, or while ZeRO-3 merges an adapter for vLLM.
        kv_cache: Keys and values on a device while it decodes; vLLM's is what its share leaves.
        engine: vLLM's share of a device, its cache included.
        update: Peak during the update.
        rollout: Peak while rollouts decode.
        kv_bytes_per_token: Of a token in the cache, over all devices of an engine.
        kv_tokens: Tokens that an engine's cache has room for; None where it is not on these devices.
        pools: On a host, if every rollout had the full length: those in flight of its processes, and a batch in each process.
    """

    state: StateBytes
    activations: float
    gathered: float
    kv_cache: float
    engine: float
    update: float
    rollout: float
    kv_bytes_per_token: int
    kv_tokens: int | None
    pools: float

    @property
    def peak(self) -> float:
        """The larger one of the two phases."""
        return max(self.update, self.rollout)


def memory_plan(shape: ModelShape, launch: Launch, run: Run, device_bytes: float | None = None) -> MemoryPlan:
    """Add up the memory of a training.

    Args:
        shape: The model.
        launch: Over how many devices, and how.
        run: The sizes.
        device_bytes: Memory of a device, of which vLLM takes its share.

    Raises:
        ValueError: If `run.engine` is unknown; if vLLM shares the devices and their memory is not given, or its share has no
            room for its weights and one sequence.
    """
    state = state_bytes(shape, launch, weight_bytes=run.weight_bytes, adapter_parameters=run.adapter_parameters)
    is_float32_stream = launch.backend == "ddp" and run.weight_bytes == _SINGLE
    activations = activation_bytes(
        shape,
        run.rows_per_micro_batch * run.max_tokens,
        trains_head=run.adapter_parameters is None,
        residual_bytes=_SINGLE if is_float32_stream else _HALF,
    )
    decoding_bytes = _HALF if run.is_autocast or launch.backend != "ddp" else run.weight_bytes
    kv_token = shape.kv_bytes_per_token(decoding_bytes)
    gathered = kv_cache = engine = 0.0
    kv_tokens: int | None = None
    if run.engine == "transformers":
        gathered = float(_HALF * shape.num_parameters) if launch.shards_weights else 0.0
        kv_tokens = run.decode_batch_size * run.max_tokens
        kv_cache = float(kv_token * kv_tokens)
    elif run.engine == "vllm":
        engine, kv_cache = _engine_bytes(shape, run, device_bytes, decoding_bytes)
        # With more devices than key-value heads each holds one head, several of them the same.
        heads_per_device = math.ceil(shape.num_kv_heads / run.tensor_parallel_size)
        kv_tokens = math.floor(kv_cache / (kv_token * heads_per_device / shape.num_kv_heads))
        if kv_tokens < run.max_tokens:
            raise ValueError(
                f"`vllm_gpu_memory_utilization` ({run.gpu_memory_utilization:g}) leaves a cache of {max(0, kv_tokens)} tokens in an "
                f"engine on {run.tensor_parallel_size} device(s), and one sequence has {run.max_tokens}. Raise it or "
                "`vllm_tensor_parallel_size`, or take devices with more memory."
            )
    elif run.engine != "server":
        raise ValueError(f"`engine` ({run.engine!r}) must be 'transformers', 'vllm' or 'server'.")
    if run.engine != "transformers" and run.adapter_parameters is not None and launch.backend == "zero3":
        gathered = float(_HALF * shape.num_parameters)  # to merge the adapter, before the weights are handed over
    held_in_update = engine if not run.sleeps else 0.0
    decoding = gathered + (engine if run.engine == "vllm" else kv_cache)
    return MemoryPlan(
        state=state,
        activations=activations,
        gathered=gathered,
        kv_cache=kv_cache,
        engine=engine,
        update=PROCESS_BYTES + state.total + activations + held_in_update,
        rollout=PROCESS_BYTES + state.total - state.buffers + decoding,
        kv_bytes_per_token=kv_token,
        kv_tokens=kv_tokens,
        pools=pool_bytes(launch, run),
    )


def _engine_bytes(shape: ModelShape, run: Run, device_bytes: float | None, decoding_bytes: int) -> tuple[float, float]:
    """Return vLLM's share of a device, and the part of it that is left for keys and values."""
    if device_bytes is None:
        raise ValueError(
            "vLLM on the devices that train takes a share of their memory (`vllm_gpu_memory_utilization` "
            f"{run.gpu_memory_utilization:g}), which is not given. Pass `--gpu-gib`."
        )
    engine = run.gpu_memory_utilization * device_bytes
    weights = decoding_bytes * shape.num_parameters / run.tensor_parallel_size
    return engine, max(0.0, engine - weights - ENGINE_BYTES)


def pool_bytes(launch: Launch, run: Run) -> float:
    """Return what both pools and the batch take on a host, if every rollout had the full length."""
    processes = min(launch.processes_per_host, launch.num_processes)
    unfinished = run.max_inflight_groups * run.tensor_parallel_size * processes / launch.num_processes
    groups = unfinished + run.groups_per_batch * processes
    return groups * run.num_generations * run.max_completion_length * BYTES_PER_HELD_TOKEN
