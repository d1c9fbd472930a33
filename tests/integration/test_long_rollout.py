"""benchmarks/long_rollout.py on a rollout of 1,024 tokens: decode, SIGKILL, resume, score, update."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_rollout.py"


@pytest.mark.slow
def test_a_rollout_goes_through_kill_resume_and_update(tmp_path):
    output = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--tokens", "1024", "--kill-at", "4", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    figures = json.loads(output.read_text())
    assert figures["tokens"] == 1024 and all(figures["checks"].values()) and len(figures["checks"]) == 7
    # Killed in the fourth segment: three are in the checkpoint, beside the sibling of 32 tokens. The short groups, 64 + 32
    # tokens each, are trained on in the round in which they end, one of them after the save.
    assert figures["held_after_resume"] == 3 * 128 + 32
    assert figures["ledger"]["tokens"] == {
        "generated": 1024 + 32 + 7 * 96,
        "trained": 1024 + 32 + 6 * 96,
        "filtered": 0,
        "set_aside": 0,
        "held": 96,
    }
    assert figures["phases"].keys() >= {"decode from 0", "decode from 896", "save", "load", "score", "update"}
    assert figures["phases"]["update"]["seconds"] > 0.01
    # Seven policies, of which the first decodes two segments, at ages 6, 6, 5, ... 0; the sibling's 32 tokens are of age 6.
    ages = 128 * (6 + 6 + 5 + 4 + 3 + 2 + 1 + 0) + 32 * 6
    assert figures["log"]["rollout/age_mean"] == pytest.approx(ages / (1024 + 32))
    assert figures["log"]["reward"] == 0.5 and figures["log"]["rollout/segments_per_rollout"] == 4.5
