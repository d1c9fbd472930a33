"""Train for a few steps on every rank and write what this rank ended with; started by torchrun from test_ranks.py."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import make_dataset, make_model, make_tokenizer
from helpers import arguments, leave_padding, length_reward
from pytest import MonkeyPatch
from transformers import ProgressCallback

from trl_ulorl import UloRLTrainer

OWN = (
    "fails_on_rank",
    "leaves_padding",
    "resume",
    "signal_on_rank",
    "at_step",
    "slow_rank",
)  # not the configuration's


def main(folder: Path, overrides: dict) -> None:
    torch.set_num_threads(1)
    decoded = []

    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        if overrides.get("fails_on_rank") == trainer.accelerator.process_index and len(calls) > 1:
            raise ValueError("this rank's verifier is down")
        return length_reward(completions)

    if overrides.get("leaves_padding"):
        leave_padding(MonkeyPatch())
    settings = {key: value for key, value in overrides.items() if key not in OWN}
    args = arguments(folder, ddp_backend="gloo", **settings)
    trainer = UloRLTrainer(make_model(), reward, args, make_dataset(), processing_class=make_tokenizer())
    trainer.remove_callback(ProgressCallback)
    engine_decode = trainer._collector.engine.decode

    def counting_decode(requests):
        decoded.append(len(requests))
        number, rank = overrides.get("signal_on_rank", (0, None))
        if rank == trainer.accelerator.process_index and trainer.state.global_step == overrides["at_step"]:
            os.kill(os.getpid(), number if not trainer._stop.signal_number else signal.SIGCONT)
        return engine_decode(requests)

    trainer._collector.engine.decode = counting_decode
    trainer.train(resume_from_checkpoint=overrides.get("resume"))
    result = {
        "ledger": trainer.ledger(),
        "decoded": decoded,
        "parameters": [value.double().sum().item() for value in trainer.model.parameters()],
        "history": trainer.state.log_history,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    if trainer.accelerator.process_index == overrides.get("slow_rank"):
        time.sleep(1)
    before = time.monotonic()
    trainer.end()  # a process group that is still up at exit may abort the process
    times = {"before": before, "after": time.monotonic()}
    (folder / f"end{os.environ['RANK']}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
