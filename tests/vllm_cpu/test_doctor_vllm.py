"""The doctor sees whether a colocated vLLM follows the policy, and whether it keeps keys and values of old weights."""

import pytest
from vllm_helpers import make_trainer, needs_vllm

from trl_ulorl import doctor, doctor_patient

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("doctor"), max_steps=1)
    yield trainer
    trainer.end()


def patient_of(trainer):
    return doctor_patient.Patient(trainer, num_prompts=16, num_tokens=64)


@pytest.mark.parametrize("check", doctor.CHECKS, ids=lambda check: check.__name__)
def test_a_sound_engine_passes(trainer, check):
    found = check(patient_of(trainer))
    assert found.ok, found.message


def test_an_engine_that_keeps_old_keys_and_values(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation.llm, "reset_prefix_cache", lambda: True)
    found = doctor.check_stale_cache(patient_of(trainer))
    assert not found.ok and found.figure["mean"] > 10 * doctor_patient.EXACT.mean


@pytest.mark.xfail(
    strict=True, reason="on a CPU weights that vLLM has loaded anew are the policy's own tensors: they follow"
)
def test_an_engine_that_keeps_old_weights(trainer, monkeypatch):
    assert trainer.vllm_generation.llm.reset_prefix_cache()
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    found = doctor.check_stale_cache(patient_of(trainer))
    assert not found.ok and found.figure["mean"] > 10 * doctor_patient.EXACT.mean
