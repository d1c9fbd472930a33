"""Train with an evaluation callback on every rank; started by torchrun from test_evaluation.py."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import make_dataset
from helpers import length_reward, make_trainer

from trl_ulorl.evaluation import EvaluationCallback


def main(folder: Path, fails_on_rank: int | None) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(folder, ddp_backend="gloo", num_segments=2)
    rank = trainer.accelerator.process_index

    def verdict(completions, **kwargs):
        return [0.5] if rank == fails_on_rank else length_reward(completions)

    # Five problems on two ranks: their shares are uneven.
    problems = make_dataset(5)
    trainer.add_callback(EvaluationCallback(trainer, problems, k=2, reward=verdict, every_steps=1, at_ends=True))
    error = None
    try:
        trainer.train()
    except (ValueError, RuntimeError) as failure:
        error = str(failure)
    history = [entry for entry in trainer.state.log_history if "eval_avg_at_k" in entry]
    (folder / f"rank{rank}.json").write_text(json.dumps({"history": history, "error": error}))
    trainer.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
