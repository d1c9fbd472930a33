"""Each check of `trl-ulorl doctor` passes on what is sound and fails on what is broken in the one way that it looks for."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model
from helpers import make_trainer

from trl_ulorl import doctor, doctor_needs, doctor_patient, doctor_resume
from trl_ulorl.cli import main
from trl_ulorl.rollout.engine import DecodedSegment, DecodeRequest
from trl_ulorl.rollout.transformers import TransformersEngine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def patient(tmp_path):
    trainer = make_trainer(tmp_path, num_segments=4, max_completion_length=32)
    return doctor_patient.Patient(trainer, num_prompts=16, num_tokens=32)


class Around(TransformersEngine):
    """An engine that a test breaks by changing its requests or results."""

    def __init__(self, engine, request=lambda request: request, result=lambda decoded, request: decoded):
        self.__dict__.update(engine.__dict__)
        self._request, self._result = request, result

    def decode(self, requests):
        for decoded in super().decode([self._request(request) for request in requests]):
            yield self._result(decoded, requests[decoded.request_index])


def break_engine(patient, **changes):
    patient.trainer._collector.engine = Around(patient.trainer._collector.engine, **changes)


@pytest.mark.parametrize("check", [*doctor.CHECKS, doctor_needs.measure_entropy], ids=lambda check: check.__name__)
def test_a_sound_run_passes(patient, check):
    before = [value.clone() for value in patient.trainer.model.parameters()]
    found = check(patient)
    assert found.ok, found.message
    assert all(torch.equal(a, b) for a, b in zip(before, patient.trainer.model.parameters(), strict=True))


def test_an_engine_that_loses_the_last_token_of_a_prefix(patient):
    longest = max(ids.size for ids in patient.prompts)
    break_engine(
        patient,
        request=lambda r: DecodeRequest(r.token_ids[:-1], r.max_new_tokens) if r.token_ids.size > longest + 1 else r,
    )
    found = doctor.check_segments(patient)
    assert not found.ok and found.figure["different"] > 0
    assert found.figure["largest_tie_nats"] > doctor_patient.EXACT.tie
    assert "does not continue the prefix" in found.message


def test_log_probabilities_of_another_temperature(patient):
    patient.engine._generation_config.temperature = 1.0  # the trainer scores at 0.85
    found = doctor.check_logps(patient)
    assert not found.ok and found.figure["mean"] > 1e-2
    assert "same precision" in found.message


def test_a_gap_that_grows_with_the_position(patient):
    def drift(decoded, request):
        places = request.token_ids.size + np.arange(len(decoded.token_ids))
        logps = decoded.per_token_logps + 1e-3 * places
        return DecodedSegment(decoded.request_index, decoded.token_ids, logps, decoded.is_stopped)

    break_engine(patient, result=drift)
    found = doctor.check_logps(patient)
    assert not found.ok
    quarters = [found.figure[f"mean_quarter_{number}"] for number in (1, 2, 3, 4)]
    assert quarters == sorted(quarters) and quarters[3] > 1.5 * quarters[0]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"request": lambda r: DecodeRequest(r.token_ids, r.max_new_tokens + 1)}, "for a budget of"),
        (
            {"result": lambda d, r: DecodedSegment(d.request_index, d.token_ids, d.per_token_logps, not d.is_stopped)},
            "its last token says otherwise",
        ),
    ],
    ids=["one token too many", "wrong end"],
)
def test_an_engine_that_does_not_keep_to_the_cap(patient, changes, fault):
    break_engine(patient, **changes)
    found = doctor.check_cap(patient)
    assert not found.ok and found.figure["faults"] > 0
    assert fault in found.message


def test_an_engine_with_old_weights(patient):
    engine = patient.trainer._collector.engine
    old = make_model()  # the weights that the trainer's model was made with
    engine._generation_model = lambda: nullcontext(old)
    assert doctor.check_logps(patient).ok
    found = doctor.check_stale_cache(patient)
    assert not found.ok and found.figure["mean"] > 10 * doctor_patient.EXACT.mean
    assert "old weights" in found.message


def test_a_change_of_weights_too_small_to_tell(patient, monkeypatch):
    monkeypatch.setattr(doctor_patient.Patient, "changed_weights", lambda self: nullcontext())
    found = doctor.check_stale_cache(patient)
    assert not found.ok and "too little to tell" in found.message


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda model: model.config.rope_parameters.update(rope_theta=5e5), "turns at other frequencies"),
        (lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), "turns at other frequencies"),
        (lambda model: setattr(model.config, "max_position_embeddings", 37), "positions, the model has 37"),
        (lambda model: setattr(model.generation_config, "max_new_tokens", 24), "would cut outputs"),
    ],
    ids=["configuration", "model", "positions", "generation configuration"],
)
def test_altered_positions(patient, break_it, reason):
    break_it(patient.trainer.model)
    found = doctor.check_rope(patient)
    assert not found.ok and reason in found.message
    assert "`model_init_kwargs`" in found.message


def test_memory_by_hand(patient):
    trainer = patient.trainer
    host = 23 * 2**30
    found = doctor_needs.check_memory(patient, doctor_needs.Machine(host, device=None))
    assert found.ok
    # 4 batches of 2 groups in flight and one in training, 4 rollouts each of 32 tokens at 8 bytes
    assert found.figure["pools_gib"] == (8 + 2) * 4 * 32 * 8 / 2**30
    # 2 layers, keys and values, 1 head of 16 numbers of 4 bytes
    assert found.figure["kv_bytes_per_token"] == 2 * 2 * 16 * 4
    numbers = sum(value.numel() for value in trainer.model.parameters())
    assert found.figure["weights_gib"] == numbers * 4 / 2**30
    assert found.figure["gradients_and_optimizer_gib"] == numbers * 12 / 2**30
    needed = found.figure["host_needed_gib"] * 2**30
    assert doctor_needs.check_memory(patient, doctor_needs.Machine(int(needed), device=None)).ok
    short = doctor_needs.check_memory(patient, doctor_needs.Machine(int(needed) - 1, device=None))
    assert not short.ok and "Lower `decode_batch_size`" in short.message
    # Two processes have twice as many groups in flight; the batch is twice as large, and each holds it.
    two = doctor_needs.check_memory(patient, doctor_needs.Machine(host, device=None), num_processes=2)
    assert two.figure["pools_gib"] == (8 * 2 + 2 * 4) * 4 * 32 * 8 / 2**30
    small_device = doctor_needs.check_memory(patient, doctor_needs.Machine(host, device=1000))
    assert not small_device.ok and "The device needs" in small_device.message


def test_a_killed_run_comes_back(tmp_path):
    found = doctor_resume.check_resume(tmp_path, num_segments=4, num_generations=4)
    assert found.ok, found.message
    assert found.figure["tokens"] > 0 and found.figure["unfinished"] > 0


def test_a_checkpoint_that_the_disk_has_changed(tmp_path, monkeypatch):
    run = doctor_resume._run

    def run_and_change(folder, phase, sizes):
        done = run(folder, phase, sizes)
        if phase == "killed":
            for path in (folder / "run" / "checkpoint-1" / "rollout").glob("*.safetensors"):
                content = bytearray(path.read_bytes())
                content[-1:] = bytes([content[-1] ^ 1])
                path.write_bytes(content)
        return done

    monkeypatch.setattr(doctor_resume, "_run", run_and_change)
    found = doctor_resume.check_resume(tmp_path, num_segments=4, num_generations=4)
    assert not found.ok


def test_proposals():
    assert doctor_needs.proposed_sigma(np.array([0.24, 0.20, 0.14])) == 0.19
    assert doctor_needs.proposed_tau(np.log([0.995] * 80 + [0.3] * 20)) == 0.99
    assert doctor_needs.proposed_tau(np.log([0.985] * 30 + [0.3] * 70)) == 0.98
    assert doctor_needs.proposed_tau(np.log([0.3] * 100)) == 0.9
    assert doctor_needs.proposed_tau(np.log([0.9999999] * 100)) == 0.9999


# ------------------------------------------------------------------------------------------------------ command line


def test_the_embedded_model_is_well(tmp_path):
    command = [sys.executable, "-m", "trl_ulorl.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["ok"] and [check["name"] for check in report["checks"]] == [
        "segments_equal_one_shot",
        "logps_agree",
        "cap_holds",
        "no_stale_cache",
        "rope_agrees",
        "resume_keeps_pools",
        "memory_will_do",
        "entropy",
    ]
    figures = {check["name"]: check["figure"] for check in report["checks"]}
    assert 0.05 < figures["entropy"]["entropy_mean"] < 0.4
    assert figures["logps_agree"]["max"] < 1e-4


def raising(patient):
    raise RuntimeError("the engine is down")


def test_a_failing_check_is_exit_code_1(monkeypatch, capsys):
    broken = doctor_patient.Check("cap_holds", False, {"faults": 3}, "mend the engine")
    monkeypatch.setattr(doctor, "CHECKS", (lambda patient: broken, raising))
    sound = doctor_patient.Check("resume_keeps_pools", True, {"parts_that_differ": 0}, "came back")
    monkeypatch.setattr(doctor_resume, "check_resume", lambda *args, **kwargs: sound)
    config = str(ROOT / "examples" / "configs" / "demo.yaml")
    sized = ["--config", config, "--problems", "4", "--tokens", "32", "--per_device_train_batch_size", "16"]
    assert main(["doctor", *sized]) == 1
    output = capsys.readouterr().out
    assert "FAIL  cap_holds" in output and "mend the engine" in output and "faults 3" in output
    assert "FAIL  raising" in output and "RuntimeError: the engine is down" in output
    assert "2 of 5 checks failed." in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "no_such.yaml"], "check `--config`"),
        (["--model", "./no_such_model"], "no_such_model"),
        (["--num_segments", "0"], "num_segments"),
        (["--dataset_name", "no_such.jsonl"], "no file 'no_such.jsonl': check the path"),
        (["--no_such_option", "1"], "no_such_option"),
    ],
)
def test_bad_input_is_exit_code_2(capsys, options, message):
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err
