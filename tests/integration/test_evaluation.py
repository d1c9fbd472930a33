"""`trl-ulorl eval` on the embedded model, and evaluation while a model trains: real runs, stopped, shared out, compared."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import make_dataset
from datasets import Dataset
from helpers import length_reward, make_trainer, parameters
from transformers import TrainerCallback

from trl_ulorl.cli import main
from trl_ulorl.evaluation import EvaluationCallback

pytestmark = pytest.mark.slow

DEMO_SAMPLING = ["--temperature", "0.85", "--top_p", "1.0", "--top_k", "0", "--max_completion_length", "128"]
SMALL = ["--dataset", "arithmetic", "--num_problems", "12", "--k", "4", "--batch_size", "8", *DEMO_SAMPLING]


def evaluate(output, *arguments):
    assert main(["eval", "--model", "embedded", "--output", str(output), *arguments]) == 0
    return figures_of(output)


def figures_of(output):
    values = json.loads(output.read_text())
    return {name: value for name, value in values.items() if name != "seconds"}


def process(*arguments, launcher=("-m", "trl_ulorl.cli")):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, "eval", "--model", "embedded", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_demos_figure(tmp_path):
    """`make demo` prints 44.5 % with a standard error of 2.0 before training."""
    values = evaluate(tmp_path / "demo.json", "--dataset", "arithmetic", "--k", "4", *DEMO_SAMPLING)
    assert (values["num_problems"], values["num_samples"]) == (256, 4)
    assert abs(values["avg_at_k"] - 0.445) < 3 * 0.02
    assert 0.015 < values["standard_error"] < 0.025
    assert values["avg_at_k"] < values["maj_at_k"] < values["pass_at_k"]
    assert 0 < values["truncated_fraction"] < 0.03 and values["undecided_fraction"] == 0


# By its own hand, so that the moment does not depend on how busy the machine is.
DIES_WITH_TWELVE_SAMPLES = """
import os, signal, sys
from trl_ulorl.cli import main
from trl_ulorl.evaluation.samples import SampleFile

append = SampleFile.append

def append_or_die(file, new):
    append(file, new)
    if len(file.tries) == 12:
        os.kill(os.getpid(), signal.SIGKILL)

SampleFile.append = append_or_die
sys.exit(main())
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return evaluate(tmp_path_factory.mktemp("whole") / "run.json", *SMALL)


def test_an_evaluation_killed_on_its_way_goes_on_to_the_same_figures(tmp_path, uninterrupted, capsys):
    output, samples = tmp_path / "run.json", tmp_path / "run.samples.jsonl"
    killed = process("--output", str(output), *SMALL, launcher=["-c", DIES_WITH_TWELVE_SAMPLES])
    _, stderr = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, stderr[-3000:]
    assert not output.exists() and samples.read_text().count("\n") == 1 + 12
    kept = samples.read_bytes()
    with samples.open("ab") as file:
        file.write(b'{"problem": 3, "att')  # as if it had died within a line
    assert evaluate(output, *SMALL) == uninterrupted
    assert samples.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert "answers are there already" in capsys.readouterr().err
    # All samples are there now: no model is needed, and other figures about them cost nothing.
    assert evaluate(output, *SMALL) == uninterrupted
    assert evaluate(output, *[*SMALL[:5], "2", "--num_samples", "4", *SMALL[6:]])["k"] == 2


def test_two_processes_give_the_samples_of_one(tmp_path, uninterrupted):
    output = tmp_path / "run.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "trl_ulorl.cli"]
    running = process("--output", str(output), *SMALL, launcher=launcher)
    stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0, stderr[-3000:]
    assert stdout.count("12 problems, 4 answers each") == 1
    assert figures_of(output) == uninterrupted
    assert (tmp_path / "run.samples-1.jsonl").exists()


def test_runs_are_compared_problem_by_problem(tmp_path, uninterrupted, capsys):
    first = tmp_path / "first.json"
    first.write_text(json.dumps(uninterrupted))
    values = evaluate(tmp_path / "second.json", *SMALL, "--seed", "1", "--compare", str(first))
    test = values["comparison"]
    assert test["difference"] == pytest.approx(values["avg_at_k"] - uninterrupted["avg_at_k"])
    assert test["num_problems"] == 12 and 0 < test["p_value"] <= 1
    assert values["problems"] != uninterrupted["problems"]  # another seed
    assert "permutation test over 12 problems" in capsys.readouterr().out


def test_problems_longer_than_the_models_positions_count_as_truncated(tmp_path, capsys):
    rows = [{"problem": "1+1=" * 200, "answer": "2"}, {"problem": "1+1=", "answer": "2"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = evaluate(tmp_path / "run.json", "--dataset", str(tmp_path / "mine.jsonl"), "--k", "2")
    assert "1 of 2 prompts" in capsys.readouterr().err
    assert values["problems"][0]["lengths"] == [0, 0] and min(values["problems"][1]["lengths"]) > 0
    assert values["num_too_long"] == 1 and values["truncated_fraction"] >= 0.5


def test_a_reward_that_is_no_verdict_leaves_no_result(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("def f(completions, **kwargs):\n    return [0.5]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="measures correctness alone"):
        evaluate(tmp_path / "run.json", *SMALL, "--reward", "half:f")
    assert not (tmp_path / "run.json").exists()


# --- in training ------------------------------------------------------------------------------------------------------


def train(folder, **callback_options):
    trainer = make_trainer(folder, num_segments=2, max_steps=4)
    if callback_options:
        trainer.add_callback(
            EvaluationCallback(trainer, make_dataset(6), k=3, reward=length_reward, **callback_options)
        )
    trainer.train()
    return trainer


def test_the_callback_logs_and_leaves_training_as_it_is(tmp_path):
    plain = train(tmp_path / "plain")
    evaluated = train(tmp_path / "evaluated", every_steps=2)
    expected, found = parameters(plain), parameters(evaluated)
    assert all((expected[name] == found[name]).all() for name in expected)
    entries = [entry for entry in evaluated.state.log_history if "eval_avg_at_k" in entry]
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry in entries:
        assert entry["eval_avg_at_k"] <= entry["eval_pass_at_k"] <= 1
        assert entry["eval_mean_length"] > 0 and entry["eval_standard_error"] >= 0
    for name in ("entropy", "rollout/rounds"):  # what training logs is neither lost nor changed
        logs = [[entry[name] for entry in run.state.log_history if name in entry] for run in (plain, evaluated)]
        assert logs[0] == logs[1] and len(logs[0]) == 4


def test_the_callback_before_and_after_training(tmp_path):
    trainer = train(tmp_path, every_steps=2, at_ends=True)
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_avg_at_k" in entry]
    assert steps == [0, 2, 4]  # the last one once
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, EvaluationCallback))
    again = EvaluationCallback(trainer, make_dataset(6), k=3, reward=length_reward, at_ends=True, is_resumed=True)
    again.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert again.before.to_json() == callback.before.to_json()
    assert np.isfinite(callback.after.accuracy)


@pytest.mark.parametrize(
    ("problems", "k", "temperature", "changed"),
    [
        (make_dataset(6), 4, 0.85, "`k`"),
        (make_dataset(5), 3, 0.85, "`problems`"),
        (make_dataset(6), 3, 0.5, "`temperature`"),
    ],
)
def test_a_resumed_run_shows_no_gain_over_another_measurement(tmp_path, caplog, problems, k, temperature, changed):
    trainer = make_trainer(tmp_path, num_segments=2, max_steps=1)
    first = EvaluationCallback(trainer, make_dataset(6), k=3, reward=length_reward, at_ends=True)
    first.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.args.temperature = temperature
    resumed = EvaluationCallback(trainer, problems, k=k, reward=length_reward, at_ends=True, is_resumed=True)
    resumed.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert resumed.before is None
    assert f"it had other {changed}, so no gain" in caplog.text


def test_a_held_out_prompt_without_room_for_an_answer_counts_as_truncated(tmp_path):
    """As in `trl-ulorl eval`: it is found in the midst of a run, which it must not end."""
    trainer = make_trainer(tmp_path, num_segments=2, max_steps=1)
    problems = make_dataset(3)
    longest = trainer.model.config.max_position_embeddings
    rows = [{"prompt": [{"role": "user", "content": "1" * (longest + 5)}], "answer": "1"}, *problems]
    callback = EvaluationCallback(trainer, Dataset.from_list(rows), k=2, reward=length_reward, at_ends=True)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.before.lengths[0].tolist() == [0, 0] and callback.before.is_truncated[0].all()
    assert (callback.before.is_correct[0] == 0).all() and (callback.before.lengths[1:] > 0).all()


def test_a_run_that_is_stopped_is_saved_without_evaluating_first(tmp_path, monkeypatch):
    """Held-out problems at full length take longer than the time between SIGTERM and SIGKILL."""
    trainer = make_trainer(tmp_path, num_segments=2, max_steps=4, save_strategy="steps", save_steps=100)
    callback = EvaluationCallback(trainer, make_dataset(6), k=3, reward=length_reward, every_steps=2, at_ends=True)
    trainer.add_callback(callback)

    class Stopper(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer._stop.signal_number = signal.SIGTERM

    trainer.add_callback(Stopper())
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.global_step == 2 and (tmp_path / "run" / "checkpoint-2").is_dir()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_avg_at_k" in entry] == [0]
    assert callback.after is None


@pytest.mark.parametrize("bad", [{"k": 0}, {"k": 1, "every_steps": 0}, {"k": 1, "problems": make_dataset(0)}])
def test_a_callback_that_could_not_evaluate_is_refused(tmp_path, bad):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="Leave the callback out"):
        EvaluationCallback(trainer, bad.pop("problems", make_dataset(2)), reward=length_reward, **bad)


def run_two_ranks(folder, fails_on_rank):
    script = str(Path(__file__).with_name("evaluation_rank_run.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command += [str(folder), json.dumps(fails_on_rank)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_both_ranks_evaluate_and_know_the_whole_result(tmp_path):
    first, second = run_two_ranks(tmp_path, None)
    assert first["error"] is None and second["error"] is None
    names = ("step", "eval_avg_at_k", "eval_pass_at_k", "eval_maj_at_k", "eval_mean_length")
    assert [[entry[name] for name in names] for entry in first["history"]] == [
        [entry[name] for name in names] for entry in second["history"]
    ]
    assert [entry["step"] for entry in first["history"]] == [0, 1, 2]
    assert all(
        round(entry["eval_avg_at_k"] * 10) == pytest.approx(entry["eval_avg_at_k"] * 10) for entry in first["history"]
    )


def test_a_reward_that_fails_on_one_rank_ends_both(tmp_path):
    first, second = run_two_ranks(tmp_path, 1)
    assert "failed on another rank" in first["error"] and "measures correctness alone" in first["error"]
    assert "measures correctness alone" in second["error"]
