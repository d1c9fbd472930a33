"""What a real training leaves for the report and for trackers: the report's numbers are the trainer's."""

import json
import math

import numpy as np
import pytest
from helpers import PreparedEngine, make_trainer
from transformers import TrainerCallback

from trl_ulorl.cli import main
from trl_ulorl.records import read_lines
from trl_ulorl.report import statistics
from trl_ulorl.report.run import read_run

pytestmark = pytest.mark.slow

SEGMENTS = {"engine": PreparedEngine(16), "num_segments": 4, "max_steps": 5}


def text_of(completion):
    return completion[0]["content"] if isinstance(completion, list) else completion


def stage_reward(completions, log_extra=None, **kwargs):
    lengths = [len(text_of(completion)) for completion in completions]
    log_extra("verifier_stage", ["exact" if length % 3 else "numeric" for length in lengths])
    return [float(length % 2) for length in lengths]


def test_the_report_shows_what_the_trainer_knows(tmp_path):
    trainer = make_trainer(tmp_path, stage_reward, **SEGMENTS)
    trainer.train()
    folder = tmp_path / "run"
    run = read_run(folder)
    assert run.history == trainer.state.log_history
    assert run.ledger == (trainer.ledger(), "at the end of training, step 5")
    assert run.settings["num_segments"] == 4 and run.settings["dmmpts"]["tau"] == 0.99
    assert run.description["max_steps"] == 5 and run.description["reward_functions"] == ["stage_reward"]
    rollouts, ledger = run.rollouts, trainer.ledger()
    assert rollouts.length.sum() == sum(ledger["tokens"][name] for name in ("trained", "filtered", "set_aside"))
    assert rollouts.length[rollouts.is_trained()].sum() == ledger["tokens"]["trained"]
    # With one update per batch the ages in the report are those that the trainer logs.
    for entry in run.history:
        if "rollout/age_mean" not in entry:
            continue
        is_now = (rollouts.is_trained() & (rollouts.left == entry["step"] - 1))[rollouts.segment_rollout]
        ages = entry["step"] - 1 - rollouts.segment_version[is_now]
        assert np.average(ages, weights=rollouts.segment_length[is_now]) == pytest.approx(entry["rollout/age_mean"])
        assert ages.max() == entry["rollout/age_max"]
    rows = {row["stage"]: row for row in statistics.stage_table(rollouts)}
    assert set(rows) - {"truncated, not called"} == {"exact", "numeric"}
    assert sum(row["total"] for row in rows.values()) == len(rollouts.length)
    assert {len(each["segments"]) for sample in run.samples for each in sample["rollouts"]} >= {1, 2}
    for sample in run.samples:
        record = next(record for record in run.records if record["group"] == sample["group"])
        recorded = [[[s["version"], s["tokens"]] for s in rollout["segments"]] for rollout in sample["rollouts"]]
        assert all(segments in [rollout["segments"] for rollout in record["rollouts"]] for segments in recorded)
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size < 10e6


def test_a_sample_shows_the_text_that_the_reward_saw(tmp_path):
    seen = []

    def reward(completions, **kwargs):
        texts = [text_of(completion) for completion in completions]
        seen.extend(texts)
        return [float(len(text) % 2) for text in texts]

    trainer = make_trainer(tmp_path, reward, num_segments=4, max_steps=3)
    trainer.train()
    samples = json.loads((tmp_path / "run" / "_samples.json").read_text())["samples"]
    shown = ["".join(p for s in r["segments"] for p in s["parts"]) for sample in samples for r in sample["rollouts"]]
    ended = [text for text in shown if text.endswith("<eos>")]
    special = "<pad>", "<user>", "<assistant>"
    plain = [text.removesuffix("<eos>") for text in ended if not any(token in text for token in special)]
    assert plain and all(text in seen for text in plain)


@pytest.mark.parametrize(
    "overrides", [{}, {"num_iterations": 3, "save_steps": 4}], ids=["window end", "inside a window"]
)
def test_a_resumed_run_leaves_what_an_uninterrupted_one_does(tmp_path, overrides):
    settings = {"num_segments": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, **overrides}
    make_trainer(tmp_path, **settings).train()
    folder = tmp_path / "run"
    whole, samples = read_run(folder), (folder / "_samples.json").read_text()
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{settings['save_steps']}"))
    run = read_run(folder)
    assert run.history == resumed.state.log_history
    assert [entry["step"] for entry in run.history] == [entry["step"] for entry in whole.history]
    assert run.records == whole.records
    assert (folder / "_samples.json").read_text() == samples
    assert run.description["begun_at_step"] == settings["save_steps"] and run.ledger == whole.ledger


def test_training_again_leaves_one_run(tmp_path):
    trainer = make_trainer(tmp_path, **SEGMENTS)
    trainer.train()
    trainer.train()
    run = read_run(tmp_path / "run")
    assert run.history == trainer.state.log_history
    assert [sample["left"] for sample in run.samples] == [0, 1, 2, 3, 4]


def test_a_run_that_breaks_off_can_be_reported(tmp_path):
    trainer = make_trainer(tmp_path, **SEGMENTS)

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("out of memory")

    trainer.add_callback(Stop())
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    run = read_run(tmp_path / "run")
    assert run.last_step == 3 and run.ledger[1] == "as last logged, in step 3, before its update"
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "The run has come to step 3 of 5" in (tmp_path / "run" / "report.html").read_text()


def test_what_is_not_finite_is_recorded_as_null(tmp_path):
    trainer = make_trainer(tmp_path, **{**SEGMENTS, "max_steps": 1})

    class Spoil(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            state.log_history[-1]["loss"] = math.nan

    trainer.callback_handler.callbacks.insert(0, Spoil())
    trainer.train()
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first, parse_constant=pytest.fail)["loss"] is None


# ----------------------------------------------------------------------------------------------------------- trackers


class Tracker(TrainerCallback):
    """What every tracker is: a callback that gets the logs."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_trackers_get_every_metric_by_its_name(tmp_path):
    trainer = make_trainer(tmp_path, **SEGMENTS)
    tracker = Tracker()
    trainer.add_callback(tracker)
    trainer.train()
    assert [
        logs | {"step": entry["step"]} for logs, entry in zip(tracker.logs, trainer.state.log_history, strict=True)
    ] == (trainer.state.log_history)
    names = set(tracker.logs[-2])
    assert {"accuracy", "rollout/age_mean", "ledger/tokens_generated", "importance/kl", "dmmpts/masked_frac"} <= names
    assert {"reward", "entropy", "completions/mean_length", "step_time"} <= names  # TRL's own
    assert read_lines(tmp_path / "run" / "metrics.jsonl") == trainer.state.log_history


def test_tensorboard_gets_the_values_that_are_logged(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(tmp_path, report_to="tensorboard", **SEGMENTS)
    trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "events"), size_guidance={accumulator.SCALARS: 0})
    events.Reload()
    written = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    expected = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if name != "step":
                expected.setdefault(f"train/{name}", {})[entry["step"]] = value
    assert written.keys() == expected.keys()
    for tag, values in expected.items():
        assert written[tag] == pytest.approx(values, rel=1e-5, nan_ok=True), tag
    assert len(written["train/rollout/age_mean"]) == 5
