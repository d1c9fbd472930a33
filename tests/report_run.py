"""A run's folder as training leaves it, of any size, made from a seed without a model."""

import json

import numpy as np

from trl_ulorl.report.run import OUTCOMES

SIGMA = 0.2
STAGES = ("exact", "numeric", "symbolic")


def logged_steps(num_steps, *, every=1, seed=0):
    """Entries as the trainer logs them."""
    generator = np.random.default_rng(seed)
    history = []
    for step in range(every, num_steps + 1, every):
        noise = generator.normal(0, 0.02, size=8)
        share = step / num_steps
        history.append(
            {
                "loss": float(noise[0]),
                "grad_norm": 0.5 + float(noise[1]),
                "accuracy": float(np.clip(0.4 + 0.3 * share + noise[2], 0, 1)),
                "entropy": float(0.4 - 0.2 * share + noise[3]),
                "dmmpts/masked_frac": 0.3 + float(noise[4]),
                "dmmpts/low_entropy_frac": 0.5,
                "dmmpts/sigma": SIGMA,
                "rollout/rounds": 1.0,
                "rollout/completed_length_mean": 100 + 50 * share,
                "completions/mean_length": 90 + 50 * share,
                "completions/max_length": 400.0,
                "rollout/truncated_frac": 0.05,
                "completions/clipped_ratio": 0.02,
                "rollout/age_mean": 1.5,
                "rollout/unfinished_groups": 10.0,
                "rollout/ready_groups": 4.0,
                "rollout/oldest_group_age": 3.0,
                "rollout/filled_groups": 0.0,
                "importance/stale_kl": 0.01,
                "importance/stale_clip_frac": 0.02,
                "importance/kl_age_0": 1e-6,
                "importance/kl_age_1": 0.01,
                "importance/kl_age_2+": 0.02,
                "importance/ess_age_1": 0.99,
                "rollout/decode_seconds": 6.0,
                "rollout/score_seconds": 0.5,
                "rollout/exchange_seconds": 0.25,
                "step_time": 10.0,
                "step": step,
            }
        )
    return history


def closed_groups(num_groups, *, per_step=4, num_generations=4, seed=0):
    """Records as `rollouts.jsonl` holds them: every third group is filtered."""
    generator = np.random.default_rng(seed)
    records = []
    for group in range(num_groups):
        left = group // per_step
        rollouts = []
        for _ in range(num_generations):
            count = int(min(generator.integers(1, 5), left + 1))
            last = int(generator.integers(1, 65))
            versions = range(left - count + 1, left + 1)
            segments = [[version, 64] for version in versions[:-1]] + [[left, last]]
            is_cut = count == 4 and last == 64
            reward = 0.0 if is_cut else float(generator.integers(0, 2))
            stage = {} if is_cut else {"stage": STAGES[int(generator.integers(0, 3))]}
            finish = "length" if is_cut else "eos"
            rollouts.append({"finish": finish, "segments": segments, "rewards": [reward], **stage})
        outcome = OUTCOMES[1] if group % 3 == 2 else OUTCOMES[0]
        admitted = min(version for rollout in rollouts for version, _ in rollout["segments"])
        record = {"group": group, "row": group, "admitted": admitted, "left": left, "outcome": outcome}
        records.append({**record, "rollouts": rollouts})
    return records


def sample(left, text):
    """One entry of `_samples.json`."""
    segments = [
        {"version": left - 1, "tokens": 64, "parts": [text[:10], 40, text[10:]]},
        {"version": left, "tokens": 3, "parts": [" the end"]},
    ]
    rollout = {"finish": "eos", "rewards": [1.0], "stage": "exact", "extracted": "4", "segments": segments}
    sample = {"group": left, "row": 7, "left": left, "question": "2+2=", "prompt": "<user>2+2=", "reference": "4"}
    return {**sample, "rollouts": [rollout]}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_run(folder, *, num_steps=30, num_groups=120, texts=("so 2+2 is 4",), every=1, max_steps=None):
    """Write a whole run and return its log and its records."""
    folder.mkdir(parents=True, exist_ok=True)
    history, records = logged_steps(num_steps, every=every), closed_groups(num_groups)
    write_lines(folder / "metrics.jsonl", history)
    write_lines(folder / "rollouts.jsonl", records)
    tokens = {name: 0 for name in OUTCOMES}
    groups = {name: sum(record["outcome"] == name for record in records) for name in OUTCOMES}
    for record in records:
        tokens[record["outcome"]] += sum(n for rollout in record["rollouts"] for _, n in rollout["segments"])
    ledger = {
        "groups": {"admitted": num_groups + 3, **groups, "ready": 1, "unfinished": 2},
        "tokens": {"generated": sum(tokens.values()) + 500, **tokens, "held": 500},
    }
    settings = {"max_completion_length": 256, "num_segments": 4, "importance_mode": "pois", "dmmpts": {"sigma": SIGMA}}
    run = {
        "model": "Qwen/Qwen3-4B",
        "rows": 1000,
        "reward_functions": ["verifier_reward"],
        "correctness": "verifier_reward",
        "num_processes": 1,
        "max_steps": max_steps or num_steps,
        "batches_per_step": 1.0,
        "updates_per_batch": 1,
        "versions": {"python": "3.12", "trl": "1.16.0"},
        "settings": settings,
        "begun_at_step": 0,
        "ended_at_step": num_steps,
        "ledger": ledger,
    }
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    samples = [sample(left + 1, text) for left, text in enumerate(texts)]
    (folder / "_samples.json").write_text(json.dumps({"every": 1, "samples": samples}), encoding="utf-8")
    return history, records
