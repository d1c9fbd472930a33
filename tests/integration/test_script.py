"""The training script, the way a user starts it: no arguments, own data and reward, resumed, two processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ulorl.cli import main
from trl_ulorl.records import read_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_qwen3.py")
DEMO = str(ROOT / "examples" / "configs" / "demo.yaml")
SMALL = ["--max_steps", "2", "--eval_problems", "4", "--eval_k", "2", "--per_device_train_batch_size", "16"]


def run(*command, cwd=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_embedded_run_ends_in_figures_plots_and_a_plain_model(tmp_path):
    folder = tmp_path / "run"
    output = run(sys.executable, SCRIPT, "--output_dir", str(folder), *SMALL)
    assert "gain" in output and "Ledger" in output
    assert re.search(rf"All of it in one page: \S*trl-ulorl report {re.escape(str(folder))}$", output, re.MULTILINE)
    assert main(["report", str(folder)]) == 0
    assert "Held-out accuracy" in (folder / "report.html").read_text(encoding="utf-8")
    summary = json.loads((folder / "summary.json").read_text())
    names = {"accuracy_before", "accuracy_after", "standard_error_before", "standard_error_after", "sigma"}
    assert names | {"entropy_last_third", "train_seconds", "lengths", "ledger"} <= summary.keys()
    entropies = [entry["entropy"] for entry in read_lines(folder / "metrics.jsonl") if "entropy" in entry]
    thirds = [summary[f"entropy_{name}_third"] for name in ("first", "last")]
    assert thirds == entropies and len(thirds) == 2, "of two steps each is a third, here as in the report"
    for part, first in (("groups", "admitted"), ("tokens", "generated")):
        entries = summary["ledger"][part]
        assert entries[first] == sum(entries.values()) - entries[first] > 0
    for picture in ("accuracy", "entropy", "masked", "lengths", "timeline"):
        assert (folder / f"{picture}.png").stat().st_size > 5000
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() < 1e6
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
    # The command is the same script.
    command = [
        sys.executable,
        "-m",
        "trl_ulorl.cli",
        "train",
        "--config",
        DEMO,
        "--model_name_or_path",
        "embedded",
        "--output_dir",
        str(tmp_path / "command"),
    ]
    run(*command, *SMALL)
    assert (tmp_path / "command" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_own_rows_own_reward_and_a_resumed_run(tmp_path):
    rows = [{"problem": f"{i % 9 + 1}+{i // 9 + 1}=", "answer": str(i % 9 + i // 9 + 2)} for i in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def odd(completions, answer, **kwargs):\n    return [float(len(c[0]['content']) % 2) for c in completions]\n"
    )
    folder = tmp_path / "run"
    common = [sys.executable, SCRIPT, "--output_dir", str(folder), "--dataset_name", "mine.jsonl"]
    common += ["--reward", "my_rewards:odd", "--per_device_train_batch_size", "16", "--save_strategy", "steps"]
    common += ["--save_steps", "1", "--eval_problems", "0"]
    run(*common, "--max_steps", "2", cwd=tmp_path)
    whole = load_file(folder / "model.safetensors")
    (folder / "checkpoint-2" / "trainer_state.json").unlink()  # so that the newest whole checkpoint is the first
    output = run(*common, "--max_steps", "2", "--resume_from_checkpoint", str(folder / "checkpoint-1"), cwd=tmp_path)
    assert "Goes on after step 1, " in output
    resumed = load_file(folder / "model.safetensors")
    assert all((whole[name] == resumed[name]).all() for name in whole)
    again = subprocess.run(
        [*common, "--max_steps", "2"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert again.returncode == 2 and "holds checkpoints of an earlier run, up to step 2" in again.stderr
    assert load_file(folder / "model.safetensors").keys() == whole.keys(), "nothing was touched"
    of_two_steps = json.loads((folder / "summary.json").read_text())
    run(*common, "--max_steps", "3", "--resume_from_checkpoint", "True", cwd=tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["train_seconds"] > of_two_steps["train_seconds"], "the time before it was resumed is in it"


def test_accelerate_launch_on_two_processes(tmp_path):
    folder = tmp_path / "run"
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file"]
    launcher += [str(ROOT / "examples" / "accelerate_configs" / "cpu.yaml"), "--num_processes", "2"]
    run(*launcher, SCRIPT, "--output_dir", str(folder), *SMALL)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger"]["groups"]["trained"] == 2 * 4
