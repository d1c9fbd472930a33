"""A run killed by SIGKILL again and again ends as the run that was never killed.

`TRL_ULORL_KILLS=20` asks for more kills, `TRL_ULORL_KILL_SEED=1` for other moments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_nothing_is_lost_or_changed_by_kills(tmp_path):
    num_kills = int(os.environ.get("TRL_ULORL_KILLS", "4"))
    seed = os.environ.get("TRL_ULORL_KILL_SEED", "0")
    command = [sys.executable, str(Path(__file__).with_name("kill_run.py")), str(tmp_path), str(num_kills), seed]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    timeout = 120 + 20 * num_kills
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["kills"]) == num_kills
    whole, killed = result["whole"], result["killed"]
    assert killed["parameters"] == whole["parameters"]
    assert killed["ledger"] == whole["ledger"]
    assert result["num_prefixes"] > 0 and result["changed"] == [] and result["same_tokens"]
    logs = [(tmp_path / name / "run" / "rollouts.jsonl").read_text() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    ids = [json.loads(line)["group"] for line in logs[1].splitlines()]
    groups = killed["ledger"]["groups"]
    assert len(ids) == len(set(ids)) == groups["trained"] + groups["filtered"] + groups["set_aside"]
