"""The example on programs, from the warm start to figures, and with rows of one's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "train_code.py"
SMALL = ["--max_steps", "1", "--eval_problems", "4", "--eval_k", "1", "--max_completion_length", "32"]
SMALL += ["--per_device_train_batch_size", "16", "--disable_tqdm", "true"]


def run(*options, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_warm_start_training_and_own_rows(tmp_path):
    output = run("--output_dir", "run", "--warm_start_steps", "2", *SMALL, cwd=tmp_path)
    assert "programs/returned_frac" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["groups"]["trained"] == 2
    assert 0 <= summary["accuracy_before"] <= 1
    train, test = (
        [json.loads(line) for line in (tmp_path / "run" / "data" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert set(train[0]) == {"prompt", "function", "tests"}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}

    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train[:8]))
    own = ["--model_name_or_path", "run/warm_start", "--dataset_name", "mine.jsonl", "--bf16", "false"]
    own += ["--num_segments", "2", "--save_strategy", "no", "--report_to", "none"]
    run("--output_dir", "own", *own, *SMALL, cwd=tmp_path)
    assert json.loads((tmp_path / "own" / "summary.json").read_text())["ledger"]["groups"]["trained"] == 2
