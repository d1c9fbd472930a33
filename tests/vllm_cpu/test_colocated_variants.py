"""Policies that are not plain checkpoints: adapters merged at each sync, and positions beyond the checkpoint's."""

import pytest
from peft import LoraConfig
from vllm_helpers import TOLERANCE, gaps_after_updates, largest_gap, make_requests, make_trainer, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 512}
    return make_trainer(
        tmp_path_factory.mktemp("run"),
        peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
        model_init_kwargs={"max_position_embeddings": 1024, "rope_parameters": rope, "dtype": "float32"},
        num_segments=1,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_mask",
        rollout_schedule="segment",
        max_steps=2,
    )


def test_adapter_and_positions_are_the_policys(trainer):
    assert trainer.rollout_engine.max_model_length == 1024
    gaps = gaps_after_updates(trainer)
    assert len(gaps) == 2
    assert max(gaps) < TOLERANCE, gaps
    with trainer.model.disable_adapter():
        requests = make_requests(trainer)
        assert largest_gap(trainer, requests, list(trainer.rollout_engine.decode(requests))) > TOLERANCE


def test_trls_correction_gets_the_sampled_logps(trainer):
    """With one segment it is allowed; its ratios are 1 up to the gap between the two forward passes."""
    entry = next(entry for entry in trainer.state.log_history if "sampling/sampling_logp_difference/max" in entry)
    assert entry["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=TOLERANCE)
