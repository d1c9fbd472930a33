"""A checkpoint holds the rollouts in progress: a resumed run is the run that was never interrupted."""

import json

import pytest
import torch
from helpers import make_trainer, parameters

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 3, "save_steps": 4},
        {"gradient_accumulation_steps": 2, "importance_mode": "sais"},
        # The next update begins inside the batch.
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "save_steps": 4},
    ],
    ids=["window end", "inside a window", "accumulation", "inside a batch"],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, overrides):
    settings = {"num_segments": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, **overrides}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    log = (tmp_path / "run" / "rollouts.jsonl").read_text()
    checkpoint = tmp_path / "run" / f"checkpoint-{settings['save_steps']}"
    saved = json.loads((checkpoint / "rollout" / "ledger.json").read_text())
    assert saved["groups"]["unfinished"] > 0

    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, value in parameters(whole).items():
        torch.testing.assert_close(value, parameters(resumed)[name], rtol=0, atol=0, msg=name)
    assert resumed.ledger() == whole.ledger()
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() == log


def test_resume_without_a_rollout_log(tmp_path):
    settings = {"num_segments": 4, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "log_rollouts": False}
    make_trainer(tmp_path, **settings).train()
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.state.global_step == 3
    assert not (tmp_path / "run" / "rollouts.jsonl").exists()


def test_state_is_json_and_safetensors_only(tmp_path):
    make_trainer(tmp_path, num_segments=4, max_steps=1, save_strategy="steps", save_steps=1).train()
    names = {path.name for path in (tmp_path / "run" / "checkpoint-1" / "rollout").iterdir()}
    assert names == {"rank0.json", "rank0.safetensors", "ledger.json"}


def test_a_checkpoint_without_rollouts_is_refused(tmp_path):
    settings = {"num_segments": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, save_only_model=True, **settings).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ValueError, match="Resume from a full checkpoint, or start a new run"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(("key", "value", "remedy"), [("num_ranks", 3, "as many ranks"), ("format", 9, "the version")])
def test_a_foreign_state_is_refused_by_name(tmp_path, key, value, remedy):
    settings = {"num_segments": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, **settings).train()
    path = tmp_path / "run" / "checkpoint-1" / "rollout" / "rank0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=remedy):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
