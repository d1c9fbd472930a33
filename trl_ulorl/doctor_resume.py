"""Save, kill, resume: a small run that is killed in the middle of decoding, and a fresh process that takes it up.

The embedded model on the CPU in processes of their own, with the number of segments and generations of the run that is
examined: what is tested is the way of the pools through the disk of this machine, which no model changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .config import UloRLConfig
from .data.arithmetic import arithmetic_dataset, embedded_model_path
from .doctor_patient import Check, Figures
from .rollout.collector import ExperienceCollector
from .rollout.engine import DecodedSegment, DecodeRequest
from .trainer import UloRLTrainer

_SECONDS = 300  # for one of the two processes, which takes about ten
_LIMIT = 64  # tokens of a completion


def check_resume(folder: Path, *, num_segments: int, num_generations: int) -> Check:
    """Kill a run while it decodes, resume it in a fresh process, and compare the pools bit by bit.

    Args:
        folder: Where the run writes: on the disk that checkpoints will lie on.
        num_segments: Segments of a rollout, at least two here.
        num_generations: Rollouts of a group.
    """
    sizes = {"num_segments": min(max(2, num_segments), _LIMIT), "num_generations": num_generations}
    killed = _run(folder, "killed", sizes)
    saved_path, resumed_path = folder / "killed.json", folder / "resumed.json"
    if killed.returncode != -signal.SIGKILL or not saved_path.is_file():
        return _failed("the run to be killed ended by itself", killed)
    resumed = _run(folder, "resumed", sizes)
    if resumed.returncode != 0 or not resumed_path.is_file():
        return _failed("the killed run could not be resumed", resumed)
    saved, found = (json.loads(path.read_text(encoding="utf-8")) for path in (saved_path, resumed_path))
    wrong = sorted(name for name in saved if saved[name] != found.get(name))
    figure: Figures = {
        "parts_that_differ": len(wrong),
        "groups": len(saved["groups"]),
        "tokens": saved["tokens"],
        "unfinished": saved["unfinished"],
    }
    if wrong:
        message = (
            f"After a kill and a resume {', '.join(wrong)} differ from what was saved: don't train on this machine."
        )
        return Check("resume_keeps_pools", False, figure, message)
    message = f"{figure['tokens']} tokens of {figure['groups']} groups came back bit by bit after a kill."
    return Check("resume_keeps_pools", True, figure, message)


def _failed(what: str, process: subprocess.CompletedProcess[str]) -> Check:
    lines = process.stderr.strip().splitlines() or ["no message"]
    figure: Figures = {"parts_that_differ": None, "exit_code": process.returncode}
    return Check("resume_keeps_pools", False, figure, f"{what[0].upper() + what[1:]}: {lines[-1]}")


def _run(folder: Path, phase: str, sizes: dict[str, int]) -> subprocess.CompletedProcess[str]:
    settings = json.dumps({"folder": str(folder), "phase": phase, **sizes})
    launched = ("LOCAL_RANK", "RANK", "WORLD_SIZE")  # of a launcher: these processes run each for itself
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "trl_ulorl.doctor_resume", settings]
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False, cwd=folder
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {_SECONDS} seconds")


def pool_summary(collector: ExperienceCollector) -> dict[str, Any]:
    """Return everything that the pools hold as JSON values, tokens and log-probabilities as a hash."""
    groups = {}
    unfinished = collector.unfinished.groups
    for place, held in (
        ("unfinished", unfinished),
        ("ready", collector.ready.groups),
        ("training", collector.training),
    ):
        for group in held:
            content = hashlib.sha256(group.prompt_ids.tobytes())
            for rollout in group.rollouts:
                content.update(f"{rollout.finish} {rollout.num_tokens};".encode())
                for values in (rollout.completion_ids, rollout.sampling_per_token_logps, rollout.policy_versions):
                    content.update(values.tobytes())
                if rollout.rewards is not None:
                    content.update(rollout.rewards.tobytes())
            groups[str(group.group_id)] = [place, group.row_index, group.admitted_version, content.hexdigest()]
    return {
        "groups": groups,
        "tokens": collector.ready.num_tokens + sum(group.num_tokens for group in unfinished),
        "unfinished": len(unfinished),
        "ledger": collector.ledger_balance(),
        "prompts": collector.prompts.state_dict(),
    }


class _Recorder(TrainerCallback):
    """Writes what the pools hold when a checkpoint was saved, and when training begins after a resume."""

    def __init__(self, phase: str, folder: Path) -> None:
        self._phase = phase
        self._folder = folder
        self.trainer: UloRLTrainer | None = None
        self.has_saved = False

    def _write(self) -> None:
        assert self.trainer is not None
        path = self._folder / f"{self._phase}.json"
        path.write_text(json.dumps(pool_summary(self.trainer._collector)), encoding="utf-8")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Record the state that the checkpoint holds."""
        self._write()
        self.has_saved = True

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Record the state that was loaded, and end."""
        if self._phase == "resumed":
            self._write()
            sys.stdout.flush()
            os._exit(0)


class _KillingEngine:
    """Kills the process, after a checkpoint was saved, in the middle of decoding."""

    def __init__(self, engine: Any, recorder: _Recorder) -> None:
        self._engine = engine
        self._recorder = recorder

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Decode as the engine does, as far as it comes."""
        for number, decoded in enumerate(self._engine.decode(requests)):
            if self._recorder.has_saved and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield decoded


def _length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids) % 2) for ids in completion_ids]


def main(settings: dict[str, Any]) -> None:
    """Run one of the two processes."""
    folder = Path(settings["folder"])
    recorder = _Recorder(settings["phase"], folder)
    args = UloRLConfig(
        output_dir=str(folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        max_completion_length=_LIMIT,
        num_segments=settings["num_segments"],
        num_generations=settings["num_generations"],
        per_device_train_batch_size=2 * settings["num_generations"],
    )
    trainer = UloRLTrainer(
        str(embedded_model_path()),
        _length_reward,
        args,
        arithmetic_dataset(64, seed=0, split="train"),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    if settings["phase"] == "killed":
        trainer._collector.engine = _KillingEngine(trainer._collector.engine, recorder)
        trainer.train()
    else:
        trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-1"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
