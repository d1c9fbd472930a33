"""Train with UloRL: from the demo on a CPU to the paper's runs on Qwen3.

Without arguments it trains the embedded model on the embedded arithmetic task (examples/configs/demo.yaml):

    python examples/train_qwen3.py
    accelerate launch examples/train_qwen3.py

One of the paper's settings (examples/configs/):

    accelerate launch --config_file examples/accelerate_configs/zero3.yaml \
        examples/train_qwen3.py --config examples/configs/qwen3_4b_128k.yaml

`--engine vllm` decodes with vLLM in the same processes, where it is installed.

Your own data and reward, with rows of `prompt` (or `problem`, `question`) and the columns that the reward reads, such as
{"prompt": "What is 3 + 5?", "answer": "8"}; a text becomes a user message where the tokenizer has a chat template:

    accelerate launch examples/train_qwen3.py --model_name_or_path Qwen/Qwen3-4B --output_dir outputs/mine \
        --dataset_name mine.jsonl --reward my_rewards:my_reward \
        --max_completion_length 16384 --num_segments 4 --gradient_accumulation_steps 16

`--resume_from_checkpoint True` goes on from the newest checkpoint in `output_dir`, a path from that one.

`trl-ulorl train` does the same without a checkout. What both do, from the options to the saved model, is
trl_ulorl/cli/training.py; its heart is the trainer, which a script of your own builds like this:

    trainer = UloRLTrainer(
        model="Qwen/Qwen3-4B",
        reward_funcs=VerifierReward(),
        args=UloRLConfig(output_dir="outputs/mine", max_completion_length=8192, num_segments=4),
        train_dataset=rows,  # `prompt` and `answer`
    )
    trainer.add_callback(EvaluationCallback(trainer, held_out, k=4, reward=VerifierReward(), every_steps=50))
    trainer.train()
    trainer.save_model()
"""

from __future__ import annotations

import os

# Before torch starts its threads: where another process wants a core, threads that spin while they wait slow a small
# model down twentyfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from pathlib import Path

from trl_ulorl.cli.training import main

DEMO_CONFIG = Path(__file__).parent / "configs" / "demo.yaml"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not {"--config", "--model_name_or_path"} & {argument.partition("=")[0] for argument in arguments}:
        arguments = ["--config", str(DEMO_CONFIG), *arguments]
    sys.exit(main(arguments))
