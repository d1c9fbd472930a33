"""`trl-ulorl clean`: the fate of rows made by hand, conservation, restarts, shapes of data sets, and what it refuses."""

import argparse
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from trl_ulorl.cli import build_parser, main
from trl_ulorl.data import chunks, cleaning
from trl_ulorl.data.audit import RULES
from trl_ulorl.data.cleaning import RESULTS, CleaningSettings, clean
from trl_ulorl.data.sources import find_columns, questions, read_answer, read_prompt

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
ROWS = [json.loads(line) for line in (DATA / "cleaning_rows.jsonl").read_text(encoding="utf-8").splitlines()]
EVALUATION = str(DATA / "cleaning_evaluation.jsonl")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def contents(folder):
    return {name: (Path(folder) / name).read_bytes() for name in RESULTS}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def by_row(audit):
    entries = {}
    for entry in audit:
        entries.setdefault(entry["row"], []).append(entry)
    return entries


# --------------------------------------------------------------------------------------------------------------- fates


@pytest.fixture(scope="module")
def hand_made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    clean(CleaningSettings(str(DATA / "cleaning_rows.jsonl"), against=(EVALUATION,)), folder)
    return by_row(read_lines(folder / "audit.jsonl")), folder


def test_there_are_ten_rows_for_each_rule():
    counts = Counter(row["group"] for row in ROWS)
    assert set(counts) == {
        "multi_part", "multiple_choice", "proof", "true_false", "short_answer", "overlong", "duplicate", "leakage",
    }  # fmt: skip
    assert min(counts.values()) >= 10


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{ROWS[number]['group']}-{number}")
def test_fate_of_a_row(hand_made, number):
    row, (*_, last) = ROWS[number], hand_made[0][number]
    assert last["action"] == row["fate"], last["reason"]
    if row["fate"] != "kept":
        assert last["rule"] == row["rule"]
        assert last["reason"]
    if row["fate"] == "changed":
        new = {"question": row.get("new_question") or row["problem"], "answer": row.get("new_answer") or row["answer"]}
        assert last["after"] == new


def test_every_row_has_one_fate_and_the_kept_ones_are_there(hand_made):
    audit, folder = hand_made
    assert sorted(audit) == list(range(len(ROWS)))
    fates = [entries[-1]["action"] for entries in audit.values()]
    assert set(fates) == {"kept", "changed", "dropped"}
    for entries in audit.values():
        assert all(entry["action"] == "changed" for entry in entries[:-1])
    kept = read_lines(folder / "kept.jsonl")
    left = [number for number, entries in audit.items() if entries[-1]["action"] != "dropped"]
    assert len(kept) == len(left)
    for number, row in zip(left, kept, strict=True):
        original = ROWS[number]
        assert list(row)[:2] == ["prompt", "answer"] and "problem" not in row
        assert row["group"] == original["group"] and row["fate"] == original["fate"]  # columns that no rule touches
        last = audit[number][-1]
        expected = last["after"] or {"question": original["problem"], "answer": original["answer"]}
        assert row["prompt"] == [{"role": "user", "content": expected["question"]}]
        assert row["answer"] == expected["answer"]


def test_summary_and_page_tell_the_counts(hand_made):
    audit, folder = hand_made
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rows"] == len(ROWS) == summary["kept"] + summary["dropped"]
    entries = [entry for lines in audit.values() for entry in lines]
    for rule, counts in summary["rules"].items():
        for action in ("changed", "dropped"):
            assert counts[action] == sum(entry["rule"] == rule and entry["action"] == action for entry in entries)
    page = (folder / "audit.html").read_text(encoding="utf-8")
    assert "http" not in page.replace("https://", "http://").split("<table>")[0]  # nothing is loaded
    for entry in entries:
        if entry["action"] != "kept":
            assert f"<b>Row {entry['row']}</b>" in page


def test_a_rule_can_be_left_out(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [{"problem": "Is 91 prime?", "answer": "No"}])
    clean(CleaningSettings(source, skip=("true_false",)), tmp_path / "out")
    assert [row["answer"] for row in read_lines(tmp_path / "out" / "kept.jsonl")] == ["No"]


# ------------------------------------------------------------------------------------------------- the same every time


def many_rows(num_rows):
    """Rows of every kind, with duplicates and contradictions across chunks."""
    rows = []
    for number in range(num_rows):
        row = dict(ROWS[number % len(ROWS)])
        if number % 3:
            row["problem"] = row["problem"].replace("Find", f"For the case {number // 3} find")
        rows.append({"problem": row["problem"], "answer": row["answer"], "number": number})
    return rows


def test_chunks_and_streaming_don_t_show(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "rows.jsonl", many_rows(500))
    settings = CleaningSettings(source, against=(EVALUATION,))
    clean(settings, tmp_path / "once")
    clean(settings, tmp_path / "again")
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 37)
    clean(settings, tmp_path / "small")
    clean(CleaningSettings(source, against=(EVALUATION,), streaming=True), tmp_path / "streamed")
    once = contents(tmp_path / "once")
    for name in ("again", "small"):
        assert contents(tmp_path / name) == once
    streamed = contents(tmp_path / "streamed")
    assert streamed["kept.jsonl"] == once["kept.jsonl"] and streamed["audit.jsonl"] == once["audit.jsonl"]
    clean(settings, tmp_path / "once")  # over its own results
    assert contents(tmp_path / "once") == once


def test_interrupted_at_any_chunk_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 50)
    source = write_lines(tmp_path / "rows.jsonl", many_rows(400))
    clean(CleaningSettings(source), tmp_path / "whole")
    real = chunks.ChunkCleaner.clean
    done = []

    def stop_at(limit):
        def clean_chunk(self, number, first_row, table):
            if len(done) >= limit:
                raise KeyboardInterrupt
            done.append(number)
            return real(self, number, first_row, table)

        return clean_chunk

    for limit in (3, 5):
        monkeypatch.setattr(chunks.ChunkCleaner, "clean", stop_at(limit))
        with pytest.raises(KeyboardInterrupt):
            clean(CleaningSettings(source), tmp_path / "out")
        assert not any((tmp_path / "out" / name).exists() for name in RESULTS)
    monkeypatch.setattr(chunks.ChunkCleaner, "clean", stop_at(99))
    clean(CleaningSettings(source), tmp_path / "out")
    assert done == list(range(8))  # no chunk twice
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / cleaning.PARTIAL).exists()


def test_what_lies_there_of_other_settings_or_data_is_not_used(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "rows.jsonl", many_rows(60))
    monkeypatch.setattr(cleaning, "_put_together", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        clean(CleaningSettings(source), tmp_path / "out")
    monkeypatch.undo()
    write_lines(tmp_path / "rows.jsonl", many_rows(61))
    assert clean(CleaningSettings(source), tmp_path / "out").rows == 61


# With its workers, and by its own hand, so that the moment does not depend on how busy the machine is.
DIES_IN_THE_FOURTH_CHUNK = """
import os, signal, sys
from tqdm.auto import tqdm
from trl_ulorl.cli import main
from trl_ulorl.data import chunks, cleaning

class DyingBar(tqdm):
    def update(self, n=1):
        super().update(n)
        if self.n >= 3 * chunks.CHUNK_ROWS:
            os.killpg(0, signal.SIGKILL)

cleaning.tqdm = DyingBar
sys.exit(main())
"""


@pytest.mark.slow
def test_killed_half_way_and_restarted_equals_uninterrupted(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", many_rows(60_000))
    command = ["clean", source, "--num_proc", "2", "--output"]
    out = tmp_path / "out"
    dying = [sys.executable, "-c", DIES_IN_THE_FOURTH_CHUNK, *command, str(out)]
    killed = subprocess.run(dying, stderr=subprocess.DEVNULL, start_new_session=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "kept.jsonl").exists()
    assert len(list((out / cleaning.PARTIAL).glob("index-*.npy"))) < 12
    for folder, more in ((out, []), (tmp_path / "whole", ["--num_proc", "1"])):
        subprocess.run(
            [sys.executable, "-m", "trl_ulorl.cli", *command, str(folder), *more],
            check=True,
            timeout=300,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    assert contents(out) == contents(tmp_path / "whole")


# -------------------------------------------------------------------------------------------------- shapes of data sets

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line after "
    '"Answer:".'
)
SHAPES = {
    "dapo": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO.format("Find $1+1$.")}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b"},
    },
    "deepmath": {"question": "Find $1+1$.", "final_answer": "2", "difficulty": 4.5, "r1_solution_1": "..."},
    "openr1": {"problem": "Find $1+1$.", "solution": "It is $2$.", "answer": "2", "question_type": "MCQ"},
    "gsm8k": {"question": "Find $1+1$.", "answer": "One and one\n#### 2"},
    "math": {"problem": "Find $1+1$.", "solution": r"So it is $\boxed{2}$.", "level": "Level 1"},
    "trl_lib": {"prompt": [{"role": "user", "content": "Find $1+1$."}], "solution": "$2$"},
    "numbers": {"question": "Find $1+1$.", "answer": 2},
    "lists": {"question": "Find $1+1$.", "final_answer": ["2"]},
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_known_shapes_need_no_mapping(tmp_path, name, ending):
    row = SHAPES[name]
    if ending == "csv" and any(isinstance(cell, dict | list) for cell in row.values()):
        pytest.skip("no nested columns in CSV")
    path = tmp_path / f"rows.{ending}"
    rows = Dataset.from_list([row])
    {"jsonl": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}[ending](str(path))
    clean(CleaningSettings(str(path)), tmp_path / "out")
    (kept,) = read_lines(tmp_path / "out" / "kept.jsonl")
    content = DAPO.format("Find $1+1$.") if name == "dapo" else "Find $1+1$."
    assert kept["prompt"] == [{"role": "user", "content": content}]
    assert kept["answer"] == "2"
    used = {"prompt", "question", "problem", "answer", "final_answer"} | (
        {"solution"} if "answer" not in row else set()
    )
    assert {key: value for key, value in kept.items() if key not in ("prompt", "answer")} == {
        key: value for key, value in row.items() if key not in used
    }


def test_a_changed_question_stays_in_its_instructions(tmp_path):
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": DAPO.format("What is $1+1$? (A) $1$ (B) $2$")},
    ]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "B"}}
    source = write_lines(tmp_path / "rows.jsonl", [row])
    clean(CleaningSettings(source), tmp_path / "out")
    (kept,) = read_lines(tmp_path / "out" / "kept.jsonl")
    assert kept["prompt"] == [prompt[0], {"role": "user", "content": DAPO.format("What is $1+1$?")}]
    assert kept["answer"] == "2"


def test_instructions_don_t_make_questions_alike():
    texts = [read_prompt(DAPO.format(question)).question for question in ("Find $x$.", "Find $y$.")]
    assert texts == ["Find $x$.", "Find $y$."]


def test_columns_can_be_named(tmp_path):
    row = {"text": "Find $1+1$.", "meta": {"gold": "2"}, "answer": "wrong", "prompt": "not this"}
    source = write_lines(tmp_path / "rows.jsonl", [row])
    clean(CleaningSettings(source, prompt_column="text", answer_column="meta.gold"), tmp_path / "out")
    assert read_lines(tmp_path / "out" / "kept.jsonl") == [
        {"prompt": [{"role": "user", "content": "Find $1+1$."}], "answer": "2", "meta": {"gold": "2"}}
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ""),
        (" 3 ", "3"),
        (3, "3"),
        (3.0, "3"),
        (0.5, "0.5"),
        (float("nan"), ""),
        (["3"], "3"),
        (["1", 2], "1, 2"),
        (True, "True"),
    ],
)
def test_answers_of_other_types(value, expected):
    assert read_answer(value) == expected


def test_evaluation_sets_need_no_answers():
    assert len(list(questions(EVALUATION))) == 6


@pytest.mark.parametrize(
    ("name", "folder"), [("aime_2025", "math-ai/aime25"), ("beyond_aime", "ByteDance-Seed/BeyondAIME")]
)
def test_evaluation_sets_by_their_short_names(tmp_path, monkeypatch, name, folder):
    """With the Hub's files in a folder of the same name, which `load_dataset` takes first."""
    (tmp_path / folder).mkdir(parents=True)
    leaked = "Find the sum of all integer bases $b>9$ for which $17_b$ is a divisor of $97_b.$"
    write_lines(tmp_path / folder / "test.jsonl", [{"problem": leaked, "answer": "70"}])
    monkeypatch.chdir(tmp_path)
    write_lines(
        tmp_path / "mine.jsonl",
        [
            {"problem": leaked.replace("Find", "Compute"), "answer": "70"},
            {"problem": "Find $1+1$.", "answer": "2"},
        ],
    )
    assert main(["clean", "mine.jsonl", "--output", "out", "--against", name]) == 0
    first, second = read_lines(tmp_path / "out" / "audit.jsonl")
    assert (first["rule"], first["action"], second["action"]) == ("leakage", "dropped", "kept")
    assert f"{name}[0]" in first["reason"]


def test_every_split_of_an_evaluation_set_is_read(monkeypatch):
    splits = {"train": Dataset.from_dict({"problem": ["a"]}), "test": Dataset.from_dict({"question": ["b", "c"]})}
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, *, split, streaming: DatasetDict(splits))
    assert list(questions("some/set")) == ["a", "b", "c"]


def test_usual_names_come_in_order():
    columns = find_columns(["solution", "answer", "problem", "prompt"])
    assert (columns.prompt, columns.answer) == ("prompt", "answer")


# ----------------------------------------------------------------------------------------------------------- bad input

GOOD = {"problem": "Find $1+1$.", "answer": "2"}


FILES = {
    "good.jsonl": json.dumps(GOOD),
    "broken.jsonl": '{"problem": "a"\nnot json\n',
    "nothing.jsonl": "",
    "header.csv": "problem,answer\n",
    "broken.parquet": "PAR1 no parquet",
    "text.txt": "a",
    "no_question.jsonl": '{"x": "1", "answer": "2"}',
    "no_answer.jsonl": '{"problem": "1"}',
    "no_answers.jsonl": '{"problem": "Find $x$.", "answer": null}\n{"problem": "y", "answer": ""}\n',
    "number.jsonl": '{"problem": 7, "answer": "2"}',
    "mapping.jsonl": '{"problem": "a", "answer": {"b": 1}}',
}


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["good.jsonl", "--prompt_column", "q"], "`--prompt_column` ('q') is no column"),
        (["good.jsonl", "--answer_column", "a.b"], "`--answer_column` ('a.b') is no column"),
        (["no_question.jsonl"], "Name the column with `--prompt_column`"),
        (["no_answer.jsonl"], "Name the column with `--answer_column`"),
        (["no_answers.jsonl"], "2 no answer. Name the right columns"),
        (["broken.jsonl"], "can't be read"),
        (["broken.parquet"], "can't be read"),
        (["nothing.jsonl"], "is empty"),
        (["header.csv"], "with at least one row"),
        (["none.jsonl"], "check the path"),
        (["."], "can't be read"),
        (["text.txt"], "must be a file that ends in"),
        (["nobody/nothing"], "can't be read"),
        (["good.jsonl", "--against", "none.jsonl"], "check the path"),
        (["good.jsonl", "--against", "mapping.jsonl", "no_answers.jsonl", "header.csv"], "with at least one row"),
        (["number.jsonl"], "Row 0: A prompt"),
        (["mapping.jsonl"], "Row 0: An answer"),
        (["good.jsonl", "--skip", "missing"], "Choose from short_answer"),
        (["good.jsonl", "--reference_models", "a"], "Add another one"),
        (["good.jsonl", "--reference_models", "a", "a"], "Add another one"),
        (["good.jsonl", "--model", "."], "can't be loaded"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_explained_and_leaves_nothing(tmp_path, monkeypatch, capsys, arguments, remedy):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main(["clean", *arguments, "--output", "out"]) == 2
    assert remedy in capsys.readouterr().err
    assert not Path("out").exists()


def test_what_turns_out_to_be_broken_on_the_way_is_explained(tmp_path, monkeypatch, capsys):
    source = write_lines(
        tmp_path / "rows.jsonl", [{**GOOD, "x": "x" * 20_000}] * 600
    )  # more than one block of the reader
    with Path(source).open("a") as file:
        file.write('{"problem": broken\n')
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 200)
    assert main(["clean", source, "--output", str(tmp_path / "out"), "--streaming", "--num_proc", "1"]) == 2
    assert "can't be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_folder_can_t_be_a_file_or_in_use(tmp_path, capsys):
    source = write_lines(tmp_path / "good.jsonl", [GOOD])
    assert main(["clean", source, "--output", source]) == 2
    assert "Name another one" in capsys.readouterr().err
    with cleaning._locked(tmp_path / "out"):
        assert main(["clean", source, "--output", str(tmp_path / "out")]) == 2
    assert "Wait for it" in capsys.readouterr().err


def test_rows_without_an_answer_are_in_the_audit(tmp_path, capsys):
    source = write_lines(
        tmp_path / "rows.jsonl", [{"problem": "Find $x$.", "answer": None}, GOOD, {"problem": " ", "answer": "1"}]
    )
    assert main(["clean", source, "--output", str(tmp_path / "out")]) == 0
    assert "1 kept" in capsys.readouterr().out
    entries = read_lines(tmp_path / "out" / "audit.jsonl")
    assert [(entry["rule"], entry["action"]) for entry in entries] == [
        ("missing", "dropped"), ("all", "kept"), ("missing", "dropped"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- the command and its documentation


def options():
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {
        (action.option_strings or [action.metavar])[0]: action
        for action in commands.choices["clean"]._actions
        if action.dest != "help"
    }


PAGE = (ROOT / "docs" / "cleaning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", options())
def test_option_has_help_and_a_row_in_the_docs(name):
    assert options()[name].help
    assert re.search(rf"^\| `{re.escape(name)}[ `]", PAGE, re.MULTILINE)


def test_docs_name_no_option_that_does_not_exist():
    assert set(re.findall(r"(?<![\w-])--[a-z]\w*", PAGE)) <= set(options())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_row_in_the_docs(rule):
    assert re.search(rf"^\| `{rule}` \|", PAGE, re.MULTILINE)


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from trl_ulorl.cli import main\ntry: main(['clean', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'trl', 'datasets', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
