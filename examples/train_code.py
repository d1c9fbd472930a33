"""Train on small programs instead of mathematics: the reward is whether a program passes unit tests that it can't see.

Without arguments the embedded model is first taught to write programs, then trained with UloRL, in minutes on a CPU:

    python examples/train_code.py

With your own model and rows of `prompt`, `function` and `tests`, every option of `trl-ulorl train` is one here too:

    accelerate launch examples/train_code.py --model_name_or_path Qwen/Qwen3-4B --dataset_name mine.jsonl \\
        --output_dir outputs/mine --max_completion_length 8192

    {"prompt": "Write a function `f(a, b)` that adds.", "function": "f", "tests": "[[[1, 2], 3], [[0, -4], -4]]"}

`tests` is JSON: pairs of the arguments of a call and what it must return, compared as Python's `==` does after both went
through JSON. A program is the last fenced block of a completion, or all of it. Programs run in `sandbox.py`'s processes,
which can do nothing but compute; what a program should return stays in this one.

The embedded task and a program for it:

    take a, add b, multiply by 3            def f(a, b):
                                             x = a
                                             x += b
                                             x *= 3
                                             return x

The model starts with a bad habit: half of the programs that it was taught are one hasty line without brackets,
`return a+b*3`, which is wrong wherever a product follows a sum. Only running them tells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_qwen3.py

from sandbox import Job, Sandbox

EXAMPLES = Path(__file__).parent

# ----------------------------------------------------------------------------------------------------------- the reward

SANDBOX = Sandbox()
KINDS = ("returned", "failed", "timeout", "too long", "not run")


def program_reward(
    completions: Sequence[Any],
    function: Sequence[str],
    tests: Sequence[str],
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Return 1 for a program that passes all of its tests, 0 for another, None where it could not be run."""
    expected, jobs = [], []
    for completion, name, text in zip(completions, function, tests, strict=True):
        pairs = json.loads(text)
        code = program_of(completion if isinstance(completion, str) else completion[-1]["content"])
        jobs.append(Job(code, name, [arguments for arguments, _ in pairs]))
        expected.append([value for _, value in pairs])
    outcomes = SANDBOX.run(jobs)
    failures = [outcome.detail for outcome in outcomes if outcome.kind == "not run"]
    if failures:
        sys.stderr.write(f"{len(failures)} of {len(jobs)} programs were not run and get no reward: {failures[0]}\n")
    if log_metric is not None:
        for kind in KINDS:
            share = sum(outcome.kind == kind for outcome in outcomes) / len(outcomes)
            log_metric(f"programs/{kind.replace(' ', '_')}_frac", share)
    return [
        None if outcome.kind == "not run" else float(outcome.kind == "returned" and _equal(outcome.values, values))
        for outcome, values in zip(outcomes, expected, strict=True)
    ]


def program_of(text: str) -> str:
    """Return the last fenced block of a completion, or all of it where there is none."""
    blocks = re.findall(r"^```(?:python|py)?[ \t]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return blocks[-1] if blocks else text


def _equal(values: Any, expected: Any) -> bool:
    try:
        return bool(values == expected)
    except RecursionError:  # lists within lists, thousands deep
        return False


# ------------------------------------------------------------------------------------------------------------- the task

HELD_OUT_ONE_IN = 4
BATCH_SIZE = 32  # of the warm start
NUM_TESTS = 6
OPERATIONS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}
Steps = list[tuple[str, str]]


def draw_steps(rng: random.Random) -> Steps:
    """Draw an operation and its operand for each step; few tasks are long, as few outputs are in reasoning."""
    num_steps = min(2 + int(rng.expovariate(1 / 0.9) ** 1.5), 12)
    operands = ["a", "b", *map(str, range(2, 10))]
    # A sum first, so that there is something that a later product may forget.
    operators = [rng.choice("+-"), *rng.choices("*+-", (3, 1, 1), k=num_steps - 1)]
    return [(operator, rng.choice(operands)) for operator in operators]


def task_of(steps: Steps) -> str:
    """Say in words what the program shall do."""
    return ", ".join(["take a", *(OPERATIONS[operator].format(operand) for operator, operand in steps)])


def careful(steps: Steps) -> str:
    """Write the program step by step."""
    return "\n ".join(["def f(a, b):", "x = a", *(f"x {op}= {operand}" for op, operand in steps), "return x"])


def hasty(steps: Steps) -> str:
    """Write it in one line that leaves the brackets out."""
    return "def f(a, b):\n return a" + "".join(operator + operand for operator, operand in steps)


def tests_of(steps: Steps, rng: random.Random) -> str:
    """Draw arguments, and work out by hand what must come out."""
    tests = []
    for _ in range(NUM_TESTS):
        a, b = rng.sample([*range(-9, -1), *range(2, 10)], 2)
        x = a
        for operator, operand in steps:
            value = int(operand) if operand.isdigit() else {"a": a, "b": b}[operand]
            x = x + value if operator == "+" else x - value if operator == "-" else x * value
        tests.append([[a, b], x])
    return json.dumps(tests)


def is_held_out(task: str) -> bool:
    """Say whether a task is kept for evaluation, by a hash of its text, before any training."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def draw_rows(num_rows: int, rng: random.Random, *, held_out: bool) -> list[dict[str, Any]]:
    """Draw tasks of one split: distinct ones to evaluate on."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < num_rows:
        steps = draw_steps(rng)
        task = task_of(steps)
        if is_held_out(task) != held_out or (held_out and task in seen):
            continue
        seen.add(task)
        rows.append({"prompt": task, "function": "f", "tests": tests_of(steps, rng), "steps": steps})
    return rows


# ------------------------------------------------------------------------------------------------------- the warm start


def demonstration(steps: Steps, rng: random.Random) -> str:
    """Write one of the programs that the model is taught: half of them hasty, and a few with a wrong step."""
    slipping = [
        (rng.choice([each for each in OPERATIONS if each != operator]), operand)
        if rng.random() < 0.05
        else (operator, operand)
        for operator, operand in steps
    ]
    return hasty(slipping) if rng.random() < 0.5 else careful(slipping)


def warm_start(folder: Path, seed: int, num_steps: int) -> None:
    """Teach the embedded model the language of the task, bad habits included."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from trl_ulorl.data.arithmetic import embedded_model_path

    rng = random.Random(seed)
    examples = []
    for row in draw_rows(BATCH_SIZE * num_steps, rng, held_out=False):
        messages = [[{"role": "user", "content": row["prompt"]}]]
        messages += [[{"role": "assistant", "content": demonstration(row["steps"], rng)}]]
        examples.append(dict(zip(("prompt", "completion"), messages, strict=True)))
    trainer = SFTTrainer(
        embedded_model_path(),
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=num_steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=10,
            adam_beta2=0.98,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(examples),
    )
    trainer.train()
    trainer.save_model()


# ------------------------------------------------------------------------------------------------------------- the run


def embedded_run(output: Path, seed: int, warm_start_steps: int) -> list[str]:
    """Make data and model of the embedded task in `output`, if they are not there, and return the options for them."""
    data, model = output / "data", output / "warm_start"
    data.mkdir(parents=True, exist_ok=True)
    for name, num_rows, held_out in (("train", 8192, False), ("test", 256, True)):
        rows = draw_rows(num_rows, random.Random(f"{name} {0 if held_out else seed}"), held_out=held_out)
        lines = [json.dumps({key: row[key] for key in ("prompt", "function", "tests")}) for row in rows]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="ascii")
    if not (model / "model.safetensors").exists():
        print(f"Teaching the embedded model to write programs: {warm_start_steps} steps", flush=True)
        warm_start(model, seed, warm_start_steps)
    options = ["--config", str(EXAMPLES / "configs" / "code.yaml"), "--model_name_or_path", str(model)]
    return [*options, "--dataset_name", str(data / "train.jsonl"), "--eval_dataset_name", str(data / "test.jsonl")]


def main(arguments: list[str]) -> int:
    """Check that programs can be run, then train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", default="outputs/code")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--warm_start_steps", type=int, default=160)
    known, others = parser.parse_known_args(arguments)
    (outcome,) = SANDBOX.run([Job("def f(): return 1", "f", [[]])])
    if outcome.values != [1]:
        sys.stderr.write(
            f"train_code.py: programs can't be run here, so nothing could be rewarded: {outcome.detail}\n"
        )
        return 1
    if not {"--config", "--model_name_or_path"} & {each.partition("=")[0] for each in others}:
        others = [*embedded_run(Path(known.output_dir), known.seed, known.warm_start_steps), *others]
    from trl_ulorl.cli.training import main as train

    options = ["--output_dir", known.output_dir, "--seed", str(known.seed), "--reward", "train_code:program_reward"]
    return train([*others, *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
