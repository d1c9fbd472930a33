"""What a step's metrics say about the health of a run: sums over micro-batches, and alarms. No trainer, no ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .objective import (
    NUM_STATS,
    dmmpts_mask,
    importance_metrics,
    importance_sums_by_age,
    mastered_positive_mask,
    response_entropies,
)

if TYPE_CHECKING:
    from .config import DMMPTsConfig

logger = logging.getLogger(__name__)


class UpdateSums:
    """Adds up what the forward passes of one update show, so that ranks need a single reduction per update.

    Args:
        dmmpts: Masking in force; None leaves its metrics out.
        num_ages: Age classes of the importance metrics.
        epsilon_low: Lower clip range.
        epsilon_high: Upper clip range.
    """

    def __init__(self, dmmpts: DMMPTsConfig | None, *, num_ages: int, epsilon_low: float, epsilon_high: float) -> None:
        self._dmmpts = dmmpts
        self._num_ages = num_ages
        self._epsilon = (epsilon_low, epsilon_high)
        self._sums: Tensor | None = None

    def add(
        self,
        inputs: Mapping[str, Tensor],
        per_token_logps: Tensor,
        entropies: Tensor,
        token_mask: Tensor | None,
        padding: Tensor,
    ) -> None:
        """Add a micro-batch.

        Args:
            inputs: TRL's batch with `advantages` of shape `(B,)`, `completion_mask`, `sampling_per_token_logps` and
                `token_ages`, each `(B, T)`.
            per_token_logps: Current log-probabilities in nats, shape `(B, T)`.
            entropies: Current entropies in nats, shape `(B, T)`.
            token_mask: True where DMMPTs masked a token, shape `(B, T)`; None without masking.
            padding: What `padding_counts` counted, shape `(3,)`.
        """
        mask = inputs["completion_mask"]
        importance = importance_sums_by_age(
            per_token_logps,
            inputs["sampling_per_token_logps"],
            mask,
            inputs["token_ages"],
            num_ages=self._num_ages,
            epsilon_low=self._epsilon[0],
            epsilon_high=self._epsilon[1],
        )
        parts = [importance.flatten(), padding.to(importance)]
        if self._dmmpts is not None and token_mask is not None:
            negative = -inputs["advantages"]
            mastered_negative = mastered_positive_mask(per_token_logps, negative, mask, tau=self._dmmpts.tau)
            has_tokens = mask.bool().any(dim=1)
            is_low = response_entropies(entropies, mask) < self._dmmpts.sigma
            counts = (
                token_mask,
                mask,
                is_low & has_tokens,
                has_tokens,
                mastered_negative,
                mask.bool() & (negative > 0).unsqueeze(1),
            )
            parts.append(torch.stack([count.sum().to(importance) for count in counts]))
        sums = torch.cat(parts)
        self._sums = sums if self._sums is None else self._sums + sums

    def reset(self) -> None:
        """Forget an update that was not finished."""
        self._sums = None

    def take(self) -> Tensor:
        """Return the sums of the update and start the next one; reduce them over ranks by addition."""
        if self._sums is None:
            raise RuntimeError("No micro-batch was added: the forward pass was not observed.")
        sums, self._sums = self._sums, None
        return sums

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Turn sums over all ranks into `importance/` and `dmmpts/` metrics, and those of the padding."""
        size = self._num_ages * NUM_STATS
        by_age = sums[:size].reshape(self._num_ages, NUM_STATS)
        metrics = importance_metrics(by_age)
        stale = importance_metrics(by_age[1:].sum(dim=0, keepdim=True))
        for name in ("ratio", "kl", "clip_frac", "ess"):
            if f"importance/{name}" in stale:
                metrics[f"importance/stale_{name}"] = stale[f"importance/{name}"]
        cells, uncut_cells, tokens, *counts = sums[size:].tolist()
        metrics["rollout/padding_ratio"] = cells / max(1.0, tokens)
        metrics["rollout/padding_ratio_uncut"] = uncut_cells / max(1.0, tokens)
        if self._dmmpts is not None:
            masked, tokens, low, responses, mastered_negative, negative = counts
            metrics["dmmpts/masked_frac"] = masked / max(1.0, tokens)
            metrics["dmmpts/low_entropy_frac"] = low / max(1.0, responses)
            metrics["dmmpts/mastered_negative_frac"] = mastered_negative / max(1.0, negative)
            metrics["dmmpts/sigma"] = self._dmmpts.sigma
        return metrics


def masked_advantages(
    advantages: Tensor, per_token_logps: Tensor, entropies: Tensor, completion_mask: Tensor, dmmpts: DMMPTsConfig
) -> tuple[Tensor, Tensor]:
    """Spread advantages over tokens, with zero where DMMPTs masks (Eq. 10).

    A zero advantage takes the token out of the loss, while the normaliser, which counts `completion_mask`, keeps it.

    Args:
        advantages: Shape `(B,)`.
        per_token_logps: Current log-probabilities in nats, shape `(B, T)`.
        entropies: Current entropies in nats, shape `(B, T)`.
        completion_mask: True where a token is real, shape `(B, T)`.
        dmmpts: Threshold and target entropy.

    Returns:
        The advantages, shape `(B, T)`, and the mask, shape `(B, T)`, True where a token is left out.
    """
    token_mask = dmmpts_mask(
        per_token_logps,
        entropies,
        advantages,
        completion_mask,
        tau=dmmpts.tau,
        sigma=dmmpts.sigma,
        dynamic=dmmpts.dynamic,
    )
    return advantages.unsqueeze(1) * (~token_mask), token_mask


# Of tokens that are not on-policy. On the embedded task runs that went well stay below 0.025 nats per token and above 0.9;
# those that were lost went beyond both before their accuracy fell, or as it did: docs/evidence.md.
MAX_STALE_KL = 0.03
MIN_STALE_ESS = 0.8
# Of tokens of the current policy. Between bfloat16 engines and trainers it is some thousandths of a nat; a wrong weight or
# temperature makes it tenths or more.
MAX_FRESH_KL = 0.1
TRUNCATION_WINDOW = 10  # steps
MAX_TRUNCATION_GROWTH = 0.2
MAX_TRUNCATED = 0.9


class Alarms:
    """Warns before a run is lost: drift of stale tokens, an engine that is off the policy, truncation, held prompts.

    Each alarm speaks once and again only after its condition has passed. A step that does not tell, as it has no token of an
    age or completed no group, changes nothing.

    Args:
        watch_importance: Whether drift is watched.
        max_group_age: Versions after which a held group counts as starving.
    """

    def __init__(self, *, watch_importance: bool, max_group_age: int) -> None:
        self._watch_importance = watch_importance
        self._max_group_age = max_group_age
        self._truncated: deque[float] = deque(maxlen=TRUNCATION_WINDOW)
        self._raised: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Log and return the alarms that a step's metrics raise."""
        found = {
            **(self._drift(metrics) if self._watch_importance else {}),
            **self._engine_gap(metrics),
            **self._truncation(metrics),
            **self._starvation(metrics),
        }
        new = [text for name, text in found.items() if text is not None and name not in self._raised]
        self._raised -= found.keys()
        self._raised |= {name for name, text in found.items() if text is not None}
        for text in new:
            logger.warning(text)
        return new

    # Each returns the alarms that the metrics decide on: the text of one that is raised, else None.

    def _drift(self, metrics: Mapping[str, float]) -> dict[str, str | None]:
        if not {"importance/stale_kl", "importance/stale_ess"} & metrics.keys():
            return {}
        kl, ess = metrics.get("importance/stale_kl", 0.0), metrics.get("importance/stale_ess", 1.0)
        if kl <= MAX_STALE_KL and ess >= MIN_STALE_ESS:
            return {"drift": None}
        return {
            "drift": f"Tokens of older policies have drifted from the current one: KL {kl:.3f} nats per token (alarm at "
            f"{MAX_STALE_KL}), effective sample size {ess:.2f} (alarm at {MIN_STALE_ESS}). POIS treats them as "
            "on-policy, so the gradient is in doubt. Lower the learning rate, `num_segments` or `max_staleness`, set "
            "`off_policy_mask_threshold`, or try `importance_mode='sais'`."
        }

    def _engine_gap(self, metrics: Mapping[str, float]) -> dict[str, str | None]:
        kl = metrics.get("importance/kl_age_0")
        if kl is None:
            return {}
        if kl <= MAX_FRESH_KL:
            return {"engine": None}
        return {
            "engine": f"Tokens that the current policy sampled do not fit it: KL {kl:.3f} nats per token (alarm at "
            f"{MAX_FRESH_KL}). Decoding and training disagree on weights, precision or temperature, or the updates on one batch "
            "move the policy far. Run `trl-ulorl doctor` with this engine; with several updates per batch lower the learning rate."
        }

    def _truncation(self, metrics: Mapping[str, float]) -> dict[str, str | None]:
        share = metrics.get("rollout/truncated_frac")
        if share is None:
            return {}
        self._truncated.append(share)
        recent = list(self._truncated)
        found: dict[str, str | None] = {"truncated": None, "growth": None}
        if len(recent) >= 3 and min(recent[-3:]) >= MAX_TRUNCATED:
            found["truncated"] = (
                f"{share:.0%} of the rollouts reach the length limit without an answer, for three steps now: they all "
                "count as wrong and there is nothing to learn from. Raise `max_completion_length` well above "
                f"{metrics.get('rollout/completed_length_mean', 0):.0f} tokens, or start from a model that ends."
            )
        half = TRUNCATION_WINDOW // 2
        earlier, later = sum(recent[:half]) / half, sum(recent[half:]) / half
        if len(recent) == TRUNCATION_WINDOW and later - earlier > MAX_TRUNCATION_GROWTH:
            found["growth"] = (
                f"The share of truncated rollouts grew from {earlier:.0%} to {later:.0%} within {TRUNCATION_WINDOW} steps: "
                "the policy is learning not to end. Check `importance/stale_kl`, lower the learning rate or the "
                "staleness, or raise `max_completion_length`."
            )
        return found

    def _starvation(self, metrics: Mapping[str, float]) -> dict[str, str | None]:
        age = metrics.get("rollout/oldest_group_age")
        if age is None:
            return {}
        if age <= self._max_group_age:
            return {"starvation": None}
        return {
            "starvation": f"A prompt has been held for {age:.0f} optimizer steps (alarm above {self._max_group_age}): "
            "its rollouts are hardly continued. Lower `max_inflight_groups`, or set `max_staleness`."
        }
