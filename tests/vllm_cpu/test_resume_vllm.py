"""A run on a colocated vLLM that is resumed is the run that was never interrupted, the tokens that it samples included."""

import json

import pytest
import torch
from vllm_helpers import make_trainer, needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize("schedule", ["segment", "continuous"])
def test_resumed_run_samples_the_same_tokens(tmp_path, schedule):
    settings = {"rollout_schedule": schedule, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    whole.end()
    log = (tmp_path / "rollouts.jsonl").read_text()
    checkpoint = tmp_path / "checkpoint-2"
    assert json.loads((checkpoint / "rollout" / "ledger.json").read_text())["groups"]["unfinished"] > 0

    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.end()
    assert (tmp_path / "rollouts.jsonl").read_text() == log
    assert resumed.ledger() == whole.ledger()
    values = dict(resumed.model.named_parameters())
    for name, value in whole.model.named_parameters():
        torch.testing.assert_close(value, values[name], rtol=0, atol=1e-6, msg=name)
