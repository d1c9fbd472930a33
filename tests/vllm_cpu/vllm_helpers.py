"""What the tests that start vLLM share: the embedded model in a trainer, and the comparison of both forward passes."""

import importlib.util
import os

import numpy as np
import pytest
import torch
from transformers import ProgressCallback, TrainerCallback

from trl_ulorl import UloRLConfig, UloRLTrainer, VerifierReward
from trl_ulorl.data.arithmetic import arithmetic_dataset, embedded_model_path
from trl_ulorl.rollout.engine import DecodeRequest

# The folder is not called `vllm`: on the search path that would be a package of this name, which TRL then believes in.
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: use `make test-vllm`"),
]
TOLERANCE = 2e-3  # between vLLM's log-probs and the trainer's, in float32
BLOCK = 128  # tokens of a block of vLLM's key-value cache on a CPU; only whole blocks are reused


def environment_of_a_process():
    """Return the environment for a process of its own, without what TRL has left there for the engine in this one."""
    of_this_one = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in of_this_one}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def make_trainer(tmp_path, **overrides):
    trainer_arguments = {name: overrides.pop(name) for name in ("peft_config",) if name in overrides}
    values = {
        "output_dir": str(tmp_path),
        "use_vllm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 64,
        "num_segments": 4,
        "learning_rate": 2e-4,
        "max_steps": 5,
        "logging_steps": 1,
    }
    trainer = UloRLTrainer(
        embedded_model_path(),
        VerifierReward(),
        UloRLConfig(**{**values, **overrides}),
        arithmetic_dataset(256, seed=0, split="train"),
        eval_dataset=arithmetic_dataset(8, seed=0, split="test"),
        **trainer_arguments,
    )
    trainer.remove_callback(ProgressCallback)
    return trainer


def make_requests(trainer, count=16, max_new_tokens=64):
    """Make short and long requests; the prefixes of the long ones fill two blocks of vLLM's cache."""
    prompts = trainer._tokenized(list(trainer.train_dataset["prompt"][:count]))
    long = np.concatenate(prompts)
    rows = [long[start : start + 2 * BLOCK + 20] if start % 2 else prompts[start] for start in range(count)]
    return [DecodeRequest(np.asarray(ids, dtype=np.int32), max_new_tokens) for ids in rows]


@torch.no_grad()
def largest_gap(trainer, requests, segments):
    """Return the largest difference between the log-probs recorded at sampling and those of the trainer's model."""
    gaps = []
    for segment in segments:
        prefix = requests[segment.request_index].token_ids
        ids = torch.from_numpy(np.concatenate([prefix, segment.token_ids]).astype(np.int64))[None]
        logps = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(segment.token_ids)
        )[0]
        gaps.append(np.abs(logps[0].numpy() - segment.per_token_logps).max())
    return float(max(gaps))


def gaps_after_updates(trainer):
    """Train, decode the same requests after each update, and return the largest gap of each time."""
    requests, gaps = make_requests(trainer), []

    class Measure(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            gaps.append(largest_gap(trainer, requests, list(trainer.rollout_engine.decode(requests))))

    measure = Measure()
    trainer.add_callback(measure)
    try:
        trainer.train()
    finally:
        trainer.remove_callback(measure)
    return gaps
