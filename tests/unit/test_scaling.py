"""docs/scaling.md and the Slurm script: figures are the plan's, commands parse."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import AutoTokenizer
from trl import ModelConfig
from trl.chat_template_utils import __file__ as trl_templates

from trl_ulorl.cli import build_parser
from trl_ulorl.cli.dimensions import KNOWN_MODELS, model_config, model_shape, read_launch
from trl_ulorl.cli.recipe import plan_recipe
from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.memory import GIB, Launch, activation_bytes, state_bytes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
ZERO3 = ROOT / "examples" / "accelerate_configs" / "zero3.yaml"
GIB_OF_GB = {80: 79, 141: 139}
LENGTHS = {"32k": 32_768, "64k": 65_536, "96k": 98_304, "128k": 131_072}


def shape_of(name, **model_arguments):
    return model_shape(model_config(name), ModelConfig(**model_arguments))


def state_rows():
    for name in KNOWN_MODELS:
        shape, _ = shape_of(name)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        _, adapter = shape_of(name, use_peft=True, lora_target_modules=targets)
        ways = {
            "DDP, float32, 8": (Launch(num_processes=8), 4, None),
            "DDP, LoRA, 8": (Launch(num_processes=8), 2, adapter),
        }
        for backend, label in (("zero2", "ZeRO-2"), ("zero3", "ZeRO-3"), ("fsdp2", "FSDP2")):
            ways[f"{label}, 8"] = (Launch(backend=backend, num_processes=8), 2, None)
        ways["ZeRO-3, 64"] = (Launch(backend="zero3", num_processes=64), 2, None)
        for way, (launch, weight_bytes, adapter_parameters) in ways.items():
            state = state_bytes(shape, launch, weight_bytes=weight_bytes, adapter_parameters=adapter_parameters)
            parts = (state.weights, state.gradients, state.optimizer, state.buffers, state.total)
            yield f"| {name} | {way} | " + " | ".join(f"{part / GIB:.1f}" for part in parts) + " |"


def activation_rows():
    for name in KNOWN_MODELS:
        shape, _ = shape_of(name)
        cells = [f"{activation_bytes(shape, tokens + 2048) / GIB:.1f}" for tokens in LENGTHS.values()]
        yield f"| {name} | " + " | ".join(cells) + f" | {shape.kv_bytes_per_token():,} |"


def recipe_rows():
    for path in sorted((ROOT / "examples" / "configs").glob("qwen3_*.yaml"), key=lambda path: path.stem):
        gpus, gb = map(int, re.search(r"^# GPUs: (\d+) of (\d+) GB", path.read_text(), re.MULTILINE).groups())
        command = ["plan", "--config", str(path), "--launch", str(ZERO3), "--num-processes", str(gpus)]
        options, options_of_training = build_parser().parse_known_args([*command, "--gpu-gib", str(GIB_OF_GB[gb])])
        options.training_options = options_of_training
        plan = plan_recipe(options)
        memory = plan.memory
        cells = [
            f"{gpus} of {gb} GB",
            *(f"{each / GIB:.1f}" for each in (memory.update, memory.rollout, memory.pools)),
        ]
        yield f"| `{path.stem}` | " + " | ".join(cells) + f" | {memory.kv_tokens / plan.run.max_tokens:.1f} |"


@pytest.mark.parametrize("rows", [state_rows, activation_rows, recipe_rows], ids=["state", "activations", "recipes"])
def test_the_tables_are_the_plans(rows):
    expected = list(rows())
    first_cells = {row.split("|")[1].strip() for row in expected}
    width = expected[0].count("|")
    shown = [
        line for line in PAGE.splitlines() if line.count("|") == width and line.split("|")[1].strip() in first_cells
    ]
    assert shown == expected


# --- commands ---------------------------------------------------------------------------------------------------------


def accelerate_commands():
    text = re.sub(r"\\\n\s*", "", PAGE)
    return re.findall(r"^accelerate launch (.+)$", text, re.MULTILINE)


def test_the_page_has_commands():
    assert len(accelerate_commands()) >= 4


@pytest.mark.parametrize("command", accelerate_commands())
def test_launch_commands_parse(command):
    parsed = launch_command_parser().parse_args(command.split())
    for file in (parsed.config_file, parsed.training_script, *re.findall(r"--config (\S+)", command)):
        assert file in (None, "trl_ulorl.cli") or (ROOT / file).is_file(), file
    if parsed.config_file is not None:
        read_launch(ROOT / parsed.config_file, None)


def fake_commands(folder):
    """Slurm and accelerate as far as the script needs them: srun runs its task once for each machine."""
    contents = {
        "scontrol": 'printf "node1\\nnode2\\n"',
        "srun": 'shift\nfor rank in 0 1; do SLURM_NODEID=$rank "$@"; done',
        "accelerate": 'printf "%s\\n" "$@" "timeout=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "" >> "$CALLS"',
    }
    for name, content in contents.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_slurm_script_launches_every_machine(is_resumed, tmp_path):
    fake_commands(tmp_path)
    if is_resumed:
        (tmp_path / "outputs/qwen3_4b_32k/checkpoint-10").mkdir(parents=True)
        (tmp_path / "outputs/qwen3_4b_32k/checkpoint-10/trainer_state.json").write_text("{}")
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_NODELIST": "node[1-2]"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    arguments = ["examples/configs/qwen3_4b_32k.yaml", "--run_name", "two words"]
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, cwd=tmp_path, check=True, timeout=20)
    blocks = [block.splitlines() for block in calls.read_text().split("\n\n")[:-1]]
    assert len(blocks) == 2
    for rank, block in enumerate(blocks):
        assert block.pop() == "timeout=1700"
        assert block.pop(0) == "launch"
        parsed = launch_command_parser().parse_args(block)
        assert (parsed.num_machines, parsed.num_processes, parsed.machine_rank) == (2, 8, rank)
        assert (parsed.main_process_ip, parsed.main_process_port) == ("node1", 29500)
        assert parsed.module and parsed.training_script == "trl_ulorl.cli"
        assert parsed.config_file == "examples/accelerate_configs/zero3.yaml"
        expected = ["train", "--config", "examples/configs/qwen3_4b_32k.yaml", "--output_dir", "outputs/qwen3_4b_32k"]
        expected += ["--resume_from_checkpoint", "True"] if is_resumed else []
        assert parsed.training_script_args == [*expected, "--run_name", "two words"]


def test_the_slurm_script_wants_a_recipe():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False, timeout=20).returncode == 0
    run = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False, timeout=20)
    assert run.returncode != 0 and "pass a recipe" in run.stderr


# --- the prompt -------------------------------------------------------------------------------------------------------


def test_the_prompt_text_is_that_of_the_recipes():
    """Qwen3's template as TRL ships it; a tokenizer of another model stands in for what renders it."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    tokenizer.chat_template = (Path(trl_templates).parent / "chat_templates" / "qwen3.jinja").read_text()
    messages = [{"role": "user", "content": "{problem}"}]
    texts = {
        thinks: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **thinks_argument)
        for thinks, thinks_argument in {
            None: {},
            True: {"enable_thinking": True},
            False: {"enable_thinking": False},
        }.items()
    }
    assert texts[None] == texts[True] == "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    assert texts[False] == texts[True] + "<think>\n\n</think>\n\n"
    shown = texts[True].replace("\n", "\\n")
    assert f"`{shown}`" in PAGE
    for path in (ROOT / "examples" / "configs").glob("qwen3_*.yaml"):
        assert shown in path.read_text()
