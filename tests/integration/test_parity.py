"""With one segment and nothing of UloRL switched on, training is stock GRPO: bit for bit where padding is left as it is."""

import pytest
import torch
from conftest import make_model
from helpers import PreparedEngine, leave_padding, make_stock_trainer, make_trainer, parameters

pytestmark = pytest.mark.slow

# Stock GRPO has no "truncated is wrong"; leaving truncated completions out of the loss is the rule that both have.
PLAIN = {"num_segments": 1, "dmmpts": None, "dynamic_sampling": False, "overlong": "mask"}


def assert_same_parameters(first, second):
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=name)


def train_both(tmp_path, **overrides):
    """Return the parameters at the start, and after training with stock GRPO and with ours."""
    overrides = {"max_steps": 3, **overrides}
    path = str(tmp_path / "model")  # with `beta` both load a reference model from it
    make_model().save_pretrained(path)
    stock = make_stock_trainer(tmp_path / "stock", model=path, mask_truncated_completions=True, **overrides)
    start = parameters(stock)
    stock.train()
    ours = make_trainer(tmp_path / "ours", engine=PreparedEngine(16), model=path, **PLAIN, **overrides)
    ours.train()
    return start, parameters(stock), parameters(ours)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"num_iterations": 2, "max_steps": 4},
        {"steps_per_generation": 2, "max_steps": 4},
        {"beta": 0.1},
        {"entropy_coef": 0.05},
        {"scale_rewards": "none", "epsilon_high": 0.28},
    ],
    ids=lambda overrides: "-".join(overrides) or "default",
)
def test_parameters_equal_stock_grpo(tmp_path, monkeypatch, overrides):
    leave_padding(monkeypatch)  # the order of summation depends on it
    start, stock, trained = train_both(tmp_path, **overrides)
    assert any(not torch.equal(value, trained[name]) for name, value in start.items()), "nothing was trained"
    assert_same_parameters(stock, trained)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1},
    ],
    ids=lambda overrides: "-".join(overrides) or "default",
)
def test_without_padding_parameters_equal_stock_grpo_to_rounding(tmp_path, overrides):
    # Adam would turn the rounding of a gradient that is next to nothing into a whole step.
    start, stock, trained = train_both(tmp_path, optim="sgd", learning_rate=0.1, **overrides)
    assert max(float((value - start[name]).abs().max()) for name, value in trained.items()) > 1e-2
    for name, value in stock.items():
        torch.testing.assert_close(value, trained[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("num_segments", [2, 4, 8])
def test_cutting_completions_into_segments_changes_nothing_under_pois(tmp_path, num_segments):
    trained = {}
    for segments in (1, num_segments):
        trainer = make_trainer(
            tmp_path / str(segments),
            engine=PreparedEngine(16),
            num_segments=segments,
            max_inflight_groups=2,  # one batch: the same groups are trained on however long they take
            max_steps=3,
            dynamic_sampling=False,
            dmmpts={"tau": 0.05, "sigma": 10.0},  # masks tokens
        )
        trainer.train()
        assert trainer.state.log_history[0]["dmmpts/masked_frac"] > 0
        trained[segments] = parameters(trainer)
    assert_same_parameters(trained[1], trained[num_segments])
