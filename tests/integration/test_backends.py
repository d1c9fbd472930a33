"""DDP, ZeRO-2, ZeRO-3 and FSDP2 in two real processes over gloo: what they train on, and what comes out, is one process's."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_run import run_once
from conftest import make_model
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SECONDS = 240  # for one launch; it takes about 40 on two idle cores
NUM_PARAMETERS = sum(value.numel() for value in make_model().parameters())

# Both importance ratios and masks at work, groups that are filtered, groups that span updates.
WHOLE = {
    "max_steps": 4,
    "importance_mode": "sais",
    "dmmpts": {"tau": 0.08, "sigma": 5.0},
    "save_strategy": "steps",
    "save_steps": 2,
}
RESUMED = {**WHOLE, "resume_from": ["whole", 2], "save_strategy": "no"}
# Batches of three rows, so that ranks call `generate` different numbers of times.
SAMPLED = {"max_steps": 3, "engine": "transformers", "decode_batch_size": 3, "max_inflight_groups": 9}
# One group a batch and one in flight: one rank decodes it, the other has nothing.
IDLE = {
    "max_steps": 2,
    "engine": "transformers",
    "num_segments": 2,
    "max_inflight_groups": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}


def launch(folder, backend, runs, num_ranks=2):
    """Make the runs one after the other on each rank and return each run's results by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += [str(Path(__file__).with_name("backend_run.py")), str(folder), backend, json.dumps(runs)]
    start(folder, command)
    return {
        name: [json.loads((folder / name / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
        for name in runs
    }


def start(folder, command):
    """Run a launcher and its ranks to their end, or end them all after a time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    environment["TIME_LIMIT"] = str(SECONDS - 20)
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(SECONDS)
        finally:
            if process.poll() is None:  # ranks that hang would outlive the launcher
                os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-4000:]


def needs_deepspeed():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    if shutil.which("g++") is None:
        pytest.skip("DeepSpeed compiles its operations for a CPU when it starts, and there is no g++")


def left_groups(folder):
    """Return which groups left the pools, how and when."""
    lines = map(json.loads, (folder / "run" / "rollouts.jsonl").read_text().splitlines())
    return {(line["group"], line["row"], line["admitted"], line["left"], line["outcome"]) for line in lines}


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def assert_same_weights(folder, reference):
    found, expected = weights(folder), weights(reference)
    # ZeRO-2 and FSDP2 write the head that is tied to the embedding once more.
    assert expected.keys() <= found.keys() <= {*expected, "lm_head.weight"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


def logged(result, name):
    return [entry[name] for entry in result["history"] if name in entry]


def assert_uneven_work_with_the_current_weights(first, second):
    assert first["ledger"] == second["ledger"]
    calls = [sum(-(-number // 3) for number in result["decoded"]) for result in (first, second)]
    assert calls[0] != calls[1]
    # What age 0 differs in is the engine alone: it decoded with the policy's weights, whole and up to date.
    assert max(logged(first, "importance/kl_age_0")) < 1e-6
    assert max(abs(ratio - 1) for ratio in logged(first, "importance/ratio_age_0")) < 1e-4
    assert max(logged(first, "importance/kl_age_1")) > 1e-4  # other versions' tokens do differ


@pytest.mark.parametrize(
    ("backend", "distributed_type"),
    [("ddp", "MULTI_CPU"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED"), ("fsdp2", "FSDP")],
)
def test_two_ranks_train_on_what_one_does_to_the_same_weights(tmp_path, backend, distributed_type):
    """With an engine whose completions depend on prompt and place in the group alone; and again across a resume."""
    if distributed_type == "DEEPSPEED":
        needs_deepspeed()
    alone = tmp_path / "alone"
    _, reference = run_once(alone, **{**WHOLE, "per_device_train_batch_size": 16, "save_strategy": "no"})
    assert min(logged(reference, "dmmpts/masked_frac")) > 0
    assert {outcome for *_, outcome in left_groups(alone)} == {"trained", "filtered"}

    runs = {"whole": WHOLE, "resumed": RESUMED, "sampled": SAMPLED, "idle": IDLE}
    if backend == "zero3":
        runs["failing"] = {**SAMPLED, "fails_on_rank": 1}
    results = launch(tmp_path, backend, runs)
    for first, second in (results["whole"], results["resumed"]):
        assert first["backend"] == distributed_type
        assert first["ledger"] == second["ledger"] == reference["ledger"]
    for name in ("whole", "resumed"):
        assert_same_weights(tmp_path / name, alone)
    assert left_groups(tmp_path / "whole") == left_groups(alone)
    held = [result["held_numbers"] for result in results["whole"]]
    if backend in ("ddp", "zero2"):
        assert held == [NUM_PARAMETERS] * 2
    else:  # really sharded: outside of a forward pass a rank holds its own part, or under ZeRO-3 none by name
        assert sum(held) <= NUM_PARAMETERS + 2 * 128
    assert_uneven_work_with_the_current_weights(*results["sampled"])
    first, second = results["idle"]
    assert set(first["decoded"]) == {0} or set(second["decoded"]) == {0}
    assert first["ledger"] == second["ledger"]
    if backend == "zero3":
        first, second = results["failing"]
        assert second["error"] == "OSError: this rank's memory is full"
        assert first["error"].startswith("RankFailedError: The rollout failed on rank 1 (OSError: this rank's memory")


def adapter(folder):
    return load_file(folder / "final" / "adapter_model.safetensors")


def assert_adapter_was_trained(folder):
    """LoRA's second matrices start at zero."""
    trained = {name: value for name, value in adapter(folder).items() if "lora_B" in name}
    assert len(trained) == 4
    assert all(value.abs().max() > 1e-4 for value in trained.values())


LORA = {**WHOLE, "lora": True, "learning_rate": 0.05}


def test_lora_in_one_process_trains_the_adapter_alone(tmp_path):
    trainer, result = run_once(tmp_path / "whole", **LORA)
    base = {name: value for name, value in trainer.model.named_parameters() if "lora" not in name}
    for (name, value), expected in zip(base.items(), make_model().parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)
    assert_adapter_was_trained(tmp_path / "whole")
    checkpoint = str(tmp_path / "whole" / "run" / "checkpoint-2")
    _, again = run_once(tmp_path / "resumed", **{**LORA, "resume_from": checkpoint, "save_strategy": "no"})
    assert again["ledger"] == result["ledger"]
    for name, value in adapter(tmp_path / "whole").items():
        torch.testing.assert_close(adapter(tmp_path / "resumed")[name], value, rtol=0, atol=0, msg=name)
    _, sampled = run_once(tmp_path / "sampled", **{**SAMPLED, "lora": True})
    assert max(logged(sampled, "importance/kl_age_0")) < 1e-6


def test_lora_under_zero2_trains_the_adapter_that_one_process_does(tmp_path):
    needs_deepspeed()
    run_once(tmp_path / "alone", **{**LORA, "per_device_train_batch_size": 16, "save_strategy": "no"})
    resumed = {**LORA, "resume_from": ["whole", 2], "save_strategy": "no"}
    results = launch(tmp_path, "zero2", {"whole": LORA, "resumed": resumed, "sampled": {**SAMPLED, "lora": True}})
    assert_adapter_was_trained(tmp_path / "whole")
    for name in ("whole", "resumed"):
        for key, value in adapter(tmp_path / "alone").items():
            torch.testing.assert_close(adapter(tmp_path / name)[key], value, rtol=0, atol=1e-5, msg=key)
    assert left_groups(tmp_path / "whole") == left_groups(tmp_path / "alone")
    assert_uneven_work_with_the_current_weights(*results["sampled"])


def test_the_script_with_the_launch_file_of_zero3(tmp_path):
    needs_deepspeed()
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--mixed_precision", "no"]
    command += ["--config_file", str(root / "examples" / "accelerate_configs" / "zero3.yaml")]
    command += [
        str(root / "examples" / "train_qwen3.py"),
        "--use_cpu",
        "false",
        "--ddp_backend",
        "gloo",
        "--max_steps",
        "2",
    ]
    command += ["--eval_problems", "3", "--eval_k", "2", "--per_device_train_batch_size", "16"]
    start(tmp_path, [*command, "--output_dir", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["ledger"]["groups"]["trained"] == 8
    assert summary["accuracy_before"] > 0
    assert sum(value.numel() for value in load_file(tmp_path / "model.safetensors").values()) > 700_000
