"""The UloRL objective written out from the paper, as a yardstick for the tests.

Slow on purpose: one row and one token at a time, with neither TRL nor `trl_ulorl.objective`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ulorl_loss(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    token_mask: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    r"""Compute minus the objective of Eq. 10 for one batch.

    $-\frac{1}{\sum_i |o_i|} \sum_i \sum_t (1 - I_{msk}(i, t)) \min(r_{i,t} A_i, clip(r_{i,t}, 1 - \epsilon, 1 + \epsilon)
    A_i)$ with $r_{i,t} = \exp(\log\pi_\theta - \log\pi_{old})$. POIS is `old_per_token_logps =
    per_token_logps.detach()`, SAIS (Eq. 8) the log-probabilities recorded at sampling.

    Departs from the paper in: the sums run over the batch instead of one group (as TRL's "dapo" loss does).

    Args:
        per_token_logps: Log-probabilities in nats under the current policy, shape `(B, T)`. Gradients flow into it.
        old_per_token_logps: Log-probabilities in the ratio's denominator in nats, shape `(B, T)`. A constant.
        advantages: One advantage per response, shape `(B,)`.
        completion_mask: 1 or `True` where a token is real, shape `(B, T)`.
        token_mask: I_msk, `True` where a token is left out; the normaliser counts it all the same. Shape `(B, T)`.
        epsilon: Clip width on both sides.

    Returns:
        The loss, a scalar that can be differentiated even if all tokens are masked.
    """
    num_rows, num_tokens = per_token_logps.shape
    objective = torch.zeros((), dtype=per_token_logps.dtype)
    count = 0
    for i in range(num_rows):
        for t in range(num_tokens):
            if not completion_mask[i, t]:
                continue
            count += 1
            ratio = torch.exp(per_token_logps[i, t] - old_per_token_logps[i, t].detach())
            clipped_ratio = max(min(ratio, 1 + epsilon), 1 - epsilon)
            surrogate = min(ratio * advantages[i], clipped_ratio * advantages[i])
            objective = objective + (1 - int(token_mask[i, t])) * surrogate
    return -objective / count
