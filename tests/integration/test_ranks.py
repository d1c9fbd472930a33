"""Two real processes over gloo: no hang, the same parameters and the same ledger on both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trl_ulorl.checkpoints import newest_whole_checkpoint

pytestmark = pytest.mark.slow


def launch(folder, num_ranks, **overrides):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [str(Path(__file__).with_name("rank_run.py")), str(folder), json.dumps(overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def run_ranks(folder, num_ranks, **overrides):
    done = launch(folder, num_ranks, **overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def run_two_ranks(folder, **overrides):
    return run_ranks(folder, 2, **overrides)


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


def test_ranks_end_together(tmp_path):
    """A launcher stops all when one fails in its exit, and rank 0 may still write."""
    run_two_ranks(tmp_path, max_steps=1, slow_rank=0)
    first, second = (json.loads((tmp_path / f"end{rank}.json").read_text()) for rank in range(2))
    assert second["before"] < first["before"] <= second["after"]


def without_and_with(option, tmp_path, **settings):
    """Return what rank 0 ended with, by whether an option was set."""
    runs = {}
    for is_set in (False, True):
        folder = tmp_path / str(is_set)
        folder.mkdir()
        ranks = run_two_ranks(folder, **{option: is_set}, **settings)
        assert_ranks_agree(*ranks)
        runs[is_set] = ranks[0]
    return runs


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
    runs = without_and_with("leaves_padding", tmp_path, **settings)
    assert runs[False]["parameters"] == pytest.approx(runs[True]["parameters"], rel=1e-5, abs=1e-5)
    for without, padded in zip(runs[False]["history"][:2], runs[True]["history"][:2], strict=True):
        assert 1 <= without["rollout/padding_ratio"] < 0.9 * without["rollout/padding_ratio_uncut"]
        assert padded["rollout/padding_ratio"] == padded["rollout/padding_ratio_uncut"]
        assert padded["rollout/padding_ratio_uncut"] == without["rollout/padding_ratio_uncut"]


def test_ranks_join_the_same_numbers_of_rows(tmp_path):
    settings = {"num_segments": 2, "max_inflight_groups": 8, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    runs = without_and_with("dynamic_micro_batches", tmp_path, **settings)
    assert runs[True]["parameters"] == pytest.approx(runs[False]["parameters"], rel=1e-5, abs=1e-5)
    assert runs[True]["ledger"] == runs[False]["ledger"]


# ------------------------------------------------------------------------------------------------- resume, stop and death

SAVING = {"num_segments": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_inflight_groups": 12}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A run of two ranks that nothing interrupts: its folder, and what each rank ended with."""
    folder = tmp_path_factory.mktemp("two_ranks")
    return folder, run_two_ranks(folder, per_device_train_batch_size=8, **SAVING)


def test_one_two_and_four_ranks_go_on_from_two(tmp_path, two_ranks):
    """With the same global batch; two ranks go on exactly as the run that was not interrupted."""
    origin, whole = two_ranks
    saved = json.loads((origin / "run" / "checkpoint-2" / "rollout" / "ledger.json").read_text())
    assert saved["groups"]["unfinished"] > 2
    for num_ranks in (1, 2, 4):
        folder = tmp_path / f"on_{num_ranks}"
        shutil.copytree(origin / "run" / "checkpoint-2", folder / "run" / "checkpoint-2")
        shutil.copy(origin / "run" / "rollouts.jsonl", folder / "run" / "rollouts.jsonl")
        ranks = run_ranks(folder, num_ranks, per_device_train_batch_size=16 // num_ranks, resume=True, **SAVING)
        assert all(rank["parameters"] == ranks[0]["parameters"] for rank in ranks)
        assert all(rank["ledger"] == ranks[0]["ledger"] for rank in ranks)
        ledger = ranks[0]["ledger"]["groups"]
        assert ledger["trained"] == 4 * 4
        lines = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
        ids = [line["group"] for line in lines]
        assert len(ids) == len(set(ids)) == ledger["trained"] + ledger["filtered"] + ledger["set_aside"]
        # What two ranks had admitted is trained on or filtered first.
        assert all(line["admitted"] <= 2 for line in lines[: saved["groups"]["admitted"] // 2])
        if num_ranks == 2:
            assert ranks[0]["parameters"] == whole[0]["parameters"] and ranks[0]["ledger"] == whole[0]["ledger"]


def test_a_signal_to_one_rank_stops_and_saves_all(tmp_path, two_ranks):
    whole, number = two_ranks[1], signal.SIGTERM
    settings = {**SAVING, "save_steps": 100, "per_device_train_batch_size": 8}
    done = launch(tmp_path, 2, signal_on_rank=[int(number), 1], at_step=2, **settings)
    assert done.returncode != 0
    assert f"{number.name} stopped the run at step 2, saved in" in done.stderr
    assert "resume_from_checkpoint=True" in done.stderr
    resumed = run_two_ranks(tmp_path, resume=True, **settings)
    assert resumed[0]["parameters"] == whole[0]["parameters"] and resumed[0]["ledger"] == whole[0]["ledger"]


def test_the_death_of_a_rank_ends_the_job_with_the_reason(tmp_path):
    started = time.monotonic()
    done = launch(tmp_path, 2, signal_on_rank=[int(signal.SIGKILL), 1], at_step=2, **{**SAVING, "save_steps": 1})
    assert done.returncode != 0 and time.monotonic() - started < 120
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr
    assert newest_whole_checkpoint(tmp_path / "run", discards=False).endswith("checkpoint-2")
