"""Hand-worked numbers and properties of the objective.

Loss tests run twice: with the reference written from Eq. 10, and with TRL's "dapo" form fed with advantages that are
zero at masked tokens, which is how a mask enters the trainer. That the trainer itself gives this loss is not covered
here; it takes a real trainer.
"""

import math

import pytest
import torch
from reference import ulorl_loss

from trl_ulorl.objective import (
    NUM_STATS,
    ImportanceStat,
    dmmpts_mask,
    importance_metrics,
    importance_sums_by_age,
    mastered_positive_mask,
    response_entropies,
)


def zeroed_advantages_loss(logps, old_logps, advantages, completion_mask, token_mask, *, epsilon):
    """TRL's loss "dapo" on (B, T) advantages, zero where a token is masked."""
    advantages = advantages.unsqueeze(1).masked_fill(token_mask, 0.0)
    ratio = torch.exp(logps - old_logps)
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    return -(surrogate * completion_mask).sum() / completion_mask.sum()


both_losses = pytest.mark.parametrize("loss_fn", [ulorl_loss, zeroed_advantages_loss])


def loss_and_grad(loss_fn, logps, old_logps, advantages, completion_mask, token_mask=None, *, epsilon=0.2):
    """Loss and its gradient in the log-probs; `old_logps=None` is POIS."""
    logps = logps.clone().requires_grad_()
    old_logps = logps.detach() if old_logps is None else old_logps
    token_mask = torch.zeros_like(completion_mask, dtype=torch.bool) if token_mask is None else token_mask
    loss = loss_fn(logps, old_logps, advantages, completion_mask, token_mask, epsilon=epsilon)
    loss.backward()
    return loss.detach(), logps.grad


# --- Eq. 9 ------------------------------------------------------------------------------------------------------


def test_mastered_positive_mask_by_hand():
    # tau = 0.99. Row 0: exactly at tau (counts), just under it, over it.
    # Row 1: under it, over it, over it but padding.
    logps = torch.tensor([[0.99, 0.9899, 0.999], [0.5, 0.995, 0.999]]).log()
    completion_mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    mask = mastered_positive_mask(logps, torch.tensor([1.0, 0.5]), completion_mask, tau=0.99)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, False, True], [False, True, False]]


def test_mastered_tokens_of_zero_and_negative_advantage_do_not_count():
    logps = torch.tensor([[0.999, 0.999], [0.999, 0.999], [0.999, 0.999]]).log()
    mask = mastered_positive_mask(logps, torch.tensor([0.0, -1.0, 1e-4]), torch.ones(3, 2), tau=0.99)
    assert mask.tolist() == [[False, False], [False, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tau", [0.9, 0.99, 0.999, 1.0])
def test_log_prob_of_log_tau_counts_in_every_precision(dtype, tau):
    logps = torch.tensor([[math.log(tau), math.log(tau * 0.95)]], dtype=dtype)
    mask = mastered_positive_mask(logps, torch.ones(1), torch.ones(1, 2), tau=tau)
    assert mask.tolist() == [[True, False]]


@pytest.mark.parametrize("tau", [0.0, 1.01, -0.5, math.nan])
def test_tau_out_of_range_is_refused(tau):
    with pytest.raises(ValueError, match=r"Set `tau` to 0\.99"):
        mastered_positive_mask(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), tau=tau)


# --- the entropy of Eq. 10 --------------------------------------------------------------------------------------


def test_response_entropies_leave_padding_out():
    # (0.1 + 0.3) / 2 = 0.2; (0.5 + 0.6 + 1.0) / 3 = 0.7; nothing real: never under a target.
    entropies = torch.tensor([[0.1, 0.3, math.nan], [0.5, 0.6, 1.0], [0.0, 0.0, 0.0]], requires_grad=True)
    completion_mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    result = response_entropies(entropies, completion_mask)
    torch.testing.assert_close(result, torch.tensor([0.2, 0.7, math.inf]))
    assert not result.requires_grad


def test_response_entropies_do_not_round_to_the_inputs_precision():
    # 3 * 0.25 + 0.251953125 = 1.001953125, which bfloat16 would round to 1: a mean of 0.25.
    entropies = torch.tensor([[0.25, 0.25, 0.25, 0.251953125]], dtype=torch.bfloat16)
    result = response_entropies(entropies, torch.ones(1, 4))
    assert result.dtype == torch.float32
    assert result.item() == 0.25048828125


# --- the mask of Eq. 10 -----------------------------------------------------------------------------------------

MASTERED_LOGPS = torch.tensor([[0.995, 0.5, 0.995]] * 4).log()
MASK_ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0])
MASK_COMPLETIONS = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]])
# Means over real tokens: 0.1, exactly 0.25, 0.125 (with the padding it would be 3.0), 0.1.
MASK_ENTROPIES = torch.tensor([[0.0, 0.2, 0.1], [0.25, 0.25, 0.25], [0.0, 0.25, 8.75], [0.0, 0.2, 0.1]])


def test_dmmpts_mask_is_gated_per_response():
    mask = dmmpts_mask(MASTERED_LOGPS, MASK_ENTROPIES, MASK_ADVANTAGES, MASK_COMPLETIONS, tau=0.99, sigma=0.25)
    # Row 0 is sharp: masked. Row 1 is exactly at sigma: not under it. Row 2 is sharp. Row 3 is sharp but negative.
    assert mask.tolist() == [[True, False, True], [False] * 3, [True, False, False], [False] * 3]


def test_static_masking_ignores_the_entropy():
    mask = dmmpts_mask(
        MASTERED_LOGPS, MASK_ENTROPIES, MASK_ADVANTAGES, MASK_COMPLETIONS, tau=0.99, sigma=0.25, dynamic=False
    )
    assert mask.tolist() == [[True, False, True], [True, False, True], [True, False, False], [False] * 3]


def test_response_without_tokens_is_not_masked():
    mask = dmmpts_mask(
        torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.zeros(1, 2), tau=0.99, sigma=1e9, dynamic=True
    )
    assert mask.tolist() == [[False, False]]


@pytest.mark.parametrize("sigma", [-0.1, math.nan])
def test_sigma_out_of_range_is_refused(sigma):
    with pytest.raises(ValueError, match=r"Set `sigma` to 0\.2"):
        dmmpts_mask(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), tau=0.99, sigma=sigma)


# --- the loss of Eq. 10 -----------------------------------------------------------------------------------------
# Two groups of two responses; lengths 1, 3 and 2, 1, so sum |o_i| = 7. epsilon = 0.2.
#   row  A     r              min(r A, clip(r) A)
#   0    1     1              1
#   1    -1    0.5, 1, 1.25   -0.8 (clipped), -1, -1.25 (the smaller one: not clipped)
#   2    0.5   1, 1.5         0.5, 0.6 (clipped)
#   3    -0.5  1              -0.5
# Sum -1.45. Normalised per group and then averaged, as Eq. 10 prints it, J would be (-2.05 / 4 + 0.6 / 3) / 2.
PROBS = torch.tensor([[0.995, 1.0, 1.0], [0.5, 0.995, 0.25], [0.995, 0.6, 1.0], [0.999, 1.0, 1.0]])
OLD_PROBS = torch.tensor([[0.995, 1.0, 1.0], [1.0, 0.995, 0.2], [0.995, 0.4, 1.0], [0.999, 1.0, 1.0]])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])
COMPLETION_MASK = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]])
# Means 0.1, 0.1, 0.15, 0.1: all under sigma = 0.2.
ENTROPIES = torch.tensor([[0.1, 9.0, 9.0], [0.1, 0.1, 0.1], [0.1, 0.2, 9.0], [0.1, 9.0, 9.0]])


@both_losses
def test_loss_without_masked_tokens_by_hand(loss_fn):
    loss, grad = loss_and_grad(loss_fn, PROBS.log(), OLD_PROBS.log(), ADVANTAGES, COMPLETION_MASK)
    assert loss.item() == pytest.approx(0.20714285714)  # 1.45 / 7
    # -A r / 7 where not clipped, 0 where clipped and on padding.
    expected = torch.tensor(
        [
            [-0.14285714, 0.0, 0.0],
            [0.0, 0.14285714, 0.17857143],
            [-0.07142857, 0.0, 0.0],
            [0.07142857, 0.0, 0.0],
        ]
    )
    torch.testing.assert_close(grad, expected)


@both_losses
def test_loss_with_masked_tokens_by_hand(loss_fn):
    token_mask = dmmpts_mask(PROBS.log(), ENTROPIES, ADVANTAGES, COMPLETION_MASK, tau=0.99, sigma=0.2)
    assert token_mask.nonzero().tolist() == [[0, 0], [2, 0]]
    loss, grad = loss_and_grad(loss_fn, PROBS.log(), OLD_PROBS.log(), ADVANTAGES, COMPLETION_MASK, token_mask)
    # The sum loses 1 and 0.5: -2.95. The denominator stays 7 (over the 5 tokens left the loss would be 0.59).
    assert loss.item() == pytest.approx(0.42142857143)
    # The masked tokens' gradient is exactly zero, the others' is what it was.
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.14285714, 0.17857143], [0.0, 0.0, 0.0], [0.07142857, 0.0, 0.0]])
    torch.testing.assert_close(grad, expected)
    assert torch.equal(grad[token_mask], torch.zeros(2))


@both_losses
def test_batch_with_all_tokens_masked_runs_backward(loss_fn):
    everything = COMPLETION_MASK.bool()
    loss, grad = loss_and_grad(loss_fn, PROBS.log(), OLD_PROBS.log(), ADVANTAGES, COMPLETION_MASK, everything)
    assert loss.item() == 0.0
    assert torch.equal(grad, torch.zeros(4, 3))


@both_losses
def test_entropy_over_the_target_leaves_training_bit_identical(loss_fn):
    # The smallest H_i is exactly sigma.
    entropies = torch.full((4, 3), 0.25)
    token_mask = dmmpts_mask(PROBS.log(), entropies, ADVANTAGES, COMPLETION_MASK, tau=0.99, sigma=0.25)
    assert not token_mask.any()
    plain = loss_and_grad(loss_fn, PROBS.log(), OLD_PROBS.log(), ADVANTAGES, COMPLETION_MASK)
    gated = loss_and_grad(loss_fn, PROBS.log(), OLD_PROBS.log(), ADVANTAGES, COMPLETION_MASK, token_mask)
    assert torch.equal(gated[0], plain[0])
    assert torch.equal(gated[1], plain[1])


# --- POIS and SAIS ----------------------------------------------------------------------------------------------
# One response of two segments of two tokens. The first was sampled one version ago, with ratios 0.6 / 0.4 = 1.5 and
# 0.45 / 0.5 = 0.9; the second by the current policy.
SEGMENT_LOGPS = torch.tensor([[0.6, 0.45, 0.4, 0.8]]).log()
SEGMENT_SAMPLING_LOGPS = torch.tensor([[0.4, 0.5, 0.4, 0.8]]).log()
SEGMENT_AGES = torch.tensor([[1, 1, 0, 0]])
SEGMENT_MASK = torch.ones(1, 4, dtype=torch.long)


@both_losses
@pytest.mark.parametrize(
    ("advantage", "expected_loss", "expected_grad"),
    [
        # -(1.2 + 0.9 + 1 + 1) / 4: the first ratio is clipped and carries no gradient.
        (1.0, -1.025, [0.0, -0.225, -0.25, -0.25]),
        # (1.5 + 0.9 + 1 + 1) / 4: a negative advantage takes the larger ratio, unclipped.
        (-1.0, 1.1, [0.375, 0.225, 0.25, 0.25]),
    ],
)
def test_sais_ratios_of_two_segments_by_hand(loss_fn, advantage, expected_loss, expected_grad):
    loss, grad = loss_and_grad(loss_fn, SEGMENT_LOGPS, SEGMENT_SAMPLING_LOGPS, torch.tensor([advantage]), SEGMENT_MASK)
    assert loss.item() == pytest.approx(expected_loss)
    torch.testing.assert_close(grad, torch.tensor([expected_grad]))


def test_ratio_sums_of_two_segments_by_hand():
    sums = importance_sums_by_age(
        SEGMENT_LOGPS,
        SEGMENT_SAMPLING_LOGPS,
        SEGMENT_MASK,
        SEGMENT_AGES,
        num_ages=2,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    # count, r, r^2, r - 1 - log r, log r, clipped, age, on-policy
    # Age 1: 1.5 + 0.9; 2.25 + 0.81; log r 0.405465 - 0.105361 = 0.300105; 0.4 - 0.300105; 1.5 is clipped.
    expected = torch.tensor([[2, 2, 2, 0, 0, 0, 0, 2], [2, 2.4, 3.06, 0.0998954, 0.3001046, 1, 2, 0]])
    torch.testing.assert_close(sums.float(), expected)
    assert sums.dtype == torch.float64
    # The current segment's ratio is 1 without any rounding.
    assert sums[0].tolist() == [2, 2, 2, 0, 0, 0, 0, 2]


@both_losses
def test_pois_is_reinforce(loss_fn):
    # Two tokens over two words with p = (0.25, 0.75); word 1 and then word 0 were sampled. A / N = 2 / 2 = 1.
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, math.log(3.0)]]], requires_grad=True)
    sampled = torch.tensor([[[1], [0]]])
    logps = logits.log_softmax(-1).gather(-1, sampled).squeeze(-1)
    no_mask = torch.zeros(1, 2, dtype=torch.bool)
    loss = loss_fn(logps, logps.detach(), torch.tensor([2.0]), torch.ones(1, 2), no_mask, epsilon=0.2)
    # Every ratio is exactly 1, so the loss is -A without rounding.
    assert loss.item() == -2.0
    loss.backward()
    # REINFORCE: -A / N * grad log p = -(one-hot - p).
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.25, -0.25], [-0.75, 0.75]]]))


@both_losses
def test_sais_equals_pois_when_log_probs_agree(loss_fn):
    advantages = torch.tensor([1.0])
    pois = loss_and_grad(loss_fn, SEGMENT_LOGPS, None, advantages, SEGMENT_MASK)
    # The recorded segments, put together again.
    recorded = torch.cat([SEGMENT_LOGPS[:, :2].clone(), SEGMENT_LOGPS[:, 2:].clone()], dim=1)
    sais = loss_and_grad(loss_fn, SEGMENT_LOGPS, recorded, advantages, SEGMENT_MASK)
    assert torch.equal(sais[0], pois[0])
    assert torch.equal(sais[1], pois[1])
    # With the log-probs of another policy they differ.
    drifted = loss_and_grad(loss_fn, SEGMENT_LOGPS, SEGMENT_SAMPLING_LOGPS, advantages, SEGMENT_MASK)
    assert drifted[0].item() != pytest.approx(pois[0].item())


def cut_into_segments(logps, num_segments):
    """Sampling log-probs and ages of a completion whose k-th last segment is k versions old, 0.1 nats per version."""
    num_tokens = logps.size(1)
    segment = torch.arange(num_tokens) // (num_tokens // num_segments)
    ages = (num_segments - 1 - segment).expand_as(logps)
    return logps - 0.1 * ages, ages


@both_losses
@pytest.mark.parametrize("num_segments", [1, 2, 4, 8])
def test_cutting_a_completion_leaves_pois_unchanged(loss_fn, num_segments):
    # POIS: -(8 * 1) / 8 and -1/8 for each token, however the completion was sampled.
    logps = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]]).log()
    mask, advantages = torch.ones(1, 8, dtype=torch.long), torch.tensor([1.0])
    sampling_logps, ages = cut_into_segments(logps, num_segments)
    loss, grad = loss_and_grad(loss_fn, logps, None, advantages, mask)
    assert loss.item() == -1.0
    assert torch.equal(grad, torch.full((1, 8), -0.125))
    # SAIS does see the cut: r = exp(0.1 age), clipped at 1.2 from an age of 2 on.
    # 2 segments: (4 * 1.105171 + 4) / 8; 4: (2 + 2 * 1.105171 + 4 * 1.2) / 8; 8: (1 + 1.105171 + 6 * 1.2) / 8.
    sais_loss, _ = loss_and_grad(loss_fn, logps, sampling_logps, advantages, mask)
    expected = {1: -1.0, 2: -1.0525855, 4: -1.1262927, 8: -1.1631464}
    assert sais_loss.item() == pytest.approx(expected[num_segments])
    # And so do the statistics: one class for each segment, of equally many tokens.
    sums = importance_sums_by_age(logps, sampling_logps, mask, ages, num_ages=8, epsilon_low=0.2, epsilon_high=0.2)
    counts = [8 / num_segments] * num_segments + [0] * (8 - num_segments)
    assert sums[:, ImportanceStat.COUNT].tolist() == counts


# --- importance statistics --------------------------------------------------------------------------------------


def test_importance_metrics_by_hand():
    # Ratios 1, 2, 0.5 at ages 0, 2, 5; one token without a recorded log-prob; padding that holds nonsense.
    sampling_probs = torch.tensor([[0.5, 0.25, 0.8, math.nan, 0.3]])
    logps = torch.tensor([[0.5, 0.5, 0.4, 0.7, math.nan]]).log()
    ages = torch.tensor([[0, 2, 5, 0, -7]])
    completion_mask = torch.tensor([[1, 1, 1, 1, 0]])
    sums = importance_sums_by_age(
        logps, sampling_probs.log(), completion_mask, ages, num_ages=3, epsilon_low=0.2, epsilon_high=0.2
    )
    # k3: r = 2 gives 1 - log 2, r = 0.5 gives log 2 - 0.5; together 0.5.
    # Class 2+ (ages 2 and 5): mean r 2.5 / 2, ESS 2.5^2 / (2 * 4.25); both are clipped. Class 1 is empty.
    # Overall: mean r 3.5 / 3, KL 0.5 / 3, ESS 3.5^2 / (3 * 5.25), mean age 7 / 3 although 5 is folded into class 2.
    assert importance_metrics(sums) == pytest.approx(
        {
            "importance/ratio_age_0": 1.0,
            "importance/kl_age_0": 0.0,
            "importance/clip_frac_age_0": 0.0,
            "importance/ess_age_0": 1.0,
            "importance/ratio_age_2+": 1.25,
            "importance/kl_age_2+": 0.25,
            "importance/clip_frac_age_2+": 1.0,
            "importance/ess_age_2+": 0.73529411765,
            "importance/ratio": 1.16666666667,
            "importance/kl": 0.16666666667,
            "importance/clip_frac": 0.66666666667,
            "importance/ess": 0.77777777778,
            "importance/on_policy_frac": 0.33333333333,
            "importance/age_mean": 2.33333333333,
        }
    )


@pytest.mark.parametrize(("epsilon_low", "epsilon_high", "expected"), [(0.2, 0.5, 2), (0.5, 0.2, 1), (0.5, 0.5, 0)])
def test_each_side_of_the_clip_range_has_its_own_width(epsilon_low, epsilon_high, expected):
    logps = torch.tensor([[0.6, 0.7, 1.4, 1.0]]).log()  # log ratios, since the sampling log-probs are 0
    sums = importance_sums_by_age(
        logps,
        torch.zeros(1, 4),
        torch.ones(1, 4),
        torch.zeros(1, 4),
        num_ages=1,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
    )
    assert sums[0, ImportanceStat.CLIPPED].item() == expected


def test_one_class_still_knows_age_and_on_policy_share():
    logps, ages = torch.zeros(1, 4), torch.tensor([[0, 0, 0, 6]])
    sums = importance_sums_by_age(logps, logps, torch.ones(1, 4), ages, num_ages=1, epsilon_low=0.2, epsilon_high=0.2)
    metrics = importance_metrics(sums)
    assert metrics["importance/on_policy_frac"] == 0.75
    assert metrics["importance/age_mean"] == 1.5
    assert metrics["importance/ess_age_0+"] == 1.0


def test_huge_log_ratios_are_clamped():
    # exp(1000) overflows; at 20 nats r = 4.8516520e8, k3 = r - 21. At -20 nats r = 2.0611536e-9, k3 = r + 19.
    logps, sampling_logps = torch.tensor([[0.0, -1000.0]]), torch.tensor([[-1000.0, 0.0]])
    sums = importance_sums_by_age(
        logps,
        sampling_logps,
        torch.ones(1, 2),
        torch.tensor([[0, 1]]),
        num_ages=2,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    assert sums[:, ImportanceStat.RATIO].tolist() == pytest.approx([485165195.40979, 2.0611536224e-9])
    assert sums[:, ImportanceStat.KL].tolist() == pytest.approx([485165174.40979, 19.000000002])
    assert sums[:, ImportanceStat.LOG_RATIO].tolist() == [20.0, -20.0]


def test_sums_add_over_micro_batches():
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(6, 5, generator=generator)
    sampling_logps = -torch.rand(6, 5, generator=generator)
    completion_mask = torch.rand(6, 5, generator=generator) < 0.8
    ages = torch.randint(0, 6, (6, 5), generator=generator)
    settings = {"num_ages": 4, "epsilon_low": 0.2, "epsilon_high": 0.2}
    whole = importance_sums_by_age(logps, sampling_logps, completion_mask, ages, **settings)
    parts = [
        importance_sums_by_age(logps[rows], sampling_logps[rows], completion_mask[rows], ages[rows], **settings)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)
    assert whole[:, ImportanceStat.COUNT].sum().item() == completion_mask.sum().item()
    assert (whole[:, ImportanceStat.COUNT] > 0).all()  # every class takes part


def test_sums_carry_no_gradient():
    logps = torch.zeros(1, 2, requires_grad=True)
    sums = importance_sums_by_age(
        logps, torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), num_ages=1, epsilon_low=0.2, epsilon_high=0.2
    )
    assert not sums.requires_grad


def test_metrics_of_no_token_are_empty():
    assert importance_metrics(torch.zeros(3, NUM_STATS)) == {}


# --- wrong shapes -----------------------------------------------------------------------------------------------


def test_mastered_positive_mask_refuses_wrong_shapes():
    with pytest.raises(ValueError, match="Cut or pad `completion_mask` to the same completion tokens"):
        mastered_positive_mask(torch.zeros(2, 3), torch.ones(2), torch.ones(2, 1), tau=0.99)
    with pytest.raises(ValueError, match="Pass the advantages from before they are spread over tokens"):
        mastered_positive_mask(torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3), tau=0.99)
    with pytest.raises(ValueError, match=r"Add the batch dimension with `unsqueeze\(0\)`"):
        mastered_positive_mask(torch.zeros(3), torch.ones(3), torch.ones(3), tau=0.99)


def test_response_entropies_refuse_wrong_shapes():
    with pytest.raises(ValueError, match="Cut or pad `completion_mask` to the same completion tokens"):
        response_entropies(torch.zeros(2, 3), torch.ones(1, 3))


def test_dmmpts_mask_refuses_wrong_shapes():
    with pytest.raises(ValueError, match="Cut or pad `entropies` to the same completion tokens"):
        dmmpts_mask(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2), torch.ones(2, 3), tau=0.99, sigma=0.2)
    with pytest.raises(ValueError, match="Pass the advantages from before they are spread over tokens"):
        dmmpts_mask(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(1), torch.ones(2, 3), tau=0.99, sigma=0.2)


@pytest.mark.parametrize("wrong", ["sampling_per_token_logps", "completion_mask", "token_ages"])
def test_importance_sums_refuse_wrong_shapes(wrong):
    tensors = dict.fromkeys(["sampling_per_token_logps", "completion_mask", "token_ages"], torch.zeros(2, 3))
    tensors[wrong] = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=f"Cut or pad `{wrong}` to the same completion tokens"):
        importance_sums_by_age(torch.zeros(2, 3), **tensors, num_ages=2, epsilon_low=0.2, epsilon_high=0.2)


def test_importance_sums_refuse_ages_that_cannot_be():
    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ValueError, match="Set `num_ages` to the number of segments"):
        importance_sums_by_age(zeros, zeros, ones, zeros, num_ages=0, epsilon_low=0.2, epsilon_high=0.2)
    with pytest.raises(ValueError, match="current version minus the version at sampling"):
        importance_sums_by_age(zeros, zeros, ones, -ones, num_ages=2, epsilon_low=0.2, epsilon_high=0.2)


def test_importance_metrics_refuse_wrong_shapes():
    with pytest.raises(ValueError, match="Pass the result of `importance_sums_by_age`"):
        importance_metrics(torch.zeros(NUM_STATS))
