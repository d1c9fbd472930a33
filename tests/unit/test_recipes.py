"""The recipes of examples/configs say what the paper says, and the libraries accept them."""

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from trl import ModelConfig, TrlParser

from trl_ulorl.config import UloRLConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted((EXAMPLES / "configs").glob("qwen3_*.yaml"), key=lambda path: path.stem)

MODELS = {"4b": "Qwen/Qwen3-4B", "8b": "Qwen/Qwen3-8B", "30b_a3b": "Qwen/Qwen3-30B-A3B"}
LENGTHS = {"32k": (32_768, 1), "64k": (65_536, 4), "96k": (98_304, 8), "128k": (131_072, 8)}  # tokens, segments
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
SCRIPT_ARGUMENTS = {"dataset_name", "dataset_split", "reward"}

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def load(path):
    return yaml.safe_load(path.read_text())


def gpus(path):
    return int(re.search(r"^# GPUs: (\d+)$", path.read_text(), re.MULTILINE).group(1))


def test_each_model_has_each_length():
    assert {path.stem for path in RECIPES} == {f"qwen3_{model}_{length}" for model in MODELS for length in LENGTHS}


@each_recipe
def test_file_name_tells_model_and_length(path):
    model, length = re.fullmatch(r"qwen3_(.+)_(\d+k)", path.stem).groups()
    recipe = load(path)
    assert recipe["model_name_or_path"] == MODELS[model]
    assert (recipe["max_completion_length"], recipe["num_segments"]) == LENGTHS[length]
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
    recipe = load(path)
    overrides = recipe.get("model_init_kwargs", {"max_position_embeddings": QWEN3_POSITIONS})
    assert overrides["max_position_embeddings"] >= recipe["max_completion_length"] + PROMPT_TOKENS
    if recipe["max_completion_length"] + PROMPT_TOKENS <= QWEN3_POSITIONS:
        assert "model_init_kwargs" not in recipe, "within Qwen3's own positions the model stays as it is"
        return
    rope = overrides["rope_parameters"]
    assert rope["factor"] * rope["original_max_position_embeddings"] == overrides["max_position_embeddings"]
    assert rope["original_max_position_embeddings"] == QWEN3_TRAINED_POSITIONS
    config = Qwen3Config(hidden_size=32, num_attention_heads=2, head_dim=16, **overrides)
    assert config.rope_parameters == rope
    # YaRN's attention scaling, 0.1 ln(factor) + 1, shows that the parameters reach the model: 1.14 at 4.0625
    assert 1.07 < Qwen3RotaryEmbedding(config).attention_scaling < 1.15


@each_recipe
def test_parser_and_config_accept_it(path, tmp_path):
    # One process on a CPU stands in for the GPUs; everything else is parsed as the training script parses it.
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    training, model, rest = TrlParser((UloRLConfig, ModelConfig)).parse_args_and_config(
        arguments, return_remaining_strings=True
    )
    recipe = load(path)
    assert {name.removeprefix("--") for name in rest[::2]} == SCRIPT_ARGUMENTS
    assert model.model_name_or_path == recipe["model_name_or_path"]
    assert model.dtype == "bfloat16"
    for name in (
        "max_completion_length",
        "num_segments",
        "importance_mode",
        "overlong",
        "temperature",
        "learning_rate",
    ):
        assert getattr(training, name) == recipe[name]
    assert training.model_init_kwargs == recipe.get("model_init_kwargs")


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
