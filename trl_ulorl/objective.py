"""The UloRL objective as pure tensor functions: which tokens are masked, and how far the data are from on-policy.

Everything here is tensors in, tensors (or plain floats) out. The module knows neither trainers, configs, pools nor
ranks: the surrogate loss itself is TRL's, and a token is taken out of it by setting its advantage to zero where
[`dmmpts_mask`][trl_ulorl.objective.dmmpts_mask] is `True`.

Shapes: `B` completions, `T` completion tokens (padded). All log-probabilities and entropies are in nats and must
belong to the same sampling temperature.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor

MAX_ABS_LOG_RATIO = 20.0
"""Log importance ratios are clamped to plus or minus this (nats) before they are exponentiated.

`exp(20)` is 4.9e8, its square 2.4e17: sums over billions of tokens stay finite, and no sane ratio comes near."""


class ImportanceStat(IntEnum):
    """Columns of the sums that [`importance_sums_by_age`][trl_ulorl.objective.importance_sums_by_age] returns."""

    COUNT = 0
    """Number of tokens."""
    RATIO = 1
    """Sum of the ratio `r` (current over sampling probability)."""
    RATIO_SQUARED = 2
    """Sum of `r` squared."""
    KL = 3
    """Sum of `r - 1 - log r` (nats), the k3 estimator of KL(sampling || current)."""
    LOG_RATIO = 4
    """Sum of `log r` (nats); minus its mean is the k1 estimator of the same divergence."""
    CLIPPED = 5
    """Number of tokens whose ratio lies outside the clip range."""
    AGE = 6
    """Sum of the unfolded ages (policy versions)."""
    ON_POLICY = 7
    """Number of tokens of age 0; with a single age class nothing else tells them."""


NUM_STATS = len(ImportanceStat)


def mastered_positive_mask(
    per_token_logps: Tensor, advantages: Tensor, completion_mask: Tensor, *, tau: float
) -> Tensor:
    r"""Mark the well-mastered positive tokens (MPTs).

    A token is an MPT if its response is a positive one and the current policy gives it probability
    $p(t) \ge \tau$. The comparison is made in log space, at the precision of `per_token_logps` (so that a
    probability of exactly `tau` counts).

    Implements Eq. 9 of [UloRL](https://huggingface.co/papers/2507.19766). Departs from it in: positive means
    advantage > 0, what the update pushes up, instead of reward 1. The two are the same for {0, 1} rewards inside a
    mixed group.

    Args:
        per_token_logps: Log-probabilities of the sampled tokens in nats under the current policy, shape `(B, T)`.
        advantages: One advantage per response, shape `(B,)`.
        completion_mask: 1 or `True` where a token is real, 0 or `False` on padding, shape `(B, T)`.
        tau: Probability from which a token counts as mastered, in `(0, 1]`.

    Returns:
        Boolean tensor of shape `(B, T)`, `True` at mastered tokens of positive responses. Detached.

    Raises:
        ValueError: If shapes disagree or `tau` is out of range.

    Example:
        >>> logps = torch.tensor([[0.995, 0.5], [0.995, 0.5]]).log()
        >>> mastered_positive_mask(logps, torch.tensor([1.0, -1.0]), torch.ones(2, 2), tau=0.99)
        tensor([[ True, False],
                [False, False]])
    """
    _check_per_token(per_token_logps, completion_mask=completion_mask)
    _check_advantages(advantages, per_token_logps)
    if not 0.0 < tau <= 1.0:
        raise ValueError(
            f"`tau` ({tau}) must lie in (0, 1]: it is the probability from which a token counts as mastered. "
            "Set `tau` to 0.99 for the paper's value."
        )
    logps = per_token_logps.detach()
    is_mastered = logps >= logps.new_full((), math.log(tau))
    is_positive = advantages.detach() > 0
    return completion_mask.bool() & is_positive.unsqueeze(1) & is_mastered


def response_entropies(entropies: Tensor, completion_mask: Tensor) -> Tensor:
    r"""Average the policy's entropy over the real tokens of each response.

    $H_i = \frac{1}{|o_i|} \sum_t \left(- \sum_j p_t^j \log p_t^j \right)$, where the inner sum is given by
    `entropies`. Summed in float64, so 128k tokens in a low precision lose nothing.

    Implements the $H_i$ of Eq. 10 of [UloRL](https://huggingface.co/papers/2507.19766). Departs from it in: the
    entropy carries its minus sign, which the paper's print lacks.

    Args:
        entropies: Entropies of the next-token distributions in nats, shape `(B, T)`. Values on padding are ignored,
            whatever they are.
        completion_mask: 1 or `True` where a token is real, shape `(B, T)`.

    Returns:
        Tensor of shape `(B,)` in nats, float32 or the wider type of `entropies`. Detached. A response without any
        real token gets `+inf`: it is never under a target entropy, so nothing is masked on its account.

    Raises:
        ValueError: If shapes disagree.

    Example:
        >>> response_entropies(torch.tensor([[0.25, 0.75, 9.0]]), torch.tensor([[1, 1, 0]]))
        tensor([0.5000])
    """
    _check_per_token(entropies, name="entropies", completion_mask=completion_mask)
    is_real = completion_mask.bool()
    lengths = is_real.sum(dim=1)
    totals = entropies.detach().masked_fill(~is_real, 0.0).sum(dim=1, dtype=torch.float64)
    means = (totals / lengths.clamp(min=1)).masked_fill(lengths == 0, math.inf)
    return means.to(torch.promote_types(entropies.dtype, torch.float32))


def dmmpts_mask(
    per_token_logps: Tensor,
    entropies: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    tau: float,
    sigma: float,
    dynamic: bool = True,
) -> Tensor:
    r"""Mark the tokens that dynamic masking of well-mastered positive tokens leaves out of the update.

    $I_{msk}(i, t) = 1$ if $H_i < \sigma$ and $o_{i,t}$ is an MPT, else 0. Training on tokens that the policy already
    masters sharpens it further; they are left out only where the response's mean entropy has sunk under the target.
    Where every $H_i \ge \sigma$ the mask is `False` throughout, and training is plain GRPO. The normaliser of the
    loss keeps counting masked tokens: set their advantage to zero and leave `completion_mask` as it is.

    Implements Eq. 10 of [UloRL](https://huggingface.co/papers/2507.19766). Departs from it in: positive means
    advantage > 0 (see [`mastered_positive_mask`][trl_ulorl.objective.mastered_positive_mask]); the entropy carries its
    minus sign (see [`response_entropies`][trl_ulorl.objective.response_entropies]).

    Args:
        per_token_logps: Log-probabilities of the sampled tokens in nats under the current policy, shape `(B, T)`.
        entropies: Entropies of the current policy's next-token distributions in nats, shape `(B, T)`.
        advantages: One advantage per response, shape `(B,)`.
        completion_mask: 1 or `True` where a token is real, shape `(B, T)`.
        tau: Probability from which a token counts as mastered, in `(0, 1]`.
        sigma: Target entropy in nats, at least 0. A response exactly at it is not masked. Unused if not `dynamic`.
        dynamic: `False` masks every MPT whatever the entropy, the paper's static ablation (Figure 4).

    Returns:
        Boolean tensor of shape `(B, T)`, `True` where the token is left out of the update. Detached: no gradient
        flows through the choice.

    Raises:
        ValueError: If shapes disagree or `tau` or `sigma` is out of range.

    Example:
        >>> logps = torch.tensor([[0.995, 0.5], [0.995, 0.5]]).log()
        >>> entropies = torch.tensor([[0.0, 0.1], [0.0, 0.7]])  # means 0.05 and 0.35
        >>> dmmpts_mask(logps, entropies, torch.ones(2), torch.ones(2, 2), tau=0.99, sigma=0.2)
        tensor([[ True, False],
                [False, False]])
    """
    _check_per_token(per_token_logps, entropies=entropies, completion_mask=completion_mask)
    if not sigma >= 0.0:
        raise ValueError(
            f"`sigma` ({sigma}) must be at least 0: it is compared with an entropy in nats. Set `sigma` to 0.2 for the "
            "paper's value."
        )
    mastered = mastered_positive_mask(per_token_logps, advantages, completion_mask, tau=tau)
    if not dynamic:
        return mastered
    response_entropy = response_entropies(entropies, completion_mask)
    is_sharp = response_entropy < response_entropy.new_full((), sigma)
    return mastered & is_sharp.unsqueeze(1)


def importance_sums_by_age(
    per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    token_ages: Tensor,
    *,
    num_ages: int,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    r"""Sum importance statistics over the tokens of each age, in a form that adds up over micro-batches and ranks.

    With $r = \pi_\theta / \pi_{old,f(t)}$, the ratio of Eq. 8 (SAIS) of
    [UloRL](https://huggingface.co/papers/2507.19766), a token contributes the columns of
    [`ImportanceStat`][trl_ulorl.objective.ImportanceStat]. The sums say how far POIS, which puts $r = 1$, is from the
    truth, and what SAIS clips. Add them over micro-batches and ranks, then call
    [`importance_metrics`][trl_ulorl.objective.importance_metrics] once. Departs from the paper in: it reports no
    such statistics; $\log r$ is clamped to plus or minus 20 before anything is computed from it, so that no ratio
    overflows.

    Args:
        per_token_logps: Log-probabilities of the sampled tokens in nats under the current policy, shape `(B, T)`.
        sampling_per_token_logps: Log-probabilities recorded when each token was sampled, in nats, shape `(B, T)`.
            Tokens for which it is NaN (not recorded) are left out.
        completion_mask: 1 or `True` where a token is real, shape `(B, T)`. Values of the other tensors on padding are
            ignored, whatever they are.
        token_ages: Policy versions (optimizer steps) between a token's sampling and now, integers of at least 0,
            shape `(B, T)`.
        num_ages: Number of age classes, at least 1. The last one holds every age from `num_ages - 1` on.
        epsilon_low: Lower clip width; a token counts as clipped if `r < 1 - epsilon_low`.
        epsilon_high: Upper clip width; a token counts as clipped if `r > 1 + epsilon_high`. Unlike TRL's
            `clip_ratio/...`, either side counts whatever the sign of the advantage.

    Returns:
        Float64 tensor of shape `(num_ages, NUM_STATS)` on the inputs' device. Detached.

    Raises:
        ValueError: If shapes disagree, `num_ages` is below 1 or a real token has a negative age.

    Example:
        >>> current, sampling = torch.tensor([[0.5, 0.6]]).log(), torch.tensor([[0.5, 0.4]]).log()
        >>> ages, real = torch.tensor([[0, 1]]), torch.ones(1, 2)
        >>> clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
        >>> sums = importance_sums_by_age(current, sampling, real, ages, num_ages=2, **clip)
        >>> sums[:, ImportanceStat.RATIO]
        tensor([1.0000, 1.5000], dtype=torch.float64)
    """
    _check_per_token(
        per_token_logps,
        sampling_per_token_logps=sampling_per_token_logps,
        completion_mask=completion_mask,
        token_ages=token_ages,
    )
    if num_ages < 1:
        raise ValueError(
            f"`num_ages` ({num_ages}) must be at least 1: the last class holds all older tokens. Set `num_ages` to the "
            "number of segments."
        )
    sampling_logps = sampling_per_token_logps.detach().double()
    is_counted = completion_mask.bool() & ~sampling_logps.isnan()
    ages = token_ages.detach().long().masked_fill(~is_counted, 0)
    if bool((ages < 0).any()):
        raise ValueError(
            f"`token_ages` goes down to {int(ages.min())}, but a token cannot be younger than the current policy. "
            "Compute ages as the current version minus the version at sampling."
        )
    log_ratio = (per_token_logps.detach().double() - sampling_logps).masked_fill(~is_counted, 0.0)
    log_ratio = log_ratio.clamp(min=-MAX_ABS_LOG_RATIO, max=MAX_ABS_LOG_RATIO)
    ratio = log_ratio.exp()
    columns = {
        ImportanceStat.COUNT: torch.ones_like(ratio),
        ImportanceStat.RATIO: ratio,
        ImportanceStat.RATIO_SQUARED: ratio.square(),
        ImportanceStat.KL: log_ratio.expm1() - log_ratio,
        ImportanceStat.LOG_RATIO: log_ratio,
        ImportanceStat.CLIPPED: (ratio < 1.0 - epsilon_low) | (ratio > 1.0 + epsilon_high),
        ImportanceStat.AGE: ages,
        ImportanceStat.ON_POLICY: ages == 0,
    }
    stats = torch.stack([columns[column].double() for column in ImportanceStat], dim=-1)
    stats = stats.masked_fill(~is_counted.unsqueeze(-1), 0.0)
    sums = stats.new_zeros((num_ages, NUM_STATS))
    return sums.index_add_(0, ages.clamp(max=num_ages - 1).flatten(), stats.flatten(end_dim=1))


def importance_metrics(sums: Tensor) -> dict[str, float]:
    r"""Turn summed importance statistics into metrics per age class and over all tokens.

    Per age class with label `a` (the last, folded one reads `a+`): `importance/ratio_age_{a}` (mean ratio, 1 on
    policy), `importance/kl_age_{a}` (nats per token), `importance/clip_frac_age_{a}` and `importance/ess_age_{a}`, the
    effective sample size $(\sum r)^2 / (n \sum r^2)$ in $(0, 1]$, where 1 means that all weights are equal. Over all
    tokens the same without the suffix, and `importance/on_policy_frac` (share of tokens of age 0) and
    `importance/age_mean` (policy versions). Classes without a token are left out; without any token the result is
    empty. The paper has no such metrics.

    Args:
        sums: Sums from [`importance_sums_by_age`][trl_ulorl.objective.importance_sums_by_age], added over micro-batches
            and ranks, shape `(num_ages, NUM_STATS)`.

    Returns:
        Metric names and values.

    Raises:
        ValueError: If `sums` has another shape.

    Example:
        >>> sums = torch.tensor([[2.0, 3.0, 5.0, 0.3, 0.7, 1.0, 0.0, 2.0]])  # two tokens with r = 1 and 2, both age 0
        >>> importance_metrics(sums)["importance/ess"]
        0.9
    """
    if sums.dim() != 2 or sums.size(1) != NUM_STATS:
        raise ValueError(
            f"`sums` has shape {tuple(sums.shape)}, but must be (num_ages, {NUM_STATS}), one column per "
            "`ImportanceStat`. Pass the result of `importance_sums_by_age`, added over micro-batches and ranks."
        )
    sums = sums.detach().double().cpu()
    metrics: dict[str, float] = {}
    for age, row in enumerate(sums.tolist()):
        is_folded = age == sums.size(0) - 1
        metrics |= _means(row, suffix=f"_age_{age}+" if is_folded else f"_age_{age}")
    totals: list[float] = sums.sum(dim=0).tolist()
    metrics |= _means(totals, suffix="")
    count = totals[ImportanceStat.COUNT]
    if count > 0:
        metrics["importance/on_policy_frac"] = totals[ImportanceStat.ON_POLICY] / count
        metrics["importance/age_mean"] = totals[ImportanceStat.AGE] / count
    return metrics


def _means(row: list[float], *, suffix: str) -> dict[str, float]:
    """Metrics of one row of sums; none if the row holds no token."""
    count = row[ImportanceStat.COUNT]
    if count == 0:
        return {}
    # Rounding alone could carry the quotient of equal weights over 1.
    ess = min(1.0, row[ImportanceStat.RATIO] ** 2 / (count * row[ImportanceStat.RATIO_SQUARED]))
    return {
        f"importance/ratio{suffix}": row[ImportanceStat.RATIO] / count,
        f"importance/kl{suffix}": row[ImportanceStat.KL] / count,
        f"importance/clip_frac{suffix}": row[ImportanceStat.CLIPPED] / count,
        f"importance/ess{suffix}": ess,
    }


def _check_per_token(first: Tensor, *, name: str = "per_token_logps", **others: Tensor) -> None:
    """Raise unless `first` is `(B, T)` and all others have its shape: broadcasting would hide the mistake."""
    if first.dim() != 2:
        raise ValueError(
            f"`{name}` has shape {tuple(first.shape)}, but must be (B, T), one value per completion token. Add the "
            "batch dimension with `unsqueeze(0)` if it holds a single response."
        )
    for other_name, other in others.items():
        if other.shape != first.shape:
            raise ValueError(
                f"`{other_name}` has shape {tuple(other.shape)} but `{name}` has shape {tuple(first.shape)}: both hold "
                f"one value per completion token. Cut or pad `{other_name}` to the same completion tokens."
            )


def _check_advantages(advantages: Tensor, per_token_logps: Tensor) -> None:
    """Raise unless there is one advantage per response."""
    num_responses = per_token_logps.size(0)
    if advantages.shape != (num_responses,):
        raise ValueError(
            f"`advantages` has shape {tuple(advantages.shape)}, but must be ({num_responses},), one value per response. "
            "Pass the advantages from before they are spread over tokens."
        )
