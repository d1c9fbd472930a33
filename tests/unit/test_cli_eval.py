"""`trl-ulorl eval` and its problems: what is read, and what each bad input is told."""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset

from trl_ulorl.cli import build_parser, main
from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.evaluation.problems import as_messages, load_problems, problem_ids

ROOT = Path(__file__).parents[2]
ROWS = [{"problem": "1+1=", "answer": "2"}, {"problem": "1+2=", "answer": "3"}]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# --- problems ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_problems_from_a_file(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    rows = Dataset.from_list([{"question": row["problem"], "solution": row["answer"]} for row in ROWS])
    {"jsonl": rows.to_json, "json": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[suffix](path)
    loaded = load_problems(str(path))
    assert loaded["prompt"] == ["1+1=", "1+2="]
    assert [str(answer) for answer in loaded["answer"]] == ["2", "3"]


@pytest.mark.parametrize(
    ("name", "folder"), [("aime_2025", "math-ai/aime25"), ("beyond_aime", "ByteDance-Seed/BeyondAIME")]
)
def test_benchmarks_by_name(tmp_path, monkeypatch, name, folder):
    """With the Hub's files in a folder of the same name, which `load_dataset` takes first."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "test.jsonl").write_text(lines({**row, "id": str(i)} for i, row in enumerate(ROWS)))
    monkeypatch.chdir(tmp_path)
    loaded = load_problems(name)
    assert (loaded["prompt"], loaded["answer"]) == (["1+1=", "1+2="], ["2", "3"])


SHAPES = {
    "DAPO-Math-17k": {
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"ground_truth": "2", "style": "rule"},
    },
    "DeepMath": {"question": "1+1=", "final_answer": "2", "difficulty": 1.0},
    "OpenR1-Math": {"problem": "1+1=", "solution": "One and one: $2$.", "answer": "2"},
    "AIME": {"ID": "2024-I-1", "problem": "1+1=", "answer": 2},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_column_shapes_that_need_no_mapping(tmp_path, name, suffix):
    path = tmp_path / f"mine.{suffix}"
    rows = Dataset.from_list([SHAPES[name]])
    {"jsonl": rows.to_json, "parquet": rows.to_parquet}[suffix](path)
    (row,) = load_problems(str(path))
    assert (as_messages(Dataset.from_list([row]))[0]["prompt"], str(row["answer"])) == (
        [{"content": "1+1=", "role": "user"}],
        "2",
    )
    assert "reward_model" not in SHAPES[name] or row["reward_model"]["style"] == "rule"


@pytest.mark.parametrize("name", SHAPES)
def test_training_reads_the_same_shapes(tmp_path, name):
    from trl_ulorl.cli.train import ScriptArguments
    from trl_ulorl.cli.training import load_data

    (tmp_path / "mine.jsonl").write_text(lines([SHAPES[name]]))
    script = ScriptArguments(dataset_name=str(tmp_path / "mine.jsonl"), eval_problems=0)
    rows, held_out = load_data(script, 0, is_chat=True)
    assert held_out is None and rows[0]["prompt"] == [{"content": "1+1=", "role": "user"}]
    assert str(rows[0].get("answer", rows[0].get("solution"))) == "2" or name == "OpenR1-Math"


def test_training_with_the_verifier_needs_references(tmp_path):
    from trl_ulorl.cli.train import ScriptArguments
    from trl_ulorl.cli.training import load_data

    (tmp_path / "mine.jsonl").write_text(lines([{"prompt": "1+1="}]))
    script = ScriptArguments(dataset_name=str(tmp_path / "mine.jsonl"), eval_problems=0)
    with pytest.raises(
        ValueError, match=r"reference answers\. Rename the column to `answer`, .* the one that holds them"
    ):
        load_data(script, 0, is_chat=False)
    script.reward = "my_module:f"
    assert load_data(script, 0, is_chat=False)[0].column_names == ["prompt"]


def test_columns_that_are_named(tmp_path):
    (tmp_path / "mine.jsonl").write_text(lines([{"prompt": "no", "answer": "no", "task": "1+1=", "gold": 2}]))
    loaded = load_problems(str(tmp_path / "mine.jsonl"), prompt_column="task", answer_column="gold")
    assert loaded[0] == {"prompt": "1+1=", "answer": 2}


def test_the_embedded_task_is_that_of_the_demo():
    loaded = load_problems("arithmetic")
    assert len(loaded) == 256
    assert loaded[:4] == load_problems("arithmetic", num_problems=4)[:4]


def test_questions_become_messages_with_an_instruction():
    rows = as_messages(Dataset.from_list([{"prompt": "1+1="}]), "Box it.")
    assert rows[0]["prompt"] == [{"role": "user", "content": "1+1=\n\nBox it."}]
    assert as_messages(rows) is rows
    with pytest.raises(ValueError, match="Put it into their last message"):
        as_messages(rows, "Box it.")


def test_problems_are_known_by_their_text():
    rows = Dataset.from_list(
        [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}, {"prompt": "a", "answer": 1}]
    )
    first, second, third = problem_ids(rows)
    assert len({first, second, third}) == 3 and third == f"{first}-2"
    assert problem_ids(Dataset.from_list([{"prompt": "a", "answer": "2"}])) == [second]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "arguments", "remedy"),
    [
        (lines(ROWS), ["--prompt_column", "task"], "no 'task' for the questions"),
        (lines(ROWS), ["--answer_column", "gold"], "no 'gold' for the reference answers"),
        (lines([{"text": "1+1=", "answer": "2"}]), [], "`--prompt_column` name the one that holds them"),
        (lines([{"problem": "1+1="}]), [], "one of `answer`, `final_answer`"),
        (
            lines([*ROWS, {"problem": "1+3=", "answer": None}, {"problem": "1+4=", "answer": " "}]),
            [],
            "2 of the 4 rows",
        ),
        (lines([{"problem": "", "answer": "2"}]), [], "The question in row 0"),
        ("", [], "is empty"),
        ("\n\n", [], "mine.jsonl"),
        ("[]", ["--dataset", "mine.json"], "There is no file"),
        ("{", [], "can't be read"),
        (b"\x00\xff\xfe not text", [], "can't be read"),
        (None, [], "There is no file"),
        (lines(ROWS), ["--k", "8", "--num_samples", "4"], "Sample more, or lower `--k`"),
        (lines(ROWS), ["--num_problems", "3"], "more than the 2 rows"),
        (lines([{"problem": "1+1=" * 200, "answer": "2"}]), [], "Evaluate on shorter problems"),
        (lines(ROWS), ["--model", "no/such/model"], "Pass the folder of a saved model"),
        (lines(ROWS), ["--reward", "verify"], "'module:function'"),
        (lines(ROWS), ["--reward", "no_such_module:f"], "there is no module 'no_such_module'"),
        (lines(ROWS), ["--reward", "json:f"], "has no function 'f'"),
        (lines(ROWS), ["--compare", "missing.json"], "that an earlier one wrote"),
        (lines(ROWS), ["--output", "missing/run.json"], "Make the folder first"),
        (lines(ROWS), ["--top_p", "0"], "1 is no limit"),
        (lines(ROWS), ["--engine", "vllm", "--model_revision", "v1"], "pass its folder as the model"),
        (
            lines([{"prompt": [{"role": "user", "content": "?"}], "answer": "2"}]),
            ["--instruction", "x"],
            "last message",
        ),
    ],
)
def test_bad_input_is_explained_and_leaves_nothing(content, arguments, remedy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("mine.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.iterdir())
    code = main(["eval", "--model", "embedded", "--dataset", "mine.jsonl", "--output", "run.json", *arguments])
    assert code == 2
    assert remedy in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_without_weights_is_refused_before_anything_is_written(tmp_path, capsys):
    folder = tmp_path / "weightless"
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(embedded_model_path(), folder, ignore=ignored)
    arguments = ["--model", str(folder), "--dataset", "arithmetic", "--num_problems", "2"]
    assert main(["eval", *arguments, "--output", str(tmp_path / "run.json")]) == 2
    assert "holds no weights" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("option", "value"), [("--k", "0"), ("--temperature", "0"), ("--top_p", "1.5"), ("--batch_size", "x")]
)
def test_values_out_of_range_are_explained(option, value, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["eval", "--model", "m", "--dataset", "d", "--output", "o", option, value])
    assert exit_info.value.code == 2
    assert value in capsys.readouterr().err


# --- the command and its documentation --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eval", "train"])
def test_help_comes_at_once_and_without_torch(command):
    code = (
        "import sys; from trl_ulorl.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)"
    )
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert f"trl-ulorl {command}" in run.stdout
    assert time.perf_counter() - started < 2


def options():
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {action.option_strings[0]: action for action in commands.choices["eval"]._actions if action.dest != "help"}


@pytest.mark.parametrize("name", options())
def test_option_has_help_and_a_row_in_the_docs(name):
    assert options()[name].help
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{name}[ `]", text, re.MULTILINE)


def test_both_spellings_of_an_option_are_taken():
    taken = build_parser().parse_args(["eval", "--model", "m", "--dataset", "d", "--output", "o", "--top-p", "1"])
    assert taken.top_p == 1
