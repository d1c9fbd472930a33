"""Two real processes over gloo with an engine in each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers import TOLERANCE, environment_of_a_process, needs_vllm

pytestmark = needs_vllm


def run_two_ranks(folder, **overrides):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(__file__).with_name("vllm_rank_run.py")), str(folder), json.dumps(overrides)]
    environment = environment_of_a_process()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("schedule", ["segment", "continuous"])
def test_an_engine_on_each_rank(tmp_path, schedule):
    first, second = run_two_ranks(tmp_path, rollout_schedule=schedule, per_device_train_batch_size=16)
    assert first["parameters"] == second["parameters"]
    assert first["ledger"] == second["ledger"]
    assert first["ledger"]["groups"]["trained"] == 2 * 4
    assert max(first["gaps"] + second["gaps"]) < TOLERANCE
    # Four batches of four groups of eight in flight, or slots for two batches, over two engines.
    assert first["num_sequences"] == {"segment": 64, "continuous": 32}[schedule]


@pytest.mark.skipif(
    any(Path("/dev/shm").glob("-tp:*cpushm*")),
    reason="on a CPU vLLM's memory for tensor parallelism has one fixed name, and another run has it, or left it behind "
    "when it was killed: delete /dev/shm/-tp:*cpushm* if none is running",
)
def test_an_engine_that_both_ranks_share(tmp_path):
    """By tensor parallelism: both hold the same rollouts, sampled token for token alike."""
    first, second = run_two_ranks(tmp_path, vllm_tensor_parallel_size=2, per_device_train_batch_size=16)
    assert first["unfinished"] == second["unfinished"] != []
    assert first["parameters"] == second["parameters"]
    assert first["ledger"] == second["ledger"]
    assert max(first["gaps"] + second["gaps"]) < TOLERANCE
    assert first["num_sequences"] == 128
