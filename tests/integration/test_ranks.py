"""Two real processes over gloo: no hang, the same parameters and the same ledger on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run_two_ranks(folder, **overrides):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(__file__).with_name("rank_run.py")), str(folder), json.dumps(overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_ranks_agree(first, second):
    assert first["parameters"] == second["parameters"]
    assert first["ledger"] == second["ledger"]


def test_groups_over_both_ranks_and_a_rank_with_nothing_to_decode(tmp_path):
    # One group of four a batch: it spans both ranks, and only one rank decodes it.
    ranks = run_two_ranks(
        tmp_path, per_device_train_batch_size=2, num_segments=4, max_inflight_groups=1, max_steps=4, overlong="mask"
    )
    assert_ranks_agree(*ranks)
    assert ranks[0]["ledger"]["groups"]["trained"] == 4
    assert 0 in ranks[0]["decoded"] + ranks[1]["decoded"]


def test_uneven_completion_with_many_groups_in_flight(tmp_path):
    ranks = run_two_ranks(tmp_path, num_segments=4, max_steps=4, gradient_accumulation_steps=2, max_staleness=4)
    assert_ranks_agree(*ranks)
    assert ranks[0]["decoded"] != ranks[1]["decoded"]
    assert ranks[0]["ledger"]["groups"]["trained"] == 4 * 8
    ages = [entry["rollout/age_max"] for entry in ranks[0]["history"] if "rollout/age_max" in entry]
    assert 0 < max(ages) <= 4


def test_a_reward_that_raises_on_one_rank_does_not_stop_the_other(tmp_path):
    ranks = run_two_ranks(tmp_path, num_segments=2, max_steps=2, fails_on_rank=1)
    assert_ranks_agree(*ranks)
    failed = [entry["verifier/failed"] for entry in ranks[0]["history"] if "verifier/failed" in entry]
    assert failed[-1] > 0
    assert ranks[0]["ledger"]["groups"]["set_aside"] + ranks[0]["history"][-2]["rollout/filled_groups"] > 0


def test_each_rank_cuts_its_own_micro_batches(tmp_path):
    """Widths differ between ranks, and TRL's metrics are still gathered; the update is the one of padded batches."""
    settings = {
        "num_segments": 2,
        "max_inflight_groups": 8,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "num_iterations": 2,
    }
    runs = {}
    for leaves_padding in (False, True):
        folder = tmp_path / str(leaves_padding)
        folder.mkdir()
        ranks = run_two_ranks(folder, leaves_padding=leaves_padding, **settings)
        assert_ranks_agree(*ranks)
        runs[leaves_padding] = ranks[0]
    assert runs[False]["parameters"] == pytest.approx(runs[True]["parameters"], rel=1e-5, abs=1e-5)
    for without, padded in zip(runs[False]["history"][:2], runs[True]["history"][:2], strict=True):
        assert 1 <= without["rollout/padding_ratio"] < 0.9 * without["rollout/padding_ratio_uncut"]
        assert padded["rollout/padding_ratio"] == padded["rollout/padding_ratio_uncut"]
        assert padded["rollout/padding_ratio_uncut"] == without["rollout/padding_ratio_uncut"]
