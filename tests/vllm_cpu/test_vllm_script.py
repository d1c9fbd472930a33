"""The training script with `--engine vllm`."""

import json
import subprocess
import sys
from pathlib import Path

from vllm_helpers import environment_of_a_process, needs_vllm

pytestmark = needs_vllm

SCRIPT = Path(__file__).parents[2] / "examples" / "train_qwen3.py"
SMALL = ["--max_steps", "2", "--eval_problems", "4", "--eval_k", "2", "--per_device_train_batch_size", "16"]


def test_the_embedded_run_decodes_with_vllm_and_ends_cleanly(tmp_path):
    command = [sys.executable, str(SCRIPT), "--engine", "vllm", "--output_dir", str(tmp_path), *SMALL]
    environment = environment_of_a_process()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["ledger"]["groups"]["trained"] == 2 * 2
    assert 0 <= summary["accuracy_after"] <= 1
