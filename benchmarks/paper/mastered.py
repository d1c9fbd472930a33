"""How much of the gradient do mastered tokens carry? The share of tokens, of the gradient and of the entropy by probability.

DMMPTs leave out tokens of positive responses with a probability p of at least tau. The policy gradient of a token at its
logit is its advantage times (1 - p), so what is left out is the sum of |A| (1 - p) over them. Takes the model before
training, in mixed groups of eight, on problems of the embedded task; a minute of a core for three draws.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from study import interval, options, save

EDGES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
GENERATIONS = 8
PROMPTS = 48
NAMES = ("tokens", "gradient", "entropy")


def shares(probabilities: Any, weights: Any, entropies: Any) -> list[dict[str, float]]:
    """Return, for each class of probability, its share of the tokens, of the gradient and of the entropy.

    Args:
        probabilities: Of the sampled tokens, shape `(N,)`.
        weights: Absolute advantages, shape `(N,)`.
        entropies: In nats, shape `(N,)`.
    """
    classes = np.digitize(probabilities, EDGES[1:-1])
    parts = (np.ones(len(probabilities)), weights * (1 - probabilities), entropies)
    sums = [np.bincount(classes, part, minlength=len(EDGES) - 1) / part.sum() for part in parts]
    return [dict(zip(NAMES, map(float, row), strict=True)) for row in zip(*sums, strict=True)]


def measured(seed: int, num_prompts: int) -> dict[str, list[dict[str, float]]]:
    """Sample groups from the embedded model and return the shares in positive and in negative responses."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_ulorl.data.arithmetic import arithmetic_dataset, embedded_model_path
    from trl_ulorl.rewards import VerifierReward

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path()).eval()
    rows = arithmetic_dataset(num_prompts, seed=seed, split="train")
    asked = [prompt for prompt in rows["prompt"] for _ in range(GENERATIONS)]
    answers = [answer for answer in rows["answer"] for _ in range(GENERATIONS)]
    batch = tokenizer.apply_chat_template(
        asked,
        add_generation_prompt=True,
        return_dict=True,
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        output = model.generate(
            **batch,
            max_new_tokens=64,
            do_sample=True,
            temperature=0.85,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ids = output.sequences[:, batch["input_ids"].shape[1] :]
    logps = torch.log_softmax(torch.stack(output.logits, dim=1) / 0.85, dim=-1)
    is_end = ids == tokenizer.eos_token_id
    is_real = (is_end.cumsum(dim=1) - is_end.long() == 0).numpy()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    scores = VerifierReward()(prompts=asked, completions=completions, answer=answers)
    rewards = np.array(scores, dtype=float).reshape(-1, GENERATIONS)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    probabilities = logps.gather(-1, ids[..., None]).squeeze(-1).exp().numpy()
    entropies = -(logps.exp() * logps).sum(dim=-1).numpy()
    weights = np.broadcast_to(np.abs(advantages).reshape(-1, 1), is_real.shape)
    result = {}
    for name, sign in (("positive", 1), ("negative", -1)):
        chosen = is_real & (sign * advantages.reshape(-1, 1) > 0)  # groups with equal rewards have no advantage
        result[name] = shares(probabilities[chosen], weights[chosen], entropies[chosen])
    return result


def draw(content: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for (name, rows), axes in zip(content.items(), grid, strict=True):
        for index, share in enumerate(NAMES):
            places = [place + (index - 1) * 0.27 for place in range(len(rows))]
            errors = [0.0 if row[share]["high"] is None else row[share]["high"] - row[share]["mean"] for row in rows]
            axes.bar(places, [row[share]["mean"] for row in rows], width=0.25, yerr=errors, label=share, capsize=2)
        axes.set_xticks(
            range(len(rows)), [f"{low:g}-{high:g}" for low, high in pairwise(EDGES)], fontsize=8, rotation=20
        )
        axes.set(title=f"{name} responses", xlabel="probability of the sampled token", ylabel="share")
        axes.grid(alpha=0.3, axis="y")
        axes.legend()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    chosen = options(__doc__)
    draws = [measured(seed, chosen.problems or PROMPTS) for seed in range(1, chosen.seeds + 1)]
    content = {
        name: [
            {share: interval([each[name][index][share] for each in draws]) for share in NAMES}
            for index in range(len(EDGES) - 1)
        ]
        for name in draws[0]
    }
    for name, rows in content.items():
        print(f"{name} responses: probability, share of tokens, of the gradient, of the entropy")
        for low, high, row in zip(EDGES[:-1], EDGES[1:], rows, strict=True):
            print(f"  {low:5g} to {high:5g}", *(f"{row[share]['mean']:.3f}" for share in NAMES))
    save("mastered", {"edges": EDGES, "classes": content}, chosen, lambda path: draw(content, path))


if __name__ == "__main__":
    main()
