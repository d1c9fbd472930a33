"""The recipes of examples/configs say what the paper says, the libraries accept them, and they fit their GPUs by plan."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from trl_ulorl.cli import main
from trl_ulorl.cli.dimensions import model_config
from trl_ulorl.cli.recipe import parse_recipe
from trl_ulorl.cli.training import model_init_kwargs
from trl_ulorl.rollout.vllm import _position_overrides

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted((EXAMPLES / "configs").glob("qwen3_*.yaml"), key=lambda path: path.stem)

MODELS = {"4b": "Qwen/Qwen3-4B", "8b": "Qwen/Qwen3-8B", "30b_a3b": "Qwen/Qwen3-30B-A3B"}
LENGTHS = {"32k": (32_768, 1), "64k": (65_536, 4), "96k": (98_304, 8), "128k": (131_072, 8)}  # tokens, segments
YARN_RUN = EXAMPLES / "configs" / "qwen3_30b_a3b_140k_yarn.yaml"
GIB_OF_GB = {80: 79, 141: 139}  # what PyTorch sees of an H100 or H200
QWEN3_POSITIONS = 40_960
QWEN3_TRAINED_POSITIONS = 32_768
PROMPT_TOKENS = 2_048

PAPER = {  # section 4.1, but where another one is named
    "num_generations": 8,
    "temperature": 0.85,
    "top_p": 1.0,
    "top_k": 0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "num_iterations": 1,
    "max_steps": 300,  # section 3.2
    "rollout_schedule": "segment",  # Algorithm 1
    "importance_mode": "pois",  # section 3.1.2
    "dmmpts": {"tau": 0.99, "sigma": 0.2, "dynamic": True},  # section 3.2
    "dynamic_sampling": True,
    "overlong": "wrong",  # section 3.5
    "loss_type": "dapo",
    "beta": 0.0,
}

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def load(path):
    return yaml.safe_load(path.read_text())


def gpus(path):
    return int(re.search(r"^# GPUs: (\d+) of \d+ GB", path.read_text(), re.MULTILINE).group(1))


def gib_of_a_gpu(path):
    return GIB_OF_GB[int(re.search(r"^# GPUs: \d+ of (\d+) GB", path.read_text(), re.MULTILINE).group(1))]


@cache
def parsed(path):
    """The recipe's arguments, as each of its processes parses them, and those that the model is loaded with."""
    script, training, model = parse_recipe(path, gpus(path))
    return (
        script,
        training,
        model,
        model_init_kwargs(training, model, script.rope_parameters, load_config=model_config),
    )


def test_each_model_has_each_length():
    names = {f"qwen3_{model}_{length}" for model in MODELS for length in LENGTHS}
    assert {path.stem for path in RECIPES} == {*names, YARN_RUN.stem}


@each_recipe
def test_file_name_tells_model_and_length(path):
    model, length = re.fullmatch(r"qwen3_(.+)_(\d+k)(?:_yarn)?", path.stem).groups()
    recipe = load(path)
    assert recipe["model_name_or_path"] == MODELS[model]
    expected = LENGTHS[length] if path != YARN_RUN else (140_000, 8)
    assert (recipe["max_completion_length"], recipe["num_segments"]) == expected
    assert recipe["output_dir"] == f"outputs/{path.stem}"
    assert f"--config examples/configs/{path.name}\n" in path.read_text()


@each_recipe
def test_values_are_the_papers(path):
    recipe = load(path)
    assert {name: recipe[name] for name in PAPER} == PAPER


@each_recipe
def test_update_takes_128_prompts_of_8_completions(path):
    recipe = load(path)
    per_device = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert per_device * gpus(path) == 128 * 8
    assert per_device % recipe["num_generations"] == 0, "a group lives on one rank"


@each_recipe
def test_positions_reach_over_prompt_and_output(path):
    recipe, overrides = load(path), parsed(path)[3]
    positions = overrides.get("max_position_embeddings", QWEN3_POSITIONS)
    assert positions >= recipe["max_completion_length"] + PROMPT_TOKENS
    if recipe["max_completion_length"] + PROMPT_TOKENS <= QWEN3_POSITIONS:
        assert "rope_parameters" not in overrides, "within Qwen3's own positions the model stays as it is"
        return
    assert "Ours" in path.read_text()
    rope = overrides["rope_parameters"]
    assert rope["rope_theta"] == 1e6
    assert rope["factor"] * rope["original_max_position_embeddings"] == positions
    assert rope["original_max_position_embeddings"] == (95_232 if path == YARN_RUN else QWEN3_TRAINED_POSITIONS)
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=positions, rope_parameters=rope
    )
    assert config.rope_parameters == rope
    # YaRN's attention scaling, 0.1 ln(factor) + 1, shows that the parameters reach the model: 1.14 at 4.0625
    assert 1.04 < Qwen3RotaryEmbedding(config).attention_scaling < 1.15


@each_recipe
def test_trainer_vllm_and_saved_model_have_the_same_positions(path, tmp_path):
    """On a small model with the positions of Qwen3, saved as on the Hub: a base beside the rest, no rope parameters."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = Qwen3Config(
        **sizes,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=QWEN3_POSITIONS,
        rope_parameters=rope,
    )
    folder = tmp_path / "hub"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(values))

    kwargs = parsed(path)[3]
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    on_vllm = _position_overrides(model.config)(AutoConfig.from_pretrained(folder))  # what `hf_overrides` makes of it
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    expected = (kwargs.get("max_position_embeddings", QWEN3_POSITIONS), kwargs.get("rope_parameters", rope))
    for each in (model.config, on_vllm, saved.config):
        assert (each.max_position_embeddings, each.rope_parameters) == expected
    frequencies = Qwen3RotaryEmbedding(on_vllm).inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert torch.equal(saved.model.rotary_emb.inv_freq, frequencies)


@each_recipe
def test_training_parses_it(path):
    script, training, model, kwargs = parsed(path)
    recipe = load(path)
    for name, value in recipe.items():
        found = next(getattr(each, name) for each in (script, training, model) if hasattr(each, name))
        if name == "dmmpts":
            assert {key: getattr(found, key) for key in value} == value
        elif name != "model_init_kwargs":
            assert found == value, name
    assert kwargs["dtype"] == "bfloat16"
    assert kwargs | recipe.get("model_init_kwargs", {}) == kwargs


@each_recipe
def test_the_plan_fits_the_gpus_it_names(path, tmp_path, capsys):
    output, recipe = tmp_path / "plan.json", load(path)
    launch = ["--launch", str(EXAMPLES / "accelerate_configs" / "zero3.yaml"), "--num-processes", str(gpus(path))]
    command = ["plan", "--config", str(path), *launch, "--gpu-gib", str(gib_of_a_gpu(path)), "--output", str(output)]
    assert main(command) == 0
    plan = json.loads(output.read_text())["recipe"]
    length = recipe["max_completion_length"]
    engines = gpus(path) // recipe.get("vllm_tensor_parallel_size", 1)
    assert plan["sizes"] == {
        "prompts_per_step": 128,
        "completions_per_step": 1024,
        "tokens_per_step_at_most": 1024 * length,
        "updates_per_step": 1,
        "micro_batches_per_device": 1024 // gpus(path),
        "num_segments": recipe["num_segments"],
        "segment_length": length // recipe["num_segments"],
        "rollouts_held_at_most": 1024 * recipe["num_segments"],
        "engines": engines,
        "updates": 300,
        "rollout_steps": 300,
        "completions": 300 * 1024,
    }
    assert plan["run"]["max_tokens"] == length + PROMPT_TOKENS
    # A tenth is left: allocators don't use memory without gaps.
    assert plan["fits"]
    assert max(plan["memory"]["update"], plan["memory"]["rollout"]) <= 0.9 * gib_of_a_gpu(path) * 2**30 + 1
    assert plan["memory"]["kv_tokens"] >= 2 * plan["run"]["max_tokens"]
    printed = capsys.readouterr().out
    assert f"{1024 * length:,}" in printed and "It fits" in printed and "peak during the update" in printed


@each_recipe
def test_the_mixture_of_experts_has_no_auxiliary_loss(path):
    assert (parsed(path)[1].router_aux_loss_coef == 0) == ("30b_a3b" in path.stem)


LAUNCHES = {  # distributed type, processes, mixed precision
    "cpu": ("MULTI_GPU", 2, "no"),
    "multi_gpu": ("MULTI_GPU", 8, "bf16"),
    "zero2": ("DEEPSPEED", 8, "bf16"),
    "zero3": ("DEEPSPEED", 8, "bf16"),
    "fsdp2": ("FSDP", 8, "bf16"),
}


def test_each_launch_file_is_known():
    assert {path.stem for path in (EXAMPLES / "accelerate_configs").glob("*.yaml")} == set(LAUNCHES)


@pytest.mark.parametrize("name", LAUNCHES)
def test_accelerate_loads_it(name):
    config = load_config_from_file(str(EXAMPLES / "accelerate_configs" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == LAUNCHES[name]
    assert not config.use_cpu  # accelerate would start one process only


def test_zero_stages_and_fsdp_version():
    folder = EXAMPLES / "accelerate_configs"
    for stage in (2, 3):
        assert load(folder / f"zero{stage}.yaml")["deepspeed_config"]["zero_stage"] == stage
    assert load(folder / "fsdp2.yaml")["fsdp_config"]["fsdp_version"] == 2
