"""One rollout of 131,072 tokens from its first segment to the update, on a CPU: what it takes in time and memory.

A tiny model (one layer, 8,000 parameters, made here) decodes a group of two rollouts by the trainer's own engine. The one
is as long as the paper's longest, 8 segments of 16,384 tokens; the other one is short and waits for it. Each round admits
one short group more, so that a batch is trained on after every round but the first, and the long rollout's segments come
from seven policies. In its fifth segment, after 32 tokens, the process kills itself by SIGKILL. A second process resumes from
the checkpoint of the last update, decodes the rest, scores both rollouts with the verifier, and makes the update.

Every token is sampled by the model but the last ones of a rollout, its boxed answer and the end, which a script sets: the
long one's answer is right, its sibling's wrong. The model did not sample these, so the trainer warns that sampled tokens do
not fit the policy. Checked at the end: the length, the segments and their versions, that the prefix in the checkpoint is the
beginning of what was trained on, that the ledger balances, that the weights moved.

Writes outputs/bench/long_rollout.json and prints the same as a table. Eight minutes of one core; `--tokens 2048` shows the
same in a quarter of a minute.

    python benchmarks/long_rollout.py [--tokens 131072] [--kill-at 5] [--output FILE]
"""

import os

# Before anything starts threads: so small a model gains nothing from more than one.
for _name, _value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(_name, _value)

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

SEGMENTS = 8
LOST_TOKENS = 32  # of the segment in which the kill comes
EMBEDDING = 0.5  # of the direction that rules the end token out
MOST_BYTES_BESIDE_TOKENS = 8192  # of a checkpoint's `rollout/`, in which a token takes 8


# ------------------------------------------------------------------------------------------------ in a worker process


def tell(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Tell the seconds of a phase, those on a processor too, and the most memory that the process held in it."""
    forget_peak()
    started, cpu_started = time.perf_counter(), time.process_time()
    yield
    tell_phase(name, time.perf_counter() - started, time.process_time() - cpu_started)


def tell_phase(name: str, seconds: float, cpu_seconds: float) -> None:
    tell("phase", name=name, seconds=seconds, cpu_seconds=cpu_seconds, peak_mib=memory_mib("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_mib(field: str) -> float:
    """Read `VmRSS`, what the process holds, or `VmHWM`, the most that it has held."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def make_model(vocab_size: int, eos: int, pad: int, positions: int) -> Any:
    """Make an untrained model of one layer that never samples the end token.

    All embeddings but that token's have the same first component, which no layer changes. So the last hidden state has it
    too, and the head, which is the embedding, gives the end token a logit far below the others.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    set_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = EMBEDDING
        embeddings[eos, 0] = -20 * EMBEDDING
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    return model


class ScriptedEnds:
    """Decodes with an engine, and ends each rollout at its scripted length with its scripted answer.

    It keeps nothing between calls: a rollout that goes on is the long one.

    Args:
        engine: Decodes.
        long_prompt: Ids of the prompt whose first rollout is the long one.
        long_length: Tokens of it.
        short_lengths: Tokens of the two rollouts of every other group, and of the long one's sibling (the second).
        endings: Ids of the right and of the wrong answer, with the end token.
        kill_at: Tokens of the long rollout from which it decodes `LOST_TOKENS` more, and then kills the process; -1 for never.
    """

    def __init__(self, engine, long_prompt, long_length, short_lengths, endings, kill_at):
        self._engine = engine
        self._long_prompt = long_prompt
        self._long_length = long_length
        self._short_lengths = short_lengths
        self._endings = endings
        self._kill_at = kill_at

    def decode(self, requests):
        import numpy as np

        from trl_ulorl.rollout.engine import DecodedSegment, DecodeRequest

        plans, shortened, new = [], [], Counter()
        num_prompt = len(self._long_prompt)
        for request in requests:
            done = request.token_ids.size - num_prompt  # all prompts are as long
            key = tuple(request.token_ids[:num_prompt].tolist())
            sibling = 0 if done else new[key]
            new[key] += not done
            is_long = key == self._long_prompt and sibling == 0
            left = (self._long_length if is_long else self._short_lengths[sibling]) - done
            ending = self._endings[sibling] if left <= request.max_new_tokens else self._endings[0][:0]
            plans.append((done, is_long, ending))
            budget = min(left, request.max_new_tokens) - len(ending)
            shortened.append(DecodeRequest(request.token_ids, budget))
        long_tokens = max((done for done, is_long, _ in plans if is_long), default=None)
        if long_tokens == self._kill_at:
            for _ in self._engine.decode([replace(each, max_new_tokens=LOST_TOKENS) for each in shortened]):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        name = "decode" if long_tokens is None else f"decode from {long_tokens}"
        with phase(name):
            decoded = list(self._engine.decode(shortened))
        for segment in decoded:
            _, _, ending = plans[segment.request_index]
            if segment.is_stopped:
                raise RuntimeError("The model has sampled the end token, which it was made to leave out.")
            yield DecodedSegment(
                segment.request_index,
                np.concatenate([segment.token_ids, ending]),
                np.concatenate([segment.per_token_logps, np.zeros(len(ending), np.float32)]),  # the script is sure
                is_stopped=len(ending) > 0,
            )


def run_worker(folder: Path, num_tokens: int, kill_at: int | None) -> None:
    """Train to the end, from the newest checkpoint if there is one, and tell of each phase."""
    with phase("start"):
        trainer = make_trainer(folder, num_tokens, kill_at)
    before = [value.detach().clone() for value in trainer.model.parameters()]
    checkpoints = sorted((folder / "run").glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=True if checkpoints else None)
    moved = max(
        float((new.detach() - old).abs().max()) for new, old in zip(trainer.model.parameters(), before, strict=True)
    )
    tell("done", ledger=trainer.ledger(), moved=moved, log=trainer.state.log_history)


def make_trainer(folder: Path, num_tokens: int, kill_at: int | None) -> Any:
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback

    from trl_ulorl import UloRLConfig, UloRLTrainer, VerifierReward
    from trl_ulorl.data.arithmetic import boxed, embedded_model_path

    torch.set_num_threads(1)

    class MeasuredTrainer(UloRLTrainer):
        """Tells how long each phase takes."""

        is_long = False  # whether the batch is the one with the long rollout
        generated_at = 0.0, 0.0

        def _generate_and_score_completions(self, inputs):
            started = time.perf_counter()
            output = super()._generate_and_score_completions(inputs)
            report = self._collector.report
            other = time.perf_counter() - started - report.decode_seconds
            self.is_long = output["completion_ids"].shape[1] == num_tokens
            tell("batch", is_long=self.is_long, other_seconds=other, score_seconds=report.score_seconds)
            self.generated_at = time.perf_counter(), time.process_time()
            forget_peak()
            if self.is_long:
                long_row = int(output["completion_mask"].sum(dim=1).argmax())
                np.save(folder / "trained.npy", output["completion_ids"][long_row].numpy())
            return output

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.generated_at = time.perf_counter(), time.process_time()  # the first one of a batch generates it
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.is_long:
                began, cpu_began = self.generated_at
                tell_phase("forward and backward", time.perf_counter() - began, time.process_time() - cpu_began)
            return loss

        def _save_checkpoint(self, model, trial):
            with phase("save"):
                super()._save_checkpoint(model, trial)

        def _save_rollout(self, output_dir):
            started = time.perf_counter()
            super()._save_rollout(output_dir)
            num_bytes = sum(path.stat().st_size for path in (Path(output_dir) / "rollout").iterdir())
            held = self.ledger()["tokens"]["held"]
            tell("rollout saved", seconds=time.perf_counter() - started, bytes=num_bytes, held=held)

        def _load_optimizer_and_scheduler(self, checkpoint):
            if checkpoint is None:
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            with phase("load"):
                super()._load_optimizer_and_scheduler(checkpoint)
            tell("loaded", held=self.ledger()["tokens"]["held"])

    class MeasuredReward(VerifierReward):
        """Tells how long a long completion takes."""

        def __call__(self, completions, **kwargs):
            started = time.perf_counter()
            rewards = super().__call__(completions, **kwargs)
            lengths = [len(completion[0]["content"]) for completion in completions]
            tell("scored", characters=max(lengths), seconds=time.perf_counter() - started, rewards=rewards)
            return rewards

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path(), padding_side="left")
    rows = [(first, second) for first in range(1, 10) for second in range(1, 10)]
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"{first}+{second}="}] for first, second in rows],
            "answer": ["7"] * len(rows),  # what the script writes
        }
    )
    text = tokenizer.apply_chat_template(dataset[0]["prompt"], tokenize=False, add_generation_prompt=True)
    long_prompt = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    endings = [
        np.array([*tokenizer(boxed(answer), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], np.int32)
        for answer in (7, 8)
    ]
    segment_length = num_tokens // SEGMENTS
    args = UloRLConfig(
        output_dir=str(folder / "run"),
        max_completion_length=num_tokens,
        num_segments=SEGMENTS,
        num_generations=2,
        max_inflight_groups=2,
        per_device_train_batch_size=1,  # rows of unequal length in one micro-batch need a mask of length x length
        gradient_accumulation_steps=2,
        decode_batch_size=1,
        max_steps=SEGMENTS - 1,
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        shuffle_dataset=False,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    positions = num_tokens + len(long_prompt)
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, positions)
    trainer = MeasuredTrainer(model, MeasuredReward(), args, dataset, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    short = min(512, segment_length // 2)
    trainer._collector.engine = ScriptedEnds(
        trainer.rollout_engine,
        long_prompt,
        num_tokens,
        (short, short // 2),
        endings,
        -1 if kill_at is None else (kill_at - 1) * segment_length,
    )
    return trainer


# ------------------------------------------------------------------------------------------------- in the main process


def run(folder: Path, num_tokens: int, kill_at: int | None) -> list[dict[str, Any]]:
    """Run a worker, which is killed in segment `kill_at`, and return what it told."""
    command = [sys.executable, __file__, "--worker", str(folder), "--tokens", str(num_tokens)]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    events = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"event"'):
                continue
            events.append(json.loads(line))
            if events[-1]["event"] == "phase":
                sys.stderr.write("{name}: {seconds:.1f} s, {peak_mib:.0f} MiB\n".format(**events[-1]))
    expected = 0 if kill_at is None else -signal.SIGKILL
    if process.returncode != expected:
        raise SystemExit(
            f"A worker ended with {process.returncode}, not with {int(expected)}: see its messages above."
        )
    return events


def checkpointed_prefix(folder: Path) -> Any:
    """Return the tokens of the long rollout in the newest checkpoint."""
    from safetensors.numpy import load_file

    newest = max((folder / "run").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    rollouts = load_file(newest / "rollout" / "groups.safetensors")
    tokens = load_file(newest / "rollout" / "rank0.safetensors")["token_ids"]
    num_segments = int(rollouts["rank0.num_segments"][0])  # the oldest group's first rollout
    return tokens[: int(rollouts["rank0.segment_length"][:num_segments].sum())]


def measure(folder: Path, num_tokens: int, kill_at: int) -> dict[str, Any]:
    """Run both workers, check what came of it, and return the figures."""
    import numpy as np

    started = time.perf_counter()
    first = run(folder, num_tokens, kill_at)
    prefix = checkpointed_prefix(folder)
    second = run(folder, num_tokens, None)
    seconds = time.perf_counter() - started
    trained = np.load(folder / "trained.npy")
    records = map(json.loads, (folder / "run" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines())
    (record,) = (record for record in records if record["group"] == 0)
    rollout = record["rollouts"][0]
    (done,) = (event for event in second if event["event"] == "done")
    (log,) = (entry for entry in done["log"] if entry.get("step") == SEGMENTS - 1 and "loss" in entry)
    versions = [0, *range(SEGMENTS - 1)]
    checks = {
        "length": len(trained) == num_tokens,
        "segments and their versions": rollout["segments"] == [[v, num_tokens // SEGMENTS] for v in versions],
        "ended by itself, and is right": rollout["finish"] == "eos" and rollout["rewards"] == [1.0],
        "sibling is wrong": record["rollouts"][1]["rewards"] == [0.0],
        "prefix is kept": len(prefix) == (kill_at - 1) * num_tokens // SEGMENTS
        and np.array_equal(prefix, trained[: len(prefix)]),
        "update": log["grad_norm"] > 0 and done["moved"] > 0,
    }
    result = figures(first, second, log, done)
    beside_tokens = result["checkpoint_bytes"] - 8 * result["checkpoint_tokens"]
    checks["checkpoint is small"] = beside_tokens <= MOST_BYTES_BESIDE_TOKENS
    return result | {"tokens": num_tokens, "seconds": seconds, "checks": checks}


def figures(first: list[dict[str, Any]], second: list[dict[str, Any]], log: Any, done: Any) -> dict[str, Any]:
    """Sort what the workers told into a table."""
    both = first + second
    phases = {event["name"]: event for event in both if event["event"] == "phase"}  # the last of each name
    decoded = {name: event for name, event in phases.items() if name.startswith("decode from")}
    saved = [event for event in both if event["event"] == "rollout saved"]
    largest = max(saved, key=lambda event: event["held"])
    (batch,) = (event for event in both if event["event"] == "batch" and event["is_long"])
    scored = max((event for event in both if event["event"] == "scored"), key=lambda event: event["characters"])
    updates = [event for event in both if event["event"] == "phase" and event["name"] == "forward and backward"]
    columns = ("seconds", "cpu_seconds", "peak_mib")
    table = {
        name: {column: event[column] for column in columns}
        for name, event in {**decoded, "save": phases["save"], "load": phases["load"]}.items()
    }
    table["score"] = {"seconds": scored["seconds"], "cpu_seconds": None, "peak_mib": None}
    table["update"] = {
        "seconds": sum(event["seconds"] for event in updates),
        "cpu_seconds": sum(event["cpu_seconds"] for event in updates),
        "peak_mib": max(event["peak_mib"] for event in updates),
    }
    return {
        "phases": table,
        "start_mib": phases["start"]["peak_mib"],
        "decode_seconds": sum(event["seconds"] for event in decoded.values()),
        "rest_of_the_step_seconds": batch["other_seconds"] - batch["score_seconds"],
        "checkpoint_seconds": largest["seconds"],
        "checkpoint_bytes": largest["bytes"],
        "checkpoint_tokens": largest["held"],
        "bytes_per_token": largest["bytes"] / largest["held"],
        "held_after_resume": next(event["held"] for event in second if event["event"] == "loaded"),
        "ledger": done["ledger"],
        "log": log,
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"{'phase':<22}{'seconds':>12}{'on a core':>12}{'peak MiB':>12}")
    for name, row in result["phases"].items():
        cells = [row["seconds"], row["cpu_seconds"], row["peak_mib"]]
        print(f"{name:<22}" + "".join(f"{'' if cell is None else format(cell, '.2f'):>12}" for cell in cells))
    print(f"after the start the process holds {result['start_mib']:.0f} MiB")
    print(f"checkpoint: {result['bytes_per_token']:.3f} bytes per token held, of {result['checkpoint_tokens']:,}")
    print(f"rest of the long batch's step: {result['rest_of_the_step_seconds']:.2f} s")
    print(f"in all: {result['seconds'] / 60:.1f} minutes")
    for name, is_met in result["checks"].items():
        print(f"{'ok    ' if is_met else 'FAILED'} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help=f"of the long rollout, a multiple of {SEGMENTS}")
    parser.add_argument("--kill-at", type=int, default=None, help="the segment in which SIGKILL comes; default: 5")
    parser.add_argument("--folder", type=Path, default=None, help="where to train; default: a temporary folder")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/long_rollout.json"))
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args.worker, args.tokens, args.kill_at)
        return
    kill_at = 5 if args.kill_at is None else args.kill_at
    if args.tokens % SEGMENTS or args.tokens < 64 * SEGMENTS:
        parser.error(f"--tokens ({args.tokens}) must be a multiple of {SEGMENTS}, at least {64 * SEGMENTS}.")
    if not 3 <= kill_at <= SEGMENTS:
        parser.error(f"--kill-at ({kill_at}) must be from 3, before which nothing is saved, to {SEGMENTS}.")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.tokens, kill_at)
    print_table(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not all(result["checks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
