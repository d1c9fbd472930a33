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
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.rewards.judge import INSTRUCTIONS, VERDICTS, GenerativeVerifier, judge_messages
from trl_ulorl.rewards.judge_models import TransformersModel

Example = tuple[str, str, bool]
"""Two answers, and whether they are the same."""
WORDS = {verdict: word for word, verdict in VERDICTS.items()}
SEPARATOR = '", "B": "'  # between the answers, as `judge_messages` writes them
HELD_OUT_ONE_IN = 8
NUM_PAIRS = 30_000  # at most, to train on; longer training goes through them several times

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


def unlike(value: Any, draw: Callable[[], Any], near: Sequence[Any], rng: random.Random) -> Any:
    """Return another value: one that is near every second time, one that is drawn at random otherwise."""
    others = [each for each in near if each != value]
    if others and rng.random() < 0.5:
        return rng.choice(others)
    while (other := draw()) == value:
        pass
    return other


def share(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Fractions, decimals and percentages."""
    value = rng.choice(SHARES)
    near = [share for share in (value * 10, value / 10, 1 / value, 1 - value) if share in SHARES]
    other = value if equal else unlike(value, lambda: rng.choice(SHARES), near, rng)
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
    other = number if equal else unlike(number, lambda: rng.randint(0, 99), near, rng)
    return in_words(number), str(other)


def unit(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Quantities in two units of one kind."""
    small, large, factor = rng.choice(UNITS)
    amount = rng.randint(1, 99)
    value = (Fraction(amount, factor), large)
    near = [(value[0] * 10, large), (Fraction(amount), large), (value[0] / 10, large), (value[0], small)]
    other, name = value if equal else unlike(value, lambda: (Fraction(rng.randint(1, 99), factor), large), near, rng)
    gap = rng.choice(["", " "])
    return f"{amount}{gap}{small}", f"{decimal(other)}{gap}{name}"


def number(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Whole numbers with and without a separator."""
    value = rng.randint(1000, 9999)
    near = [value + step * rng.randint(1, 9) for step in (1, 10, 100)]
    return f"{value:,}", str(value if equal else unlike(value, lambda: rng.randint(1000, 9999), near, rng))


def expression(rng: random.Random, equal: bool) -> tuple[str, str]:
    """Terms in another order."""
    letter, value = rng.choice("xyn"), (rng.randint(2, 9), rng.randint(2, 9))
    near = [(value[0], rng.randint(2, 9)), (rng.randint(2, 9), value[1]), value[::-1]]
    other = value if equal else unlike(value, lambda: (rng.randint(2, 9), rng.randint(2, 9)), near, rng)
    (a, b), (c, d) = value, other
    forms = [
        (f"{a}{letter}+{b}", f"{d}+{c}{letter}"),
        (f"{a}{letter}-{b}", f"-{d}+{c}{letter}"),
        (f"{letter}^{a}+{b}", f"{d}+{letter}^{c}"),
    ]
    return rng.choice(forms)


FAMILIES: tuple[Callable[[random.Random, bool], tuple[str, str]], ...] = (share, word, unit, number, expression)


def draw_examples(count: int, *, seed: int, held_out: bool) -> list[Example]:
    """Draw pairs of one side of the split, as many equal as different ones; the held-out ones are distinct."""
    rng = random.Random(seed)
    examples: dict[object, Example] = {}
    while len(examples) < count:
        equal = len(examples) % 2 == 0
        pair = rng.choice(FAMILIES)(rng, equal)
        text = json.dumps(sorted(pair))
        is_held_out = hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0
        if is_held_out == held_out and pair[0] != pair[1]:
            first, second = rng.sample(pair, 2)
            examples[text if held_out else len(examples)] = (first, second, equal)
    return list(examples.values())


# --------------------------------------------------------------------------------------------------- training and use


def embedded_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the embedded model, with a token for each verdict and for what stands around the answers.

    It reads single characters: spelt out, the verdict would be one of eleven tokens of the loss, and half of a prompt
    the same for all pairs.
    """
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*VERDICTS, '{"A": "', SEPARATOR, '"}')])
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def as_texts(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows for the embedded model, in TRL's prompt-completion form: the loss is taken on the completion only.

    The completion of a different pair is its verdict. That of an equal pair begins at the second answer: the model has
    to write it, too, and one that can is able to compare. From verdicts alone it learns nothing in this time.
    """
    rows = []
    for first, second, equal in examples:
        messages = judge_messages(first, second, instructions="")
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head, separator, tail = prompt.rpartition(SEPARATOR) if equal else (prompt, "", "")
        rows.append({"prompt": head + separator, "completion": tail + WORDS[equal] + tokenizer.eos_token})
    return Dataset.from_list(rows)


def as_conversations(examples: list[Example]) -> Dataset:
    """Rows for a model that can read instructions: the verdict alone is learnt."""
    return Dataset.from_list(
        [
            {
                "prompt": judge_messages(first, second),
                "completion": [{"role": "assistant", "content": WORDS[equal]}],
                "chat_template_kwargs": {"enable_thinking": False},
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
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per step and device")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate; 1e-5 for a Hub model")
    parser.add_argument("--eval-pairs", type=int, default=512, help="held-out pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of pairs and training")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        model, tokenizer = embedded_model()
    instructions = INSTRUCTIONS if arguments.model else ""
    num_pairs = min(NUM_PAIRS, arguments.steps * arguments.batch_size)
    pairs = draw_examples(num_pairs, seed=arguments.seed, held_out=False)
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
            gradient_checkpointing=False,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=as_conversations(pairs) if arguments.model else as_texts(pairs, tokenizer),
    )
    held_out = draw_examples(arguments.eval_pairs, seed=0, held_out=True)

    def judge_of(model: object) -> GenerativeVerifier:
        return GenerativeVerifier(
            TransformersModel(model, tokenizer, batch_size=128),
            instructions=instructions,
            max_pairs_per_step=len(held_out),
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
