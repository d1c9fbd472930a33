"""The command line: what it reads, prints, writes and refuses, and that its documentation names every option."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from trl_ulorl.cli import build_parser, main, measure
from trl_ulorl.cli.lengths import read_lengths
from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.records import _rollout_record
from trl_ulorl.rollout.pool import Rollout, Segment
from trl_ulorl.rollout.simulated import SimulatedEngine

ROOT = Path(__file__).parents[2]
SMALL = ["plan", "--max-completion-length", "32", "--groups-per-batch", "2", "--num-generations", "2", "--steps", "3"]
LOGNORMAL = ["--median", "8", "--sigma", "1"]
LINE = ["--step-seconds", "0.01", "--sequence-seconds", "0.001"]


def plan_of(tmp_path, *arguments):
    path = tmp_path / "plan.json"
    assert main([*SMALL, *arguments, "--output", str(path)]) == 0
    return json.loads(path.read_text())


# --- plan: what comes out ---------------------------------------------------------------------------------------------


def test_plan_prints_tables_and_a_recommendation_and_writes_json(tmp_path, capsys):
    plan = plan_of(tmp_path, *LOGNORMAL, *LINE, "--kv-bytes-per-token", "1e6", "--kv-gib", "0.1")
    printed, progress = capsys.readouterr()
    assert "simulating" in progress and "simulating" not in printed
    names = ["trl", "segments_1", "segments_2", "segments_4", "segments_8"]
    names += ["continuous_1x", "continuous_2x", "continuous_3x"]
    assert list(plan["arms"]) == names
    for name in names:
        assert len(re.findall(rf"^  {name} ", printed, re.MULTILINE)) == 2  # speed and price
    assert f"Recommended: {plan['recommendation']} (" in printed
    assert plan["arms"]["trl"]["speedup_step"] == 1
    assert plan["arms"]["trl"]["update_seconds"] == pytest.approx(0.25 * plan["arms"]["trl"]["rollout_seconds"])
    assert {arm["is_within_kv_limit"] for arm in plan["arms"].values()} == {True, False}
    assert plan["parameters"]["lengths"]["p50"] == 8
    for name in ("max_completion_length", "step_seconds", "padding_ratio_stock", "update_seconds", "seed"):
        assert re.search(rf"^  {name} ", printed, re.MULTILINE), name


def test_no_recommendation_where_nothing_fits(tmp_path, capsys):
    plan = plan_of(tmp_path, *LOGNORMAL, *LINE, "--kv-bytes-per-token", "1e6", "--kv-gib", "0.001")
    assert plan["recommendation"] is None
    assert "Use more engines or fewer groups per batch" in capsys.readouterr().out


def test_update_and_padding_can_be_given(tmp_path):
    plan = plan_of(
        tmp_path, *LOGNORMAL, *LINE, "--update-seconds", "3", "--padding-ratio-stock", "2", "--padding-ratio", "1"
    )
    assert plan["arms"]["trl"]["update_seconds"] == pytest.approx(3)
    assert plan["arms"]["segments_1"]["update_seconds"] == pytest.approx(1.5)


def test_p99_stands_for_sigma(tmp_path):
    by_p99 = plan_of(tmp_path, "--median", "8", "--p99", "24", *LINE)
    assert by_p99["parameters"]["lengths"]["p99"] == pytest.approx(24, abs=1)


def test_curves_of_every_form_are_one(tmp_path):
    forms = {"mapping": {"8": 0.004, "32": 0.006}, "pairs": [[8, 0.004], [32, 0.006]]}
    forms["benchmark"] = {"decode_curve": forms["mapping"]}
    forms["plan"] = {"parameters": forms["benchmark"]}
    texts = ["8:0.004,32:0.006"]
    for name, value in forms.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        texts.append(str(tmp_path / f"{name}.json"))
    plans = [plan_of(tmp_path, *LOGNORMAL, "--decode-curve", text) for text in texts]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0]["parameters"]["decode_curve"] == forms["mapping"]


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[3, 5, 8]", "3\n5\n8\n", "3.0\n\n5\n8"])
def test_lists_of_lengths(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths", 2).tolist() == [3, 5, 8]


def test_histogram(tmp_path):
    (tmp_path / "lengths").write_text(json.dumps({"edges": [10, 20, 30], "counts": [1, 1]}))
    lengths = read_lengths(tmp_path / "lengths", 2)
    assert lengths.min() == 10 and lengths.max() == 30 and (lengths < 20).mean() == pytest.approx(0.5, abs=0.06)


def rollout_of(*lengths):
    rollout = Rollout(0, 0)
    for length in lengths:
        rollout.extend(Segment.from_values(range(length), np.zeros(length), 0), None)
    return rollout


@pytest.mark.parametrize("num_records", [1, 3])
def test_records_of_a_training_keep_their_groups(tmp_path, num_records):
    record = {"group": 0, "rollouts": [_rollout_record(rollout_of(2, 3)), _rollout_record(rollout_of(4))]}
    (tmp_path / "rollouts.jsonl").write_text((json.dumps(record) + "\n") * num_records)
    assert read_lengths(tmp_path / "rollouts.jsonl", 2).tolist() == [[5, 4]] * num_records
    assert read_lengths(tmp_path / "rollouts.jsonl", 8).tolist() == [5, 4] * num_records


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (LINE, "Pass a file of lengths"),
        ([*LOGNORMAL, "--lengths", "x", *LINE], "Pass a file of lengths"),
        (["--lengths", "missing", *LINE], "It may be a JSON list"),
        (["--lengths", "x", "--sigma", "1", *LINE], "Leave `--sigma` out"),
        (["--median", "8", *LINE], "needs `--sigma` or `--p99`"),
        (["--median", "8", "--sigma", "1", "--p99", "9", *LINE], "needs `--sigma` or `--p99`"),
        (["--median", "8", "--p99", "7", *LINE], "Swap the two"),
        (LOGNORMAL, "one source is needed"),
        ([*LOGNORMAL, *LINE, "--decode-curve", "1:1,2:2"], "one source is needed"),
        ([*LOGNORMAL, "--step-seconds", "1"], "Pass both"),
        ([*LOGNORMAL, "--decode-curve", "8;0.1"], "Write numbers of sequences"),
        ([*LOGNORMAL, "--decode-curve", "8:a"], "Write numbers of sequences"),
        ([*LOGNORMAL, "--decode-curve", "8:0.1"], "Measure more points"),
        ([*LOGNORMAL, *LINE, "--kv-gib", "1"], "needs `--kv-bytes-per-token`"),
        ([*LOGNORMAL, *LINE, "--update-share", "0.2", "--update-seconds", "1"], "Leave one of them out"),
        ([*LOGNORMAL, *LINE, "--output", "missing/plan.json"], "Make the folder first"),
        ([*LOGNORMAL, *LINE, "--engine", "vllm"], "Pass `--measure`"),
    ],
)
def test_bad_input_is_explained(arguments, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *arguments]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[0]", "[1, null]", "[[1, 2]]", '{"edges": [1, 2]}', '{"edges": [2, 1], "counts": [1]}', "a", "{}"],
)
def test_files_without_lengths_are_explained(text, tmp_path, capsys):
    (tmp_path / "lengths").write_text(text)
    assert main([*SMALL, *LINE, "--lengths", str(tmp_path / "lengths")]) == 2
    assert "It may be a JSON list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("--median", "0", "not a number of at least"),
        ("--sigma", "x", "not a number of at least 0"),
        ("--sigma", "nan", "not a number of at least 0"),
        ("--mixed-frac", "1.5", "between 0 and 1"),
        ("--steps", "0", "whole number of at least 1"),
        ("--num-generations", "1", "whole number of at least 2"),
    ],
)
def test_values_out_of_range_are_explained(option, value, what, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*SMALL, *LOGNORMAL, *LINE, option, value])
    assert exit_info.value.code == 2
    assert what in capsys.readouterr().err


# --- measuring --------------------------------------------------------------------------------------------------------


def test_the_probe_finds_the_times_of_an_engine(monkeypatch):
    """Of one whose times are known."""
    engine = SimulatedEngine(
        median_length=1e6,
        sigma=0,
        decode_time=lambda size: 0.01 + 0.001 * size,
        prefill_seconds=1e-4,
        prefill_quadratic_seconds=1e-8,
    )
    monkeypatch.setattr(measure.time, "perf_counter", lambda: engine.seconds)
    monkeypatch.setattr(measure, "_MAX_SECONDS", 1e9)
    probe = measure._Probe(engine, vocab_size=100)
    curve = probe.decode_curve(context=16, num_steps=8)
    assert list(curve) == list(measure._SIZES)
    assert list(curve.values()) == pytest.approx([0.01 + 0.001 * size for size in curve])
    prefill = probe.prefill(1000)
    assert prefill["prefill_quadratic_seconds"] == pytest.approx(1e-8, rel=0.03)
    assert prefill["prefill_seconds"] == pytest.approx(1e-4, rel=0.01)


def test_a_measured_curve_never_falls():
    assert measure._not_falling(np.array([1.0, 4.0, 2.0, 3.0, 8.0])).tolist() == [1, 3, 3, 3, 8]


def test_too_few_groups_with_differing_rewards_to_compare_with(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*SMALL, *LOGNORMAL, *LINE, "--mixed-frac", "0.001", "--output", str(path)]) == 2
    error = capsys.readouterr().err
    assert "no group of stock TRL's 3 steps has differing rewards" in error and "`--steps`" in error
    assert not path.exists()


@pytest.mark.slow
def test_plan_on_a_measured_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_SIZES", (1, 16))
    plan = plan_of(tmp_path, *LOGNORMAL, "--measure", embedded_model_path(), "--prefill-seconds", "0.5")
    assert list(plan["parameters"]["decode_curve"]) == ["1", "16"]
    assert plan["parameters"]["prefill_seconds"] == 0.5


def test_a_decode_step_is_measured_again_when_something_held_up_the_shorter_runs(monkeypatch):
    monkeypatch.setattr(measure, "_SIZES", (1,))
    held_up = [9.0] * (2 * measure._REPEATS)  # the first use of the shape, and the first try of the shorter runs

    def run(size, context, num_steps):
        extra = held_up.pop() if held_up and num_steps <= 4 else 0.0
        return 0.1 + 0.01 * num_steps + extra

    probe = measure._Probe(None, 20)
    monkeypatch.setattr(probe, "_run", run)
    assert probe.decode_curve(8, 4) == {1: pytest.approx(0.01)}


# --- the command and its documentation --------------------------------------------------------------------------------


def test_plan_runs_as_a_module_without_torch():
    code = (
        "import sys; from trl_ulorl.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules); sys.exit(code)"
    )
    for command in (["-c", code], ["-m", "trl_ulorl.cli"]):
        run = subprocess.run(
            [sys.executable, *command, *SMALL, *LOGNORMAL, *LINE],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert "Recommended" in run.stdout


def test_the_command_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trl-ulorl": f"{main.__module__}:main"}


def options():
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {action.option_strings[-1]: action for action in commands.choices["plan"]._actions if action.dest != "help"}


@pytest.mark.parametrize("name", options())
def test_option_has_help_and_a_row_in_the_docs(name):
    assert options()[name].help
    assert re.search(rf"^\| `{name}[ `]", (ROOT / "docs" / "plan.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_docs_name_no_option_that_does_not_exist():
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= set(options())


def test_every_command_has_a_row_in_the_docs():
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `trl-ulorl (\w+)`", text, re.MULTILINE) == list(commands.choices)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ([], "Pass `--config FILE.yaml`"),
        (["--config", "missing.yaml"], "There is no file 'missing.yaml'"),
        (["--config=broken.yaml"], "'broken.yaml' is no YAML"),
        (["--config", "list.yaml"], "'list.yaml' holds a list"),
        (["--model_name_or_path", "./missing", "--output_dir", "o"], "There is no folder './missing'"),
        (["--model_name_or_path", "weightless", "--output_dir", "o"], "'weightless' holds no weights"),
        (["--model_name_or_path", "empty", "--output_dir", "o"], "'empty' holds no model"),
        (["--model_name_or_path", "MODEL", "--output_dir", "rows.jsonl"], "`output_dir` ('rows.jsonl')"),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--learning_rate", "-1"], "`learning_rate` (-1.0)"),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--max_steps", "0"], "`max_steps` (0)"),
        (
            ["--model_name_or_path", "MODEL", "--output_dir", "o", "--resume_from_checkpoint", "true"],
            "start without it",
        ),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--resume_from_checkpoint", "empty"], "to its end"),
        (
            ["--model_name_or_path", "MODEL", "--output_dir", "o", "--resume_from_checkpoint", "absent"],
            "There is no folder 'absent'",
        ),
        (
            ["--model_name_or_path", "embedded", "--output_dir", "o", "--engine", "vllm", "--use_vllm", "false"],
            "contradicts",
        ),
        (["--model_name_or_path", "no/such/model", "--output_dir", "o"], "no/such/model"),
        (
            ["--model_name_or_path", "MODEL", "--output_dir", "o", "--dataset_name", "missing.jsonl"],
            "There is no file",
        ),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--dataset_name", "rows.jsonl"], "for the questions"),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--reward", "verify"], "'module:function'"),
        (["--model_name_or_path", "MODEL", "--output_dir", "o", "--num_segments", "0"], "num_segments"),
        (["--model_name_or_path", "MODEL", "--num-segmnts", "2"], "--num-segmnts (did you mean num_segments?) 2."),
        (
            ["--config", "typo.yaml"],
            "in the configuration file: max_complet_length (did you mean max_completion_length?).",
        ),
    ],
)
def test_train_explains_bad_input(arguments, remedy, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "1+1="}\n')
    (tmp_path / "broken.yaml").write_text("output_dir: [unclosed\n")
    (tmp_path / "typo.yaml").write_text("output_dir: o\nmax_complet_length: 8\n")
    (tmp_path / "list.yaml").write_text("- output_dir\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    for file in Path(embedded_model_path()).glob("*.json*"):
        shutil.copy(file, tmp_path / "weightless")
    monkeypatch.chdir(tmp_path)
    common = ["--bf16", "false", "--report_to", "none", "--eval_problems", "0", "--max_completion_length", "16"]
    arguments = [embedded_model_path() if each == "MODEL" else each for each in arguments]
    assert main(["train", *arguments, *(common if arguments else [])]) == 2
    assert remedy in capsys.readouterr().err


def test_unknown_options_are_refused_but_by_train(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", "--max-completion-length", "8", "--unheard-of", "1"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --unheard-of 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "eval --modle m",
            "required: --model, --output, --dataset; unrecognized arguments: --modle (did you mean --model?)",
        ),
        (
            "eval --model m --datset=d --output o",
            "required: --dataset; unrecognized arguments: --datset (did you mean --dataset?)",
        ),
        (
            "eval --model m --dataset d --output o --top-pp 1",
            "unrecognized arguments: --top-pp (did you mean --top-p?) 1",
        ),
        ("clean rows.jsonl --ouput d", "required: --output; unrecognized arguments: --ouput (did you mean --output?)"),
        ("verify --strct", "required: CASES.jsonl; unrecognized arguments: --strct (did you mean --strict?)"),
        ("plan --medain 8 --sigma x", "unrecognized arguments: --medain (did you mean --median?)"),
        ("report --ouput=f", "required: RUN_DIR; unrecognized arguments: --ouput (did you mean --output?)"),
        ("--verbose report d", "unrecognized arguments: --verbose"),
        ("eval --k 0 --model m --output o --dataset d", "argument --k: 0 is not a whole number of at least 1\n"),
        ("plan --config f --sigma -1 --num_segments 4", "argument --sigma: -1 is not a number of at least 0\n"),
    ],
)
def test_a_mistyped_option_is_named_beside_what_is_missing(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
