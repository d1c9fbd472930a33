"""The update without padding: the same loss and gradient as with TRL's micro-batches, for every loss."""

import numpy as np
import pytest
import torch
from conftest import make_model
from helpers import EOS, PreparedEngine, leave_padding, make_trainer
from transformers import TrainerCallback

from trl_ulorl import microbatches

pytestmark = pytest.mark.slow

LIMIT = 96


class LongTailedEngine(PreparedEngine):
    """Completions of log-normal lengths, whose p99 is above four times the median."""

    def _plan(self, ids):
        if self.plans.get(ids):
            return self.plans[ids].pop(0)
        rng = np.random.default_rng([*ids, self.serials[ids]])
        self.serials[ids] += 1
        completion = rng.integers(4, 20, size=2 + int(8 * rng.lognormal(0, 1.0)))
        completion[-1] = EOS
        return {"prompt_length": len(ids), "ids": completion}


class Gradients(TrainerCallback):
    """Keeps the gradient of every update."""

    def __init__(self):
        self.updates = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.updates.append({name: value.grad.clone() for name, value in model.named_parameters()})


def train(tmp_path, dtype=torch.float32, **overrides):
    """Return the trainer, what it calculated the loss of, and the gradient of every update."""
    settings = {
        "num_segments": 2,
        "max_completion_length": LIMIT,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.0,
        "optim": "sgd",  # no division by the size of the gradient, which would blow up the rounding of small ones
        "learning_rate": 0.05,
        "max_inflight_groups": 8 * overrides.get("steps_per_generation", 4) // 4,
        "log_rollouts": False,
        **overrides,
    }
    path = str(tmp_path / "model")  # with `beta` a reference model is loaded from it
    make_model().save_pretrained(path)
    trainer = make_trainer(tmp_path, engine=LongTailedEngine(LIMIT, logp=-2.9), model=path, **settings)
    trainer.model.to(dtype)
    gradients, seen, compute_loss = Gradients(), [], trainer._compute_loss

    def recording(model, inputs):
        loss = compute_loss(model, inputs)
        seen.append({**inputs, "loss": loss.detach()})
        return loss

    trainer._compute_loss = recording
    trainer.add_callback(gradients)
    trainer.train()
    return trainer, seen, gradients.updates


def assert_same_updates(first, second, *, rtol):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        scale = max(float(value.abs().max()) for value in one.values())
        assert scale > 0
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=rtol, atol=rtol * scale, msg=name)


DEALT = {
    "dapo, POIS": {"dmmpts": None},
    "dapo, SAIS": {"dmmpts": None, "importance_mode": "sais"},
    "dapo, POIS, DMMPTs": {"dmmpts": {"tau": 0.05, "sigma": 3.05}},
    "dapo, SAIS, DMMPTs": {"dmmpts": {"tau": 0.05, "sigma": 3.05}, "importance_mode": "sais"},
    "dapo, masked": {"overlong": "mask", "max_completion_length": 24},
    "dapo, KL": {"beta": 0.1, "importance_mode": "sais"},
    "dapo, off-policy mask": {"off_policy_mask_threshold": 0.1, "importance_mode": "sais"},
    "dapo, sequence": {"importance_sampling_level": "sequence", "dmmpts": None, "importance_mode": "sais"},
    "grpo": {"loss_type": "grpo", "importance_mode": "sais"},
    "dr_grpo": {"loss_type": "dr_grpo", "importance_mode": "sais"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "importance_mode": "sais"},
    "sapo": {"loss_type": "sapo", "importance_mode": "sais"},
    "luspo": {"loss_type": "luspo", "dmmpts": None, "importance_mode": "sais"},
    "luspo, sequence": {"loss_type": "luspo", "dmmpts": None, "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "importance_mode": "sais"},
}
CUT_ONLY = {
    "bnpo": {"loss_type": "bnpo", "importance_mode": "sais"},
    "entropy bonus": {"entropy_coef": 0.05},
    "high-entropy tokens": {"top_entropy_quantile": 0.5},
}


def both(tmp_path, monkeypatch, **overrides):
    """Train without padding and with it."""
    without = train(tmp_path / "without", **overrides)
    with monkeypatch.context() as patch:
        leave_padding(patch)
        padded = train(tmp_path / "padded", **overrides)
    return without, padded


@pytest.mark.parametrize("overrides", [*DEALT.values(), *CUT_ONLY.values()], ids=[*DEALT, *CUT_ONLY])
def test_loss_and_gradient_of_an_update_stay_the_same(tmp_path, monkeypatch, overrides):
    (trainer, dealt, gradients), (_, padded, expected) = both(
        tmp_path, monkeypatch, max_steps=1, dtype=torch.float64, **overrides
    )
    assert trainer._deals_rows is (overrides not in CUT_ONLY.values())
    assert len(dealt) == len(padded) == 4
    cells = [sum(batch["completion_ids"].numel() for batch in each) for each in (dealt, padded)]
    assert cells[0] < (0.6 if trainer._deals_rows else 0.9) * cells[1]
    losses = [sum(batch["loss"] for batch in each) for each in (dealt, padded)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    assert_same_updates(gradients, expected, rtol=1e-6)


JOINED = {name: overrides for name, overrides in DEALT.items() if name.split(",")[0] in ("dapo", "cispo", "vespo")}


@pytest.mark.parametrize("overrides", JOINED.values(), ids=JOINED)
def test_joining_short_rows_changes_no_loss_and_no_gradient(tmp_path, overrides):
    """With two rows of the longest as the bound, eight micro-batches become fewer."""
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 8}
    settings |= {"max_inflight_groups": 16, "max_steps": 2, "dtype": torch.float64, **overrides}
    _, apart, expected = train(tmp_path / "apart", **settings)
    _, joined, gradients = train(tmp_path / "joined", dynamic_micro_batches=True, **settings)
    sizes = [len(batch["completion_mask"]) for batch in joined]
    with_tokens = [int(batch["completion_mask"].any(dim=1).sum()) for batch in apart]
    assert len(sizes) == len(apart) == 16
    assert [sum(sizes[:8]), sum(sizes[8:])] == [sum(with_tokens[:8]), sum(with_tokens[8:])]
    assert sizes[0] == 0 and min(sizes[7], sizes[15]) > 0, "gradients are exchanged with the last"
    assert sum(map(bool, sizes)) <= 13
    cells = [max(b["prompt_ids"].numel() + b["completion_ids"].numel() for b in each) for each in (joined, apart)]
    assert cells[0] <= cells[1], "it may take no more memory"
    losses = [sum(batch["loss"] for batch in each) for each in (joined, apart)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    assert_same_updates(gradients, expected, rtol=1e-6)


def test_loss_bnpo_would_not_stay_the_same_if_dealt(tmp_path, monkeypatch):
    """The comparison above tells them apart."""
    monkeypatch.setattr(microbatches, "is_additive", lambda *args, **kwargs: True)
    (_, _, gradients), (_, _, expected) = both(tmp_path, monkeypatch, max_steps=1, loss_type="bnpo")
    with pytest.raises(AssertionError):
        assert_same_updates(gradients, expected, rtol=1e-2)


@pytest.mark.parametrize(
    "overrides",
    [
        {"steps_per_generation": 8, "max_steps": 4},  # a batch feeds two windows
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 2, "max_steps": 3},  # a window spans two batches
        {"steps_per_generation": 3, "num_iterations": 2, "max_steps": 4},  # windows and batches don't align
        {"steps_per_generation": 3, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1},
        {"gradient_accumulation_steps": 1, "max_steps": 3},
    ],
    ids=str,
)
def test_every_window_keeps_its_rows(tmp_path, monkeypatch, overrides):
    """Several updates in a row are the same ones, so each had the same rows."""
    (trainer, dealt, gradients), (_, padded, expected) = both(
        tmp_path, monkeypatch, dtype=torch.float64, importance_mode="sais", **overrides
    )
    assert trainer.state.global_step == len(gradients)
    assert_same_updates(gradients, expected, rtol=1e-4)
    advantages = [torch.cat([batch["advantages"] for batch in each]).sort().values for each in (dealt, padded)]
    torch.testing.assert_close(*advantages, rtol=0, atol=0)
    joined = train(
        tmp_path / "joined", dtype=torch.float64, importance_mode="sais", dynamic_micro_batches=True, **overrides
    )
    assert_same_updates(joined[2], expected, rtol=1e-4)
