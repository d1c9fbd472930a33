"""The training runs that the figures share: each in a process of its own, kept as JSON, none made twice.

A run is a *setting*: the demo's configuration, `SMALLER`, an arm's overrides and a seed. It trains with the code that
`trl-ulorl train` runs, and evaluates the trained model with the code that `trl-ulorl eval` runs. What it came to lies in
`outputs/paper/runs/<hash of the setting>.json`, so that figures share runs, and a study that was stopped goes on where it
was. A run uses one thread and the processes do not talk to each other: its figures depend on the setting alone.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "configs" / "demo.yaml"
RUNS = ROOT / "outputs" / "paper" / "runs"

SMALLER: dict[str, Any] = {
    # 8 prompts x 8 instead of 16 x 8, in four micro-batches of similar length, which pads less.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "decode_batch_size": 256,  # one call per round: so small a model takes as long for 64 rows as for 16
    # Outputs of up to 64 tokens in segments of 16, so that more of them take several segments, and a step is cheaper.
    "max_completion_length": 64,
    "max_steps": 24,
    "learning_rate": 1e-4,  # the paper's hundreds of steps in 24
    "eval_k": 2,
    "disable_tqdm": True,
    "log_rollouts": True,  # the ages of the segments are read from it
}
"""What every run changes in the demo's configuration, to cost about half a minute of a core."""

TRAINERS = ("ulorl", "trl")  # ours, or stock `trl.GRPOTrainer`, which gets the fields that it knows


def setting(overrides: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return all options of a run.

    Args:
        overrides: Options of `trl-ulorl train` and, as `trainer`, one of `TRAINERS`. A mapping replaces the
            configuration's.
        seed: Of the problems, their order and the sampling.
    """
    options = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    options.pop("output_dir")
    return {**options, **SMALLER, "trainer": "ulorl", **overrides, "seed": seed}


def run_path(options: dict[str, Any]) -> Path:
    """Return where a setting's run is kept."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return RUNS / f"{digest[:16]}.json"


def complete(settings: Sequence[dict[str, Any]], *, jobs: int) -> list[dict[str, Any]]:
    """Make the runs that are missing, `jobs` at once, and return all of them in order."""
    paths = {str(run_path(options)): options for options in settings}
    missing = {path: options for path, options in paths.items() if not Path(path).exists()}
    note(f"{len(paths)} runs, {len(missing)} of them to be made")
    if missing:
        RUNS.mkdir(parents=True, exist_ok=True)
        # One server imports torch and TRL, and every run is forked from it: the imports cost as much as some steps. It has
        # no threads then, because none may be there at a fork.
        os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trl_ulorl.cli.training", "trl_ulorl.evaluation.standalone"])
        with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
            started = time.monotonic()
            futures = {pool.submit(make_run, options, path): path for path, options in missing.items()}
            for done, future in enumerate(as_completed(futures), start=1):
                result = future.result()
                note(
                    f"{done} of {len(missing)} after {time.monotonic() - started:.0f} s: {Path(futures[future]).name}, "
                    f"{result['cpu_seconds']:.0f} CPU seconds, accuracy {result['accuracy']:.3f}"
                )
    return [json.loads(run_path(options).read_text(encoding="utf-8")) for options in settings]


def note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


# ------------------------------------------------------------------------------------------------ in a process of its own


def make_run(options: dict[str, Any], path: str) -> dict[str, Any]:
    """Train, evaluate, and write the run's file; read it if another study has made it meanwhile."""
    import torch

    from trl_ulorl.records import write_json

    if Path(path).exists():
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paper_run_") as folder, contextlib.redirect_stdout(io.StringIO()):
        result = {"setting": options, **train(dict(options), Path(folder))}
    write_json(Path(path), result)
    return result


def _end_with_parent() -> None:
    """End this process when the study that started it is gone, which a pool's workers do only after their task."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def train(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and evaluate one setting.

    Returns:
        `history`, a mapping per step of the figures that the trainer logged, with the wall-clock and processor seconds since
        training began; `accuracy` (avg@k on held-out problems), `standard_error`, `truncated_frac`, `mean_length`;
        `ages`, from `rollouts.jsonl`; `cpu_seconds` and `wall_seconds` of training.
    """
    trainer = build(options, folder)
    trainer.add_callback(_clock())
    trainer.train()
    history = [_steps_figures(entry) for entry in trainer.state.log_history if "entropy" in entry]
    trainer.save_model(str(folder / "model"))
    log = folder / "rollouts.jsonl"
    return {
        "history": history,
        **evaluate(folder / "model", options, folder / "held_out.json"),
        "ages": ages(log) if log.exists() else None,
        "cpu_seconds": history[-1]["cpu_seconds"],
        "wall_seconds": history[-1]["wall_seconds"],
    }


def build(options: dict[str, Any], folder: Path) -> Any:
    """Build the trainer as `trl-ulorl train --config FILE` does, but without its evaluations; or stock TRL's."""
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

    from trl_ulorl.cli import training
    from trl_ulorl.data.arithmetic import embedded_model_path

    kind = options.pop("trainer")
    if kind not in TRAINERS:
        raise ValueError(f"`trainer` ({kind!r}) must be one of {', '.join(TRAINERS)}.")
    options = {**options, "output_dir": str(folder), "eval_problems": 0}
    if "model_name_or_path" in options:  # relative to the repository, so that a setting's name is the same everywhere
        options["model_name_or_path"] = str(ROOT / options["model_name_or_path"])
    config = folder / "config.yaml"
    if kind == "ulorl":
        config.write_text(yaml.safe_dump(options), encoding="utf-8")
        return training.build(*training.parse(["--config", str(config)]))[0]
    classes = (training.ScriptArguments, GRPOConfig, ModelConfig)
    known = {each.name for each_class in classes for each in fields(each_class)}
    config.write_text(yaml.safe_dump({name: options[name] for name in known & options.keys()}), encoding="utf-8")
    parser = TrlParser(classes)
    script_args, args, model_args = parser.parse_args_and_config(["--config", str(config), "--use_cpu", "true"])
    model = model_args.model_name_or_path or embedded_model_path()
    rows, _ = training.load_data(script_args, args.seed, is_chat=True)
    return GRPOTrainer(model, training.load_reward(script_args.reward), args, rows)


def evaluate(model: Path, options: dict[str, Any], output: Path) -> dict[str, Any]:
    """Sample the held-out problems, the same ones from the same random numbers in every run, as in training."""
    from trl_ulorl.evaluation.engines import EvaluationSettings, load_tokenizer
    from trl_ulorl.evaluation.problems import load_problems
    from trl_ulorl.evaluation.standalone import Evaluation
    from trl_ulorl.rewards import VerifierReward

    settings = EvaluationSettings(
        model=str(model),
        num_samples=options["eval_k"],
        temperature=options["temperature"],
        top_p=1.0,
        top_k=0,
        max_completion_length=options["max_completion_length"],
        batch_size=256,
    )
    problems = load_problems("arithmetic", num_problems=options["eval_problems"])
    result = Evaluation(problems, settings, output, load_tokenizer(settings), {}).run(VerifierReward())
    return {
        "accuracy": result.accuracy,
        "standard_error": result.standard_error,
        "truncated_frac": result.truncated_fraction,
        "mean_length": float(result.lengths.mean()),
    }


def ages(log: Path) -> dict[str, Any]:
    """Count the trained tokens by their age, and by what the age comes from.

    The age of a token is the number of updates between its sampling and the update it is trained in. For a rollout's last
    segment it has two parts: the wait for the siblings of its group to end, and the wait of the complete group in the
    experience pool.

    Returns:
        Tokens by age, as text, in `all` tokens, in `last_segment`s, and in `last_segment_alone`, which is the age that they would
        have if the group did not wait in the pool; the tokens of last segments by the number of segments of their
        rollout, `of_segments`, with those of age 0, `of_segments_on_policy`; and `rollouts` by their number of segments.
    """
    from trl_ulorl.records import read_lines

    counts: dict[str, Counter[int]] = {
        name: Counter()
        for name in (
            "all",
            "last_segment",
            "last_segment_alone",
            "of_segments",
            "of_segments_on_policy",
            "rollouts",
        )
    }
    for group in read_lines(log):
        if group["outcome"] != "trained":
            continue
        # The policy that its update started from: it leaves the pools when the update is done.
        trained_by = group["left"]
        complete_at = max(rollout["segments"][-1][0] for rollout in group["rollouts"])
        for rollout in group["rollouts"]:
            for version, length in rollout["segments"]:
                counts["all"][trained_by - version] += length
            version, length = rollout["segments"][-1]
            num_segments = len(rollout["segments"])
            counts["last_segment"][trained_by - version] += length
            counts["last_segment_alone"][complete_at - version] += length
            counts["of_segments"][num_segments] += length
            counts["of_segments_on_policy"][num_segments] += length * (version == trained_by)
            counts["rollouts"][num_segments] += 1
    return {name: {str(key): count for key, count in sorted(counter.items())} for name, counter in counts.items()}


def _clock() -> Any:
    """Return a callback that adds the seconds since training began to each line of the log."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.log_history[-1]["wall_seconds"] = time.perf_counter() - self.wall
            state.log_history[-1]["cpu_seconds"] = time.process_time() - self.cpu

    return Clock()


def _steps_figures(entry: dict[str, Any]) -> dict[str, float]:
    figures = {
        name: round(float(value), 7)
        for name, value in entry.items()
        if isinstance(value, (int, float)) and not name.startswith(("verifier/stage", "profiling"))
    }
    if not any(name.startswith("rollout/") for name in figures):  # stock TRL trains on every group
        figures["accuracy"] = figures["reward"]
    return figures
