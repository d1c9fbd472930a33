"""Alarms and the sums behind an update's metrics, against figures worked out by hand."""

import logging
import math

import pytest
import torch

from trl_ulorl.config import DMMPTsConfig
from trl_ulorl.diagnostics import (
    MAX_FRESH_KL,
    MAX_STALE_KL,
    MAX_TRUNCATED,
    MAX_TRUNCATION_GROWTH,
    MIN_STALE_ESS,
    TRUNCATION_WINDOW,
    Alarms,
    UpdateSums,
    masked_advantages,
)

# --------------------------------------------------------------------------------------------------------------- alarms


@pytest.fixture
def alarms():
    return Alarms(watch_importance=True, max_group_age=16)


HEALTHY = {
    "importance/stale_kl": 0.01,
    "importance/stale_ess": 0.98,
    "rollout/truncated_frac": 0.1,
    "rollout/completed_length_mean": 500.0,
    "rollout/oldest_group_age": 4.0,
}


def test_healthy_step_raises_nothing(alarms, caplog):
    for _ in range(2 * TRUNCATION_WINDOW):
        assert alarms.check(HEALTHY) == []
    assert caplog.records == []


def test_step_without_these_metrics_raises_nothing(alarms):
    assert alarms.check({}) == []


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        (
            {"importance/stale_kl": 0.25},
            ["KL 0.250 nats per token (alarm at 0.03)", "effective sample size 0.98", "Lower the learning rate"],
        ),
        (
            {"importance/stale_ess": 0.3},
            ["effective sample size 0.30 (alarm at 0.8)", "`off_policy_mask_threshold`", "`importance_mode='sais'`"],
        ),
        (
            {"rollout/oldest_group_age": 17.0},
            ["held for 17 optimizer steps (alarm above 16)", "Lower `max_inflight_groups`, or set `max_staleness`"],
        ),
    ],
    ids=["kl", "ess", "starvation"],
)
def test_alarm_speaks_once_and_again_after_its_condition_has_passed(alarms, caplog, changed, texts):
    bad = {**HEALTHY, **changed}
    with caplog.at_level(logging.WARNING):
        assert alarms.check(HEALTHY) == []
        (text,) = alarms.check(bad)
        assert alarms.check(bad) == []
        assert alarms.check(bad) == []
        assert alarms.check(HEALTHY) == []
        assert alarms.check(bad) == [text]
    for part in texts:
        assert part in text
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", text)] * 2


@pytest.mark.parametrize(
    "at_limit",
    [
        {"importance/stale_kl": MAX_STALE_KL},
        {"importance/stale_ess": MIN_STALE_ESS},
        {"rollout/oldest_group_age": 16.0},
    ],
)
def test_limits_themselves_are_allowed(alarms, at_limit):
    assert alarms.check({**HEALTHY, **at_limit}) == []


def test_an_engine_that_does_not_fit_the_policy_is_named():
    alarms = Alarms(watch_importance=False, max_group_age=16)
    assert alarms.check({**HEALTHY, "importance/kl_age_0": MAX_FRESH_KL}) == []
    (text,) = alarms.check({**HEALTHY, "importance/kl_age_0": 0.25})
    assert "KL 0.250 nats per token (alarm at 0.1)" in text and "trl-ulorl doctor" in text


def test_drift_needs_one_of_the_two_only(alarms):
    assert len(alarms.check({"importance/stale_kl": math.nextafter(MAX_STALE_KL, 1)})) == 1
    assert len(Alarms(watch_importance=True, max_group_age=1).check({"importance/stale_ess": 0.79})) == 1


def test_switch_silences_drift_only():
    alarms = Alarms(watch_importance=False, max_group_age=16)
    texts = alarms.check({"importance/stale_kl": 9.0, "importance/stale_ess": 0.01, "rollout/oldest_group_age": 99.0})
    assert len(texts) == 1
    assert "held for 99 optimizer steps" in texts[0]


def test_two_alarms_in_one_step_are_told_apart(alarms):
    drift = {**HEALTHY, "importance/stale_kl": 1.0}
    assert len(alarms.check(drift)) == 1
    (text,) = alarms.check({**drift, "rollout/oldest_group_age": 99.0})
    assert "held for 99" in text


def truncated(share):
    return {"rollout/truncated_frac": share, "rollout/completed_length_mean": 480.0}


HALF = TRUNCATION_WINDOW // 2


def test_a_step_that_tells_nothing_ends_no_alarm(alarms):
    """A step that finds its batch in the pool completes no group; an update may have no token of an age."""
    bad = {
        **HEALTHY,
        "importance/stale_kl": 1.0,
        "importance/kl_age_0": 1.0,
        "rollout/truncated_frac": 1.0,
        "rollout/oldest_group_age": 99.0,
    }
    assert sum(len(alarms.check(bad)) for _ in range(3)) == 4
    assert alarms.check({"rollout/oldest_group_age": 99.0}) == []
    assert alarms.check(bad) == []
    assert alarms.check({**HEALTHY, "importance/kl_age_0": 0.0}) == []
    assert len(alarms.check(bad)) == 3, "all but truncation, which takes three steps"


def test_growth_of_truncation(alarms):
    for share in [0.10] * HALF + [0.40] * (HALF - 1):
        assert alarms.check(truncated(share)) == []  # half a window tells nothing yet
    (text,) = alarms.check(truncated(0.40))
    assert f"grew from 10% to 40% within {TRUNCATION_WINDOW} steps" in text
    assert "lower the learning rate or the staleness, or raise `max_completion_length`" in text
    assert alarms.check(truncated(0.60)) == []  # from 16% to 44%: still so, but it has been said
    for _ in range(TRUNCATION_WINDOW):
        assert alarms.check(truncated(0.10)) == []
    later = [alarms.check(truncated(0.40)) for _ in range(HALF)]
    assert [len(texts) for texts in later] == [0, 0, 0, 1, 0]  # 0.06 a step: above 0.2 with the fourth


def test_growth_at_its_limit_is_allowed(alarms):
    for share in [0.25] * HALF + [0.25 + MAX_TRUNCATION_GROWTH] * HALF:
        assert alarms.check(truncated(share)) == []


def test_one_odd_step_is_no_growth(alarms):
    for share in [0.1] * (TRUNCATION_WINDOW - 1) + [1.0] + [0.1] * TRUNCATION_WINDOW:
        assert alarms.check(truncated(share)) == []


def test_slow_growth_passes(alarms):
    step = MAX_TRUNCATION_GROWTH / TRUNCATION_WINDOW  # the later half lies half of it above the earlier one
    for index in range(3 * TRUNCATION_WINDOW):
        assert alarms.check(truncated(index * step)) == []


def test_growth_is_measured_within_the_window(alarms):
    for share in [0.0] * HALF + [0.15] * TRUNCATION_WINDOW + [0.30] * TRUNCATION_WINDOW:
        assert alarms.check(truncated(share)) == []


def test_truncation_that_stays_near_one(alarms):
    assert alarms.check(truncated(0.95)) == []
    assert alarms.check(truncated(0.92)) == []
    (text,) = alarms.check(truncated(MAX_TRUNCATED))
    assert "90% of the rollouts reach the length limit" in text
    assert "Raise `max_completion_length` well above 480 tokens" in text
    assert alarms.check(truncated(1.0)) == []
    assert alarms.check(truncated(0.89)) == []
    assert alarms.check(truncated(0.95)) == []
    assert alarms.check(truncated(0.95)) == []
    assert len(alarms.check(truncated(0.95))) == 1


def test_steps_that_completed_no_group_do_not_count_for_truncation(alarms):
    assert alarms.check(truncated(0.95)) == []
    assert alarms.check({}) == []
    assert alarms.check(truncated(0.95)) == []
    assert len(alarms.check(truncated(0.95))) == 1


# ----------------------------------------------------------------------------------------------------------------- sums

NUM_AGES = 3
DMMPTS = DMMPTsConfig(tau=0.9, sigma=0.2)


def update_sums(dmmpts=DMMPTS):
    return UpdateSums(dmmpts, num_ages=NUM_AGES, epsilon_low=0.2, epsilon_high=0.2)


# Two responses of three and two real tokens. The first is positive, the second negative.
#   current probability     0.95 0.95 0.50     0.95 0.20 (pad)
#   sampling probability    0.95 0.50 0.40     0.95 0.40 (pad)
#   ratio                   1    1.9  1.25     1    0.5
#   age                     0    1    5        0    2
#   entropy                 0.1  0.1  0.1      0.5  0.5          means 0.1 and 0.5
CURRENT = torch.tensor([[0.95, 0.95, 0.50], [0.95, 0.20, 0.99]]).log()
INPUTS = {
    "advantages": torch.tensor([1.0, -1.0]),
    "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    "sampling_per_token_logps": torch.tensor([[0.95, 0.50, 0.40], [0.95, 0.40, 0.01]]).log(),
    "token_ages": torch.tensor([[0, 1, 5], [0, 2, 9]]),
}
ENTROPIES = torch.tensor([[0.1, 0.1, 0.1], [0.5, 0.5, 99.0]])
TOKEN_MASK = torch.tensor([[True, True, False], [False, False, False]])
PADDING = torch.tensor([10.0, 24.0, 8.0])  # cells, cells before the cut, tokens: five of completions, three of prompts

BY_HAND = {
    "importance/ratio": (1 + 1.9 + 1.25 + 1 + 0.5) / 5,
    "importance/stale_ratio": (1.9 + 1.25 + 0.5) / 3,
    "importance/ratio_age_0": 1.0,
    "importance/ratio_age_1": 1.9,
    "importance/ratio_age_2+": (1.25 + 0.5) / 2,  # ages 5 and 2
    "importance/clip_frac": 3 / 5,
    "importance/stale_clip_frac": 3 / 3,
    "importance/clip_frac_age_0": 0.0,
    "importance/stale_kl": (
        (0.9 - math.log(1.9)) + (0.25 - math.log(1.25)) + (-0.5 - math.log(0.5))  # r - 1 - log r
    )
    / 3,
    "importance/stale_ess": (1.9 + 1.25 + 0.5) ** 2 / (3 * (1.9**2 + 1.25**2 + 0.5**2)),
    "importance/on_policy_frac": 2 / 5,
    "importance/age_mean": (0 + 1 + 5 + 0 + 2) / 5,
    "rollout/padding_ratio": 10 / 8,
    "rollout/padding_ratio_uncut": 24 / 8,
    "dmmpts/masked_frac": 2 / 5,
    "dmmpts/low_entropy_frac": 1 / 2,
    "dmmpts/mastered_negative_frac": 1 / 2,  # the 0.95 of the negative response's two tokens; padding does not count
    "dmmpts/sigma": 0.2,
}


def test_metrics_by_hand():
    sums = update_sums()
    sums.add(INPUTS, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    metrics = sums.metrics(sums.take())
    assert {name: metrics[name] for name in BY_HAND} == pytest.approx(BY_HAND, rel=1e-5)


def test_adding_up_over_micro_batches_changes_nothing():
    together, apart = update_sums(), update_sums()
    together.add(INPUTS, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    for row in (slice(0, 1), slice(1, 2)):
        apart.add({k: v[row] for k, v in INPUTS.items()}, CURRENT[row], ENTROPIES[row], TOKEN_MASK[row], PADDING / 2)
    torch.testing.assert_close(apart.take(), together.take())


def test_two_ranks_with_the_same_data_give_the_metrics_of_one():
    """Every metric is a mean or a share, so that doubled sums change none."""
    sums = update_sums()
    sums.add(INPUTS, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    of_one_rank = sums.take()
    assert sums.metrics(of_one_rank + of_one_rank) == pytest.approx(sums.metrics(of_one_rank))


def test_shares_weigh_tokens_and_not_micro_batches():
    """One response with both of its tokens masked and one with none of eight: 2 of 10, not (1 + 0) / 2."""
    sums = update_sums()
    for width, masked in ((2, True), (8, False)):
        inputs = {
            "advantages": torch.tensor([1.0]),
            "completion_mask": torch.ones(1, width),
            "sampling_per_token_logps": torch.zeros(1, width),
            "token_ages": torch.zeros(1, width, dtype=torch.long),
        }
        sums.add(inputs, torch.zeros(1, width), torch.zeros(1, width), torch.full((1, width), masked), PADDING)
    assert sums.metrics(sums.take())["dmmpts/masked_frac"] == pytest.approx(0.2)


def test_take_starts_the_next_update():
    sums = update_sums()
    sums.add(INPUTS, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    first = sums.take()
    with pytest.raises(RuntimeError, match="the forward pass was not observed"):
        sums.take()
    sums.add(INPUTS, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    torch.testing.assert_close(sums.take(), first)


def test_without_dmmpts_its_metrics_are_left_out():
    sums = update_sums(dmmpts=None)
    sums.add(INPUTS, CURRENT, ENTROPIES, None, PADDING)
    metrics = sums.metrics(sums.take())
    assert {name.split("/")[0] for name in metrics} == {"importance", "rollout"}
    assert metrics["importance/stale_ratio"] == pytest.approx(BY_HAND["importance/stale_ratio"])


def test_on_policy_data_have_no_stale_metrics():
    sums = update_sums()
    inputs = {**INPUTS, "token_ages": torch.zeros(2, 3, dtype=torch.long)}
    sums.add(inputs, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    metrics = sums.metrics(sums.take())
    assert not [name for name in metrics if "stale" in name]
    assert metrics["importance/on_policy_frac"] == 1.0


def test_responses_without_tokens_count_nowhere():
    """`overlong="mask"` leaves truncated responses without a single token."""
    sums = update_sums()
    inputs = {**INPUTS, "completion_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}
    sums.add(inputs, CURRENT, ENTROPIES, TOKEN_MASK, PADDING)
    metrics = sums.metrics(sums.take())
    assert metrics["dmmpts/masked_frac"] == pytest.approx(2 / 3)
    assert metrics["dmmpts/low_entropy_frac"] == 1.0
    assert metrics["dmmpts/mastered_negative_frac"] == 0.0
    assert metrics["importance/ratio"] == pytest.approx((1 + 1.9 + 1.25) / 3)


# --------------------------------------------------------------------------------------------------- masked advantages


def test_masked_advantages_by_hand():
    advantages, token_mask = masked_advantages(
        torch.tensor([0.5, -0.5]), CURRENT, ENTROPIES, INPUTS["completion_mask"], DMMPTS
    )
    # The first response is positive and its entropy, 0.1, is under 0.2: both tokens at 0.95 are masked.
    assert advantages.tolist() == [[0.0, 0.0, 0.5], [-0.5, -0.5, -0.5]]
    assert token_mask.tolist() == TOKEN_MASK.tolist()


def test_masked_advantages_keep_the_original():
    original = torch.tensor([0.5, -0.5])
    masked_advantages(original, CURRENT, ENTROPIES, INPUTS["completion_mask"], DMMPTS)
    assert original.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(("dynamic", "expected"), [(True, 0), (False, 2)])
def test_entropy_gates_only_dynamic_masking(dynamic, expected):
    dmmpts = DMMPTsConfig(tau=0.9, sigma=0.05, dynamic=dynamic)
    _, token_mask = masked_advantages(torch.tensor([0.5, -0.5]), CURRENT, ENTROPIES, INPUTS["completion_mask"], dmmpts)
    assert int(token_mask.sum()) == expected
