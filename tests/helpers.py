"""What the trainer tests share: an engine that hands out prepared completions, and short ways to build trainers."""

from collections import Counter
from pathlib import Path

import numpy as np
from conftest import make_dataset, make_model, make_tokenizer
from transformers import ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from trl_ulorl import UloRLConfig, UloRLTrainer, microbatches
from trl_ulorl.rollout.engine import DecodedSegment

EOS = 1


def prepared_completion(prompt_ids, serial, scale):
    """Make the `serial`-th completion of a prompt, of 2 to `scale + 3` tokens, from the two alone."""
    rng = np.random.default_rng([*map(int, prompt_ids), serial])
    length = int(rng.integers(2, scale + 4))
    ids = rng.integers(4, 20, size=length)
    ids[-1] = EOS
    return ids


class PreparedEngine:
    """Continues each request with its prepared completion, 'sampled' with the log-prob `logp` throughout."""

    def __init__(self, scale, logp=-1.0):
        self.scale = scale
        self.logp = logp
        self.plans = {}
        self.serials = Counter()
        self.num_calls = 0

    def decode(self, requests):
        self.num_calls += 1
        for index, request in enumerate(requests):
            ids = tuple(map(int, request.token_ids))
            plan = self._plan(ids)
            done = len(ids) - plan["prompt_length"]
            new = plan["ids"][done : done + request.max_new_tokens]
            self.plans.setdefault((*ids, *map(int, new)), []).append(plan)
            yield DecodedSegment(index, new, np.full(len(new), self.logp, np.float32), bool(new[-1] == EOS))

    def _plan(self, ids):
        if self.plans.get(ids):
            return self.plans[ids].pop(0)
        serial = self.serials[ids]
        self.serials[ids] += 1
        return {"prompt_length": len(ids), "ids": prepared_completion(ids, serial, self.scale)}


class ScriptedEngine:
    """Continues each request with its prepared completion, known from the prompt and the place in the group alone.

    It keeps nothing between calls: ranks of any number, and a resumed run, decode the same. A prompt must not be in two
    groups at a time.

    Args:
        num_generations: Rollouts of a group.
        scale: As in `prepared_completion`.
    """

    PROMPT_END = 3  # <assistant>

    def __init__(self, num_generations, scale):
        self.num_generations = num_generations
        self.scale = scale

    def decode(self, requests):
        taken = Counter()
        for index, request in enumerate(requests):
            ids = request.token_ids
            prompt_length = int(np.flatnonzero(ids == self.PROMPT_END)[-1]) + 1
            key, done = tuple(map(int, ids)), len(ids) - prompt_length
            plans = [
                prepared_completion(ids[:prompt_length], serial, self.scale) for serial in range(self.num_generations)
            ]
            plan = [plan for plan in plans if np.array_equal(plan[:done], ids[prompt_length:])][taken[key]]
            taken[key] += 1
            new = plan[done : done + request.max_new_tokens]
            logps = np.asarray(-2.5 - 0.03 * new, np.float32)  # near those of the untrained model
            yield DecodedSegment(index, new, logps, bool(new[-1] == EOS))


def leave_padding(monkeypatch):
    """Make micro-batches TRL's again: rows in their order, every column kept."""

    def in_order(lengths, num_micro_batches):
        size = len(lengths) // num_micro_batches
        return [list(range(start, start + size)) for start in range(0, len(lengths), size)]

    monkeypatch.setattr(microbatches, "dealt_rows", in_order)
    monkeypatch.setattr(microbatches, "cut", lambda batch, **kwargs: batch)


def length_reward(completions, **kwargs):
    return [float(len(c[0]["content"] if isinstance(c, list) else c) % 2) for c in completions]


def arguments(tmp_path, cls=UloRLConfig, **overrides):
    values = {
        "output_dir": str(Path(tmp_path) / "run"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "temperature": 0.85,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
    }
    return cls(**{**values, **overrides})


def make_trainer(
    tmp_path,
    reward_funcs=length_reward,
    *,
    engine=None,
    dataset=None,
    model=None,
    reward_processing_classes=None,
    **overrides,
):
    args = arguments(tmp_path, **overrides)
    trainer = UloRLTrainer(
        model or make_model(),
        reward_funcs,
        args,
        dataset or make_dataset(),
        processing_class=make_tokenizer(),
        reward_processing_classes=reward_processing_classes,
    )
    trainer.remove_callback(ProgressCallback)
    if engine is not None:
        trainer._collector.engine = engine
    return trainer


class StockTrainer(GRPOTrainer):
    """Stock GRPO on prepared completions."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        serials = Counter()
        completions = []
        for ids in map(tuple, prompt_ids):
            serial = self.seen[ids] + serials[ids]
            completion = prepared_completion(ids, serial, self.max_completion_length)
            completions.append(completion[: self.max_completion_length].tolist())
            serials[ids] += 1
        self.seen.update(serials)
        return completions, None


def make_stock_trainer(tmp_path, reward_funcs=length_reward, *, dataset=None, model=None, **overrides):
    args = arguments(tmp_path, cls=GRPOConfig, loss_type="dapo", **overrides)
    trainer = StockTrainer(
        model or make_model(), reward_funcs, args, dataset or make_dataset(), processing_class=make_tokenizer()
    )
    trainer.seen = Counter()
    trainer.remove_callback(ProgressCallback)
    return trainer


def parameters(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
