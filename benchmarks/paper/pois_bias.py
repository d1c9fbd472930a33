"""How wrong is the gradient that POIS computes on tokens of older policies? And SAIS's?

A run is trained with POIS and its weights are kept at every update. Under the last of these policies, three gradients are
computed for the same problems:

- the true one: on completions that this policy samples now;
- POIS's, on completions that older policies have sampled, as if they were this policy's;
- SAIS's, on the same completions, with the ratio to the policy that sampled each token, clipped as in training.

"age a" samples whole completions with the policy of a updates ago. "S segments" samples the j-th segment with the policy of
S - 1 - j updates ago, as a group is whose longest rollout takes all S of them and is trained on at once.

A gradient from samples is noisy, and noise alone lowers a cosine. So each is estimated twice, from halves of the
generations: the dot product of two independent estimates estimates the squared length of what both estimate. With a hat
for that: cosine = a.b / (|a|^ |b|^), length ratio = |a|^ / |b|^. "control" is the plain cosine between the two halves of the
true gradient, which a perfect estimator of the same size would reach; age 0, sampled anew, must come out at cosine 1.

The divergence between stale tokens and the policy is the metrics' own (`importance/stale_kl`, `importance/stale_ess`), so
the table says which cosine belongs to the drift alarm's thresholds.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import runs
import study

LEARNING_RATES = (2e-5, 1e-4, 5e-4)  # the figures' own in the middle
STEPS = 16  # updates before the gradient is taken
AGES = (0, 1, 2, 4, 8)
SEGMENTS = (4, 8)
PROBLEMS = 48
GENERATIONS = 8  # of each half
HALVES = 2
MODES = ("pois", "sais")
EPSILON = 0.2  # TRL's default clip range
PROBLEM_SEED = 1_000_003  # far from those of the runs


# ------------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class Sample:
    """A completion: ids of its prompt, its own ids, their log-probs when they were sampled, and ages in updates."""

    prompt_ids: Any
    token_ids: Any
    per_token_logps: Any
    ages: Any
    is_ended: bool


def decode(trainer: Any, prompts: Sequence[Any], policies: Sequence[tuple[int, Any]], limit: int) -> list[Sample]:
    """Sample a completion for each prompt, its segments by policies of the given ages in turn."""
    from trl_ulorl.rollout.engine import DecodeRequest

    empty = np.zeros(0)
    samples = [Sample(ids, empty.astype(np.int32), empty, empty.astype(np.int64), False) for ids in prompts]
    segment_length = -(-limit // len(policies))
    for age, weights in policies:
        trainer.model.load_state_dict(weights)
        is_open = [
            index for index, sample in enumerate(samples) if not sample.is_ended and len(sample.token_ids) < limit
        ]
        requests = [
            DecodeRequest(
                np.concatenate([samples[index].prompt_ids, samples[index].token_ids]),
                min(segment_length, limit - len(samples[index].token_ids)),
            )
            for index in is_open
        ]
        for segment in trainer.rollout_engine.decode(requests):
            sample = samples[is_open[segment.request_index]]
            samples[is_open[segment.request_index]] = Sample(
                sample.prompt_ids,
                np.concatenate([sample.token_ids, segment.token_ids]),
                np.concatenate([sample.per_token_logps, segment.per_token_logps]),
                np.concatenate([sample.ages, np.full(len(segment.token_ids), age)]),
                segment.is_stopped,
            )
    return samples


def advantages_of(rewards: Any) -> Any:
    """Return GRPO's advantages (Eq. 4) for rewards of shape `(groups, G)`; 0 in groups of equal rewards."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


# ------------------------------------------------------------------------------------------------------------ gradients


def gradients(
    model: Any, samples: Sequence[Sample], advantages: Any, *, temperature: float, num_stats_ages: int
) -> tuple[dict[str, Any], Any]:
    """Return the gradient of each mode's loss as a vector, and the importance sums of the metrics by age.

    Args:
        model: The policy.
        samples: Completions; those without an advantage are left out, as under dynamic sampling, and do not count in the
            normaliser.
        advantages: One per completion, shape `(B,)`.
        temperature: Of sampling and of the log-probs.
        num_stats_ages: Age classes of the sums.
    """
    import torch

    from trl_ulorl.objective import importance_sums_by_age

    kept = [index for index in range(len(samples)) if advantages[index] != 0]
    kept.sort(key=lambda index: -len(samples[index].token_ids))
    parameters = [value for value in model.parameters() if value.requires_grad]
    totals = {mode: [torch.zeros_like(value) for value in parameters] for mode in MODES}
    sums = 0.0
    num_tokens = sum(len(samples[index].token_ids) for index in kept)
    for start in range(0, len(kept), 64):
        rows = kept[start : start + 64]
        ids, attention, mask, old, ages = padded([samples[row] for row in rows])
        logits = model(ids, attention_mask=attention).logits[:, :-1].float() / temperature
        logps = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        for mode in MODES:
            each = token_losses(logps, old, advantages[rows].unsqueeze(1), mode)
            loss = (each * mask).sum() / num_tokens
            for total, value in zip(
                totals[mode], torch.autograd.grad(loss, parameters, retain_graph=mode != MODES[-1]), strict=True
            ):
                total += value
        sums = sums + importance_sums_by_age(
            logps, old, mask, ages, num_ages=num_stats_ages, epsilon_low=EPSILON, epsilon_high=EPSILON
        )
    return {mode: torch.cat([value.flatten() for value in total]) for mode, total in totals.items()}, sums


def token_losses(logps: Any, old_logps: Any, advantages: Any, mode: str) -> Any:
    """Return the clipped loss per token: with POIS the ratio is 1 and only its gradient is left (Eq. 8)."""
    import torch

    ratio = torch.exp(logps - (logps.detach() if mode == "pois" else old_logps))
    return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)


def padded(samples: Sequence[Sample]) -> tuple[Any, ...]:
    """Return ids and attention mask of shape `(B, P + T)`; completion mask, log-probs and ages, of `(B, P + T - 1)`."""
    import torch

    width = max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    attention, mask, ages = (torch.zeros_like(ids) for _ in range(3))
    old = torch.zeros(len(samples), width)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.token_ids)
        ids[row, :end] = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids])).long()
        attention[row, :end] = 1
        mask[row, start:end] = 1
        old[row, start:end] = torch.from_numpy(sample.per_token_logps)
        ages[row, start:end] = torch.from_numpy(sample.ages)
    return ids, attention, mask[:, 1:], old[:, 1:], ages[:, 1:]


def comparison(true: Sequence[Any], stale: Sequence[Any]) -> dict[str, float | None]:
    """Compare two estimated gradients, each given by two independent estimates.

    Returns:
        `cosine` and `length_ratio` without the noise's part (None where noise is all there is); `plain_cosine`, the mean
        cosine of one estimate with another.
    """
    across = float(np.mean([float(a @ b) for a in true for b in stale]))
    of_true, of_stale = float(true[0] @ true[1]), float(stale[0] @ stale[1])
    is_clear = of_true > 0 and of_stale > 0
    return {
        "cosine": across / (of_true * of_stale) ** 0.5 if is_clear else None,
        "length_ratio": (of_stale / of_true) ** 0.5 if is_clear else None,
        "plain_cosine": float(np.mean([float(a @ b) / float(a.norm() * b.norm()) for a in true for b in stale])),
    }


# ---------------------------------------------------------------------------------------------------------- measurements


def arms(steps: int) -> dict[str, list[int]]:
    """Return the ages of the policies that sample the segments, by the arm's name."""
    named = {f"age {age}": [age] for age in AGES if age <= steps}
    return named | {f"{n} segments": list(range(n - 1, -1, -1)) for n in SEGMENTS if n - 1 <= steps}


def measure(learning_rate: float, seed: int, steps: int, num_problems: int) -> dict[str, Any]:
    """Train, then compare the gradients under the last policy."""
    import torch

    torch.set_num_threads(1)
    options = runs.setting({"learning_rate": learning_rate, "max_steps": steps, "dmmpts": "none"}, seed)
    with tempfile.TemporaryDirectory(prefix="pois_bias_") as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = runs.build(dict(options), Path(folder))
        versions = trained_versions(trainer)
    torch.manual_seed(seed)
    prompts, answers = problems(trainer, num_problems)
    limit, temperature = options["max_completion_length"], options["temperature"]

    def estimates(ages: list[int]) -> dict[str, Any]:
        policies = [(age, versions[steps - age]) for age in ages]
        samples = decode(trainer, prompts, policies, limit)
        rewards = rewards_of(trainer, samples, answers).view(-1, GENERATIONS)
        advantages = advantages_of(rewards).flatten()
        trainer.model.load_state_dict(versions[steps])
        half = np.arange(len(samples)) // GENERATIONS % HALVES
        found: dict[str, Any] = {"rewards": float(rewards.mean()), "sums": 0.0, **{mode: [] for mode in MODES}}
        for number in range(HALVES):
            rows = np.flatnonzero(half == number)
            vectors, sums = gradients(
                trainer.model,
                [samples[row] for row in rows],
                advantages[rows],
                temperature=temperature,
                num_stats_ages=steps + 1,
            )
            found["sums"] = found["sums"] + sums
            for mode in MODES:
                found[mode].append(vectors[mode])
        return found

    true = estimates([0])
    result = {
        "learning_rate": learning_rate,
        "seed": seed,
        "accuracy": true["rewards"],
        "control": float(torch.cosine_similarity(*true["pois"], dim=0)),
        "arms": {},
    }
    for name, ages in arms(steps).items():
        found = estimates(ages)
        entry = {mode: comparison(true["pois"], found[mode]) for mode in MODES}
        result["arms"][name] = {**entry, **divergence(found["sums"])}
    return result


def trained_versions(trainer: Any) -> list[Any]:
    """Train, and return the weights before the first and after every update."""
    from transformers import TrainerCallback

    def weights() -> Any:
        return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}

    versions = [weights()]

    class Keep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            versions.append(weights())

    trainer.add_callback(Keep())
    trainer.train()
    return versions


def problems(trainer: Any, num_problems: int) -> tuple[list[Any], list[str]]:
    """Return the prompts' ids and the answers, each as often as it is sampled."""
    from trl_ulorl.data.arithmetic import arithmetic_dataset

    rows = arithmetic_dataset(num_problems, seed=PROBLEM_SEED, split="train")
    tokenizer = trainer.processing_class
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in rows["prompt"]]
    ids = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]
    copies = HALVES * GENERATIONS
    return [each for each in ids for _ in range(copies)], [each for each in rows["answer"] for _ in range(copies)]


def rewards_of(trainer: Any, samples: Sequence[Sample], answers: Sequence[str]) -> Any:
    """Return 1 for right, 0 for wrong and for truncated completions, shape `(B,)`."""
    import torch

    from trl_ulorl.rewards import VerifierReward

    ids = [sample.token_ids.tolist() for sample in samples]
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    rewards = VerifierReward()(completions=texts, answer=answers)
    return torch.tensor([float(r or 0.0) * sample.is_ended for r, sample in zip(rewards, samples, strict=True)])


def divergence(sums: Any) -> dict[str, float]:
    """Return the metrics of stale tokens; none are stale at age 0, which then stands for them."""
    from trl_ulorl.objective import importance_metrics

    stale = importance_metrics(sums[1:].sum(dim=0, keepdim=True))
    metrics = stale or importance_metrics(sums)
    return {f"stale_{name}": metrics[f"importance/{name}"] for name in ("kl", "ess", "clip_frac")}


# ------------------------------------------------------------------------------------------------------------ the figure


def key(rate: float, seed: int, steps: int, num_problems: int) -> str:
    """Return the name under which a measurement is kept: all that it depends on but the code."""
    case = [runs.setting({}, seed), rate, steps, num_problems, arms(steps), HALVES, GENERATIONS, EPSILON, PROBLEM_SEED]
    return hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]


def measured(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every measurement; each is kept as JSON and none is made twice."""
    from trl_ulorl.records import write_json

    steps, num_problems = chosen.steps or STEPS, chosen.problems or PROBLEMS
    cases = [
        (rate, seed, steps, num_problems) for seed in range(1, chosen.seeds + 1) for rate in chosen.learning_rates
    ]
    folder = runs.RUNS.parent / "gradients"
    paths = [folder / f"{key(*case)}.json" for case in cases]
    missing = {path: case for path, case in zip(paths, cases, strict=True) if not path.exists()}
    runs.note(f"{len(cases)} measurements, {len(missing)} of them to be made")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl_ulorl.cli.training"])
    with concurrent.futures.ProcessPoolExecutor(chosen.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        futures = {pool.submit(measure, *case): path for path, case in missing.items()}
        for future in concurrent.futures.as_completed(futures):
            write_json(futures[future], future.result())
            runs.note(f"{futures[future].name} is made")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means and intervals over the seeds, by learning rate and arm."""
    result: dict[str, Any] = {}
    for rate in dict.fromkeys(entry["learning_rate"] for entry in found):
        each = [entry for entry in found if entry["learning_rate"] == rate]
        result[f"{rate:g}"] = {
            "accuracy": study.interval([entry["accuracy"] for entry in each]),
            "control": study.interval([entry["control"] for entry in each]),
            "arms": {
                name: {
                    **{
                        mode: {
                            figure: over_seeds([entry["arms"][name][mode][figure] for entry in each])
                            for figure in ("cosine", "length_ratio", "plain_cosine")
                        }
                        for mode in MODES
                    },
                    **{
                        figure: study.interval([entry["arms"][name][figure] for entry in each])
                        for figure in ("stale_kl", "stale_ess", "stale_clip_frac")
                    },
                }
                for name in each[0]["arms"]
            },
        }
    return result


def over_seeds(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean and interval of the seeds' values; None if one of them has none."""
    return None if None in values else study.interval([value for value in values if value is not None])


def table(rates: dict[str, Any]) -> str:
    lines = [
        "| learning rate | sampled by | POIS cosine | length ratio | SAIS cosine | length ratio | stale KL | stale ESS |",
        "|---" * 8 + "|",
    ]
    for rate, entry in rates.items():
        for name, arm in entry["arms"].items():
            values = [arm[mode][figure] for mode in MODES for figure in ("cosine", "length_ratio")]
            cells = ["-" if value is None else study.cell(value) for value in values]
            cells += [f"{arm['stale_kl']['mean']:.4f}", f"{arm['stale_ess']['mean']:.3f}"]
            lines.append(f"| {rate} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]], rates: dict[str, Any], path: Path) -> None:
    """Draw cosine and length ratio by age, and the cosine against the divergence that the alarm watches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trl_ulorl.diagnostics import MAX_STALE_KL

    picture, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for color, (rate, entry) in enumerate(rates.items()):
        names = [name for name in entry["arms"] if name.startswith("age")]
        ages = [int(name.split()[1]) for name in names]
        for mode, style in zip(MODES, ("-", "--"), strict=True):
            for axis, figure in zip(axes, ("cosine", "length_ratio"), strict=False):
                clear = [(age, entry["arms"][name][mode][figure]) for age, name in zip(ages, names, strict=True)]
                clear = [(age, point) for age, point in clear if point is not None]
                points = [point for _, point in clear]
                values = {"x": [age for age, _ in clear], "mean": [point["mean"] for point in points]}
                if points and points[0]["low"] is not None:
                    values |= {bound: [point[bound] for point in points] for bound in ("low", "high")}
                study.draw_line(axis, values, f"{mode.upper()}, learning rate {rate}", f"C{color}")
                axis.lines[-1].set_linestyle(style)
        for mode, marker in zip(MODES, "ox", strict=True):
            each = [
                arm
                for one in found
                if f"{one['learning_rate']:g}" == rate
                for arm in one["arms"].values()
                if arm[mode]["cosine"] is not None
            ]
            axes[2].scatter(
                [max(arm["stale_kl"], 1e-6) for arm in each],
                [arm[mode]["cosine"] for arm in each],
                color=f"C{color}",
                marker=marker,
            )
    axes[2].axvline(MAX_STALE_KL, color="black", linestyle="--", label="drift alarm")
    axes[2].set(xscale="log", xlabel="stale KL (nats per token)", ylabel="cosine with the true gradient")
    axes[0].set(xlabel="age (updates)", ylabel="cosine with the true gradient")
    axes[1].set(xlabel="age (updates)", ylabel="length / the true gradient's")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    axes[2].legend(fontsize="small")
    picture.savefig(path, dpi=80)
    plt.close(picture)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)


def main() -> None:
    chosen = study.options(__doc__, add_options)
    found = measured(chosen)
    rates = summary(found)
    print(table(rates))
    study.save("pois_bias", {"learning_rates": rates}, chosen, lambda path: draw(found, rates, path))


if __name__ == "__main__":
    main()
