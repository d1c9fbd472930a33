"""Train a judge that says whether two short answers are the same, for the generative stage of the verifier.

Without arguments the embedded model is trained on a CPU, in minutes:

    python examples/train_verifier.py

On a GPU, a model from the Hub:

    accelerate launch examples/train_verifier.py --model Qwen/Qwen3-0.6B --output outputs/verifier \
        --steps 500 --learning-rate 1e-5 --batch-size 32

The pairs are made up: numbers, fractions, percentages, units, number words and simple expressions, half of them equal by
construction and half different by little. A pair is held out if a hash of its text says so, so none is trained on. The
result is a plain model; use it with

    GenerativeVerifier(TransformersModel("outputs/verifier"), instructions="")

and with the default instructions if it came from the Hub.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.rewards.judge import INSTRUCTIONS, VERDICTS, GenerativeVerifier, judge_messages
from trl_ulorl.rewards.judge_models import TransformersModel

Example = tuple[str, str, bool]
"""Two answers, and whether they are the same."""
WORDS = {verdict: word for word, verdict in VERDICTS.items()}
HELD_OUT_ONE_IN = 8

# ------------------------------------------------------------------------------------------------------------ the pairs

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
SMALL += ["seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
UNITS = (("mm", "cm", 10), ("cm", "m", 100), ("g", "kg", 1000))
SHARES = tuple(sorted({Fraction(n, d) for d in (2, 4, 5, 10) for n in range(1, 2 * d)}))


def in_words(number: int) -> str:
    """Spell a number below a hundred."""
    if number < 20:
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")


def decimal(value: Fraction) -> str:
    """Write a value whose decimals end."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def share(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Fractions, decimals and percentages."""
    value = rng.choice(SHARES)
    other = value if equal else rng.choice([each for each in SHARES if each != value])
    return spell_share(value, rng), spell_share(other, rng)


def spell_share(value: Fraction, rng: random.Random) -> str:
    n, d = value.numerator, value.denominator
    return rng.choice(
        [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", f"{2 * n}/{2 * d}", decimal(value), f"{decimal(100 * value)}%"]
    )


def word(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Number words against digits."""
    number = rng.randint(0, 99)
    near = [number // 10 * 10 + rng.randint(0, 9), rng.randint(0, 9) * 10 + number % 10, int(str(number)[::-1])]
    other = number if equal else rng.choice([each for each in near if each != number] or [number + 1])
    return in_words(number), str(other)


def unit(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Quantities in two units of one kind."""
    small, large, factor = rng.choice(UNITS)
    amount = rng.randint(1, 99)
    converted = Fraction(amount, factor)
    near = [(converted * 10, large), (Fraction(amount), large), (converted / 10, large), (converted, small)]
    other, name = (converted, large) if equal else rng.choice([*near, (converted + Fraction(1, factor), large)])
    gap = rng.choice(["", " "])
    return f"{amount}{gap}{small}", f"{decimal(other)}{gap}{name}"


def number(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Whole numbers with and without a separator."""
    digits = [str(rng.randint(1, 9)) for _ in range(4)]
    other = list(digits)
    if not equal:
        place = rng.randrange(4)
        other[place] = str(rng.choice([digit for digit in range(1, 10) if str(digit) != digits[place]]))
    return f"{digits[0]},{''.join(digits[1:])}", "".join(other)


def expression(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Terms in another order."""
    letter, a, b = rng.choice("xyn"), rng.randint(2, 9), rng.randint(1, 9)
    c, d = (a, b) if equal else rng.choice([(a, b % 9 + 1), (a % 8 + 2, b), (b, a) if a != b else (a, b % 9 + 1)])
    return rng.choice(
        [
            (f"{a}{letter}+{b}", f"{d}+{c}{letter}"),
            (f"{a}{letter}-{b}", f"-{d}+{c}{letter}"),
            (f"{letter}^{a}+{b}", f"{d}+{letter}^{c}"),
        ]
    )


FAMILIES: tuple[Callable[[random.Random, bool], tuple[str, str]], ...] = (share, word, unit, number, expression)


def draw_examples(count: int, *, seed: int, held_out: bool) -> list[Example]:
    """Draw pairs of one side of the split, as many equal as different ones; the held-out ones are distinct."""
    rng = random.Random(seed)
    examples: dict[tuple[int, Example], None] = {}
    while len(examples) < count:
        equal = len(examples) % 2 == 0
        pair = rng.choice(FAMILIES)(rng, equal)
        digest = hashlib.sha256(json.dumps(sorted(pair)).encode()).digest()
        if (digest[0] % HELD_OUT_ONE_IN == 0) == held_out:
            first, second = rng.sample(pair, 2)
            examples[0 if held_out else len(examples), (first, second, equal)] = None
    return [example for _, example in examples]


# --------------------------------------------------------------------------------------------------- training and use


def as_conversations(examples: list[Example], instructions: str) -> Dataset:
    """Rows of TRL's prompt-completion form, in which the loss is taken on the completion only."""
    return Dataset.from_list(
        [
            {
                "prompt": judge_messages(first, second, instructions),
                "completion": [{"role": "assistant", "content": WORDS[equal]}],
            }
            for first, second, equal in examples
        ]
    )


def measure(judge: GenerativeVerifier, examples: list[Example]) -> dict[str, float]:
    """Share of right verdicts with its standard error, and of pairs without a verdict, which count as not right."""
    verdicts = judge.judge([(first, second) for first, second, _ in examples])
    right = sum(verdict is equal for verdict, (_, _, equal) in zip(verdicts, examples, strict=True)) / len(examples)
    return {
        "accuracy": right,
        "standard_error": math.sqrt(right * (1 - right) / len(examples)),
        "undecided_frac": verdicts.count(None) / len(verdicts),
        "false_positive_frac": sum(
            verdict is True and not equal for verdict, (_, _, equal) in zip(verdicts, examples, strict=True)
        )
        / len(examples),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a judge of short answers for the verifier's generative stage.")
    parser.add_argument("--model", default=None, help="a Hub name or folder; by default the embedded model")
    parser.add_argument("--output", type=Path, default=Path("outputs/verifier"), help="folder for model and summary")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per step and device")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate; 1e-5 for a Hub model")
    parser.add_argument("--eval-pairs", type=int, default=512, help="held-out pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of pairs and training")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    name = arguments.model or embedded_model_path()
    # So small a model learns the task from the pairs alone, and a long instruction only makes it slow.
    instructions = INSTRUCTIONS if arguments.model else ""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    has_accelerator = torch.accelerator.is_available()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(arguments.output),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(arguments.steps // 20, 1),
            seed=arguments.seed,
            use_cpu=not has_accelerator,
            bf16=has_accelerator,
            gradient_checkpointing=has_accelerator,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=as_conversations(
            draw_examples(arguments.steps * arguments.batch_size, seed=arguments.seed, held_out=False), instructions
        ),
    )
    held_out = draw_examples(arguments.eval_pairs, seed=0, held_out=True)

    def judge_of(model: object) -> GenerativeVerifier:
        return GenerativeVerifier(
            TransformersModel(model, tokenizer), instructions=instructions, max_pairs_per_step=len(held_out)
        )

    before = measure(judge_of(model), held_out)
    start = time.perf_counter()
    trainer.train()
    train_seconds = time.perf_counter() - start
    trainer.save_model()
    if not trainer.accelerator.is_main_process:
        return
    after = measure(judge_of(arguments.output), held_out)
    summary = {"train_seconds": round(train_seconds, 1), "instructions": bool(instructions)}
    summary |= {"before": before, "after": after}
    (arguments.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for moment, figures in (("before", before), ("after", after)):
        print(
            f"{moment:6}  {figures['accuracy']:6.1%} right (standard error {figures['standard_error']:.1%}), "
            f"{figures['undecided_frac']:.1%} without a verdict, {figures['false_positive_frac']:.1%} wrongly equal"
        )
    print(f"Saved to {arguments.output}: the model and summary.json")


if __name__ == "__main__":
    main()
