"""Memory by hand, against published sizes, and against what PyTorch keeps for a layer."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from trl import ModelConfig

from trl_ulorl.cli import main
from trl_ulorl.cli.dimensions import KNOWN_MODELS, model_config, model_shape, read_launch
from trl_ulorl.memory import (
    ENGINE_BYTES,
    GIB,
    PROCESS_BYTES,
    Launch,
    ModelShape,
    Run,
    activation_bytes,
    memory_plan,
    pool_bytes,
    state_bytes,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ModelShape(
    num_parameters=1_000_000,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    mlp_size=128,
    vocab_size=1000,
    layer_parameters=400_000,
)
RUN = Run(
    engine="transformers",
    max_tokens=1024,
    max_completion_length=1000,
    num_generations=8,
    groups_per_batch=16,
    max_inflight_groups=64,
)


def shape_of(name, **model_arguments):
    return model_shape(model_config(name), ModelConfig(**model_arguments))


# --- dimensions -------------------------------------------------------------------------------------------------------


def dense(layers, hidden, mlp, heads, kv_heads, embeddings):
    """Embeddings, and per layer q and o, k and v, three matrices of the MLP, two norms and those of queries and keys."""
    layer = 2 * hidden * heads * 128 + 2 * hidden * kv_heads * 128 + 3 * hidden * mlp + 2 * hidden + 2 * 128
    return embeddings * 151_936 * hidden + layers * layer + hidden


@pytest.mark.parametrize(
    ("name", "by_hand", "published"),
    [
        ("Qwen/Qwen3-4B", dense(36, 2560, 9728, 32, 8, embeddings=1), 4.02),
        ("Qwen/Qwen3-8B", dense(36, 4096, 12_288, 32, 8, embeddings=2), 8.19),
        # 128 experts of width 768, and a router.
        ("Qwen/Qwen3-30B-A3B", dense(48, 2048, 128 * 768, 32, 4, embeddings=2) + 48 * 128 * 2048, 30.5),
    ],
)
def test_parameters_are_those_published(name, by_hand, published):
    shape, adapter = shape_of(name)
    assert shape.num_parameters == by_hand
    assert adapter is None
    assert by_hand / 1e9 == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "size"), [("Qwen/Qwen3-4B", 147_456), ("Qwen/Qwen3-8B", 147_456), ("Qwen/Qwen3-30B-A3B", 98_304)]
)
def test_keys_and_values_of_a_token(name, size):
    config = KNOWN_MODELS[name]
    assert size == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128 * 2
    assert shape_of(name)[0].kv_bytes_per_token() == size


def test_adapter_is_counted():
    """PEFT's default for Qwen3: queries and values, rank 16 each, a matrix on either side."""
    shape, adapter = shape_of("Qwen/Qwen3-4B", use_peft=True)
    assert adapter == 36 * 16 * ((2560 + 32 * 128) + (2560 + 8 * 128))
    assert shape == shape_of("Qwen/Qwen3-4B")[0]


def test_a_saved_model_is_read(tmp_path, model):
    model.save_pretrained(tmp_path)
    shape, _ = shape_of(str(tmp_path))
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert (shape.head_size, shape.mlp_size, shape.num_experts) == (16, 64, 0)


# --- activations ------------------------------------------------------------------------------------------------------


def peak_of_a_layer(config, num_tokens):
    """Bytes at the peak of forward and backward, weights and their gradients included; nothing is allocated."""
    layer_class = Qwen3MoeDecoderLayer if config.model_type == "qwen3_moe" else Qwen3DecoderLayer
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer, rotary = layer_class(config, 0), Qwen3RotaryEmbedding(config)
        finally:
            torch.set_default_dtype(torch.float32)
        hidden = torch.randn(1, num_tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angles = rotary(hidden, torch.arange(num_tokens)[None])
        tracker = MemTracker()
        tracker.track_external(layer, hidden, *angles)
        with tracker:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = layer(hidden, position_embeddings=angles, attention_mask=None)
            output.backward(torch.ones_like(output))
            (peak,) = tracker.get_tracker_snapshot("peak").values()
    own = 2 * (hidden.numel() + sum(angle.numel() for angle in angles))
    return peak["Total"] - own


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_layer_takes_what_pytorch_keeps_for_it(name):
    """The slope over tokens leaves out the weights; attention is PyTorch's on a CPU, which keeps what a GPU's keeps."""
    config = model_config(name)
    slope = (peak_of_a_layer(config, 65_536) - peak_of_a_layer(config, 32_768)) / 32_768
    assert slope == pytest.approx(shape_of(name)[0].layer_bytes_per_token(), rel=1e-3)


def test_activations_by_hand():
    # Per token of a layer: 10 x 64 queries, 10 x 32 keys, 4 x (2 x 4 + 2 + 2), 20 x 64 hidden, 12 x 128 of the MLP.
    assert SMALL.layer_bytes_per_token() == 640 + 320 + 48 + 1280 + 1536 == 3824
    tile = 2 * 4096 * 32_768
    head = 16 * 64 * 10 + 6 * 1000 * 64 + tile  # larger than 10 tokens of a layer
    assert activation_bytes(SMALL, 10) == 2 * 64 * 2 * 10 + head
    assert activation_bytes(SMALL, 10, trains_head=False) == 2 * 64 * 2 * 10 + head - 6 * 64_000
    assert activation_bytes(SMALL, 10**6, residual_bytes=4) == 2 * 64 * 4 * 10**6 + 3824 * 10**6


# --- weights, gradients, optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "weight_bytes", "weights", "gradients", "optimizer", "buffers"),
    [
        # In millions of bytes, for a million of parameters on 4 devices.
        ("ddp", 4, 4, 4, 8, 4),
        ("ddp", 2, 2, 2, 4, 2),
        ("zero2", 2, 2, 0.5, 3, 2),  # bfloat16 weights; masters and two moments in float32, a quarter of each
        ("zero3", 2, 0.5, 0.5, 3, 4),
        ("zero3", 4, 0.5, 0.5, 3, 4),  # DeepSpeed converts what was loaded in float32
        ("fsdp2", 2, 1, 1, 2, 2 * (2 * 0.4 + 0.4 + 0.2)),
    ],
)
def test_state_of_a_device_by_hand(backend, weight_bytes, weights, gradients, optimizer, buffers):
    state = state_bytes(SMALL, Launch(backend=backend, num_processes=4), weight_bytes=weight_bytes)
    found = (state.weights, state.gradients, state.optimizer, state.buffers)
    assert found == pytest.approx([1e6 * each for each in (weights, gradients, optimizer, buffers)])
    assert state.total == sum(found)


def test_an_adapter_needs_the_frozen_weights_and_little_more():
    state = state_bytes(SMALL, Launch(backend="zero3", num_processes=2), adapter_parameters=1000)
    assert (state.weights, state.gradients, state.optimizer) == (1_001_000, 1000, 6000)
    alone = state_bytes(SMALL, Launch(), adapter_parameters=1000)
    assert (alone.weights, alone.gradients, alone.optimizer, alone.buffers) == (2_004_000, 4000, 8000, 0)


@given(
    backend=st.sampled_from(["zero2", "zero3", "fsdp2"]),
    processes=st.integers(2, 512),
    adapter=st.none() | st.integers(1, 10**6),
)
def test_property_more_devices_never_hold_more(backend, processes, adapter):
    few = state_bytes(SMALL, Launch(backend=backend, num_processes=processes), adapter_parameters=adapter)
    many = state_bytes(SMALL, Launch(backend=backend, num_processes=2 * processes), adapter_parameters=adapter)
    assert many.total <= few.total
    assert 2 * many.optimizer == pytest.approx(few.optimizer)
    if adapter is None:  # 16 bytes for each parameter, however they are spread
        parts = (
            many.gradients + many.optimizer + (many.weights if backend != "zero2" else many.weights / 2 / processes)
        )
        assert parts * 2 * processes == pytest.approx(16 * SMALL.num_parameters)


# --- the two phases ---------------------------------------------------------------------------------------------------


def test_decoding_on_transformers_gathers_the_weights():
    plan = memory_plan(SMALL, Launch(backend="zero3", num_processes=2), RUN)
    assert plan.gathered == 2_000_000
    assert plan.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert plan.kv_cache == 256 * 1024
    assert plan.rollout == PROCESS_BYTES + plan.state.total - plan.state.buffers + 2_000_000 + 256 * 1024
    assert plan.update == PROCESS_BYTES + plan.state.total + plan.activations
    assert memory_plan(SMALL, Launch(), RUN).gathered == 0


@pytest.mark.parametrize(("devices", "share"), [(1, 1), (2, 2), (4, 2)])  # two key-value heads
def test_vllm_has_its_share_less_its_weights(devices, share):
    changes = {"engine": "vllm", "gpu_memory_utilization": 0.5, "tensor_parallel_size": devices}
    run = Run(**{**vars(RUN), **changes})
    plan = memory_plan(SMALL, Launch(backend="zero3", num_processes=4), run, device_bytes=10 * GIB)
    assert plan.engine == 5 * GIB
    assert plan.kv_cache == 5 * GIB - 2_000_000 / devices - ENGINE_BYTES
    assert plan.kv_tokens == int(plan.kv_cache * share / 256)
    sleeping = memory_plan(SMALL, Launch(num_processes=4), Run(**{**vars(run), "sleeps": True}), device_bytes=10 * GIB)
    awake = memory_plan(SMALL, Launch(num_processes=4), run, device_bytes=10 * GIB)
    assert awake.update - sleeping.update == 5 * GIB
    assert awake.rollout == sleeping.rollout


def test_a_server_takes_nothing_here():
    plan = memory_plan(SMALL, Launch(), Run(**{**vars(RUN), "engine": "server"}))
    assert (plan.engine, plan.kv_cache, plan.kv_tokens) == (0, 0, None)


@pytest.mark.parametrize(("backend", "gathered"), [("zero3", 2_000_000), ("zero2", 0), ("fsdp2", 0)])
def test_an_adapter_is_merged_for_a_server_with_whole_weights(backend, gathered):
    run = Run(**{**vars(RUN), "engine": "server", "adapter_parameters": 1000})
    plan = memory_plan(SMALL, Launch(backend=backend, num_processes=2), run)
    assert plan.gathered == gathered
    assert plan.rollout == PROCESS_BYTES + plan.state.total - plan.state.buffers + gathered


def test_pools_by_hand():
    # 64 groups in flight on 2 hosts of 8 processes and the batch's 16 in each: 32 + 128 groups, 8 rollouts of 1,000 tokens.
    launch = Launch(backend="zero3", num_processes=16, processes_per_host=8)
    assert pool_bytes(launch, RUN) == (32 + 128) * 8 * 1000 * 8
    # The paper's: 8.6 GB in flight (docs/segments.md), and the batch's 1.07 GB once more.
    paper = Run(
        **{**vars(RUN), "max_completion_length": 131_072, "groups_per_batch": 128, "max_inflight_groups": 1024}
    )
    assert pool_bytes(Launch(), paper) == pytest.approx(8.59e9 + 1.07e9, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "device", "remedy"),
    [
        ({"engine": "vllm"}, None, "Pass `--gpu-gib`"),
        ({"engine": "vllm"}, 3 * GIB, "take devices with more memory"),
        ({"engine": "sglang"}, None, "'transformers', 'vllm' or 'server'"),
    ],
)
def test_what_has_no_room_is_refused(changes, device, remedy):
    with pytest.raises(ValueError, match=remedy):
        memory_plan(SMALL, Launch(), Run(**{**vars(RUN), **changes}), device)


def test_launches_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="one of ddp, zero2, zero3, fsdp2"):
        Launch(backend="zero1")
    with pytest.raises(ValueError, match="at least 1"):
        Launch(num_processes=0)


# --- launch files and the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend", "processes"),
    [("cpu", "ddp", 2), ("multi_gpu", "ddp", 8), ("zero2", "zero2", 8), ("zero3", "zero3", 8), ("fsdp2", "fsdp2", 8)],
)
def test_launch_files_are_read(name, backend, processes):
    path = EXAMPLES / "accelerate_configs" / f"{name}.yaml"
    assert read_launch(path, None) == Launch(backend=backend, num_processes=processes, processes_per_host=processes)
    assert read_launch(path, 64).num_processes == 64


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, "stage or version 1"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "stage or version 1"),
        ({"distributed_type": "MULTI_XPU"}, "see examples/accelerate_configs"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}, "fsdp_offload_params"),
        ("text", "which has a `distributed_type`"),
        ({"num_processes": 2}, "KeyError"),
    ],
)
def test_launch_files_beyond_the_plan_are_refused(content, remedy, tmp_path):
    path = tmp_path / "launch.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=remedy):
        read_launch(path, None)


def test_a_plan_follows_options_of_training_and_simulates_too(tmp_path, capsys):
    output = tmp_path / "plan.json"
    command = ["plan", "--config", str(EXAMPLES / "configs" / "demo.yaml"), "--median", "20", "--sigma", "1"]
    command += ["--step-seconds", "0.01", "--sequence-seconds", "0.001", "--steps", "2", "--output", str(output)]
    assert main([*command, "--num_segments", "2", "--gpu-gib", "16"]) == 0
    plan = json.loads(output.read_text())
    sizes = plan["recipe"]["sizes"]
    assert sizes["num_segments"] == 2
    assert plan["recipe"]["fits"]
    parameters = plan["parameters"]
    assert parameters["max_completion_length"] == plan["recipe"]["run"]["max_completion_length"] == 128
    assert parameters["groups_per_batch"] == sizes["prompts_per_step"]
    assert parameters["kv_bytes_per_token"] == plan["recipe"]["memory"]["kv_bytes_per_token"]
    printed = capsys.readouterr().out
    assert printed.index("A rollout step") < printed.index("Recommended")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "`--max-completion-length` is missing"),
        (["--gpu-gib", "80"], "`--gpu-gib` needs a training configuration"),
        (["--config", "missing.yaml"], "There is no file 'missing.yaml'"),
        (
            ["--config", "mine.yaml", "--max-completion-length", "8"],
            "change the configuration with `--max_completion_length`",
        ),
        (["--config", "mine.yaml", "--launch", "missing.yaml"], "can't be read"),
        (["--config", "mine.yaml", "--no_such_option", "2"], "--no_such_option"),
        (["--config", "mine.yaml", "--model_name_or_path", "no/model"], "Pass the folder of a saved model"),
        (["--config", "mine.yaml", "--max_completion_length", "4096"], "extend the model with `rope_parameters`"),
        (["--config", "mine.yaml", "--prompt-length", "511"], "positions to the prompt"),
    ],
)
def test_bad_input_is_explained(arguments, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text((EXAMPLES / "configs" / "demo.yaml").read_text())
    assert main(["plan", *arguments]) == 2
    assert remedy in capsys.readouterr().err
