"""Train for a few steps on every rank with an engine in each and write what it ended with; started from test_colocated_ranks.py."""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import TrainerCallback
from vllm_helpers import gaps_after_updates, make_trainer


class DrawUnevenly(TrainerCallback):
    """Moves torch's generator on by a different amount on each rank, as dropout may."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.rand(1 + args.process_index)


def main(folder: Path, overrides: dict) -> None:
    trainer = make_trainer(folder, ddp_backend="gloo", max_steps=2, **overrides)
    trainer.add_callback(DrawUnevenly())
    gaps = gaps_after_updates(trainer)
    result = {
        "gaps": gaps,
        "ledger": trainer.ledger(),
        "parameters": [value.double().sum().item() for value in trainer.model.parameters()],
        "num_sequences": trainer.vllm_generation.max_num_seqs,
        "unfinished": [
            rollout.completion_ids.tolist()
            for group in trainer._collector.unfinished.groups
            for rollout in group.rollouts
        ],
    }
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
