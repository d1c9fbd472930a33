"""`trl-ulorl verify` from its arguments to its files."""

import json

import pytest
from datasets import Dataset

from trl_ulorl.cli import main, peers

LINES = [
    {"prediction": r"\boxed{1/2}", "reference": "0.5", "id": 7},
    {"prediction": r"\boxed{x+1}", "reference": "x+2"},
    {"prediction": "It is 12", "reference": 12},
    {"prediction": r"\boxed{\sin(10^{1000000})}", "reference": "3"},
]


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n", encoding="utf-8")
    return path


def read(text):
    return [json.loads(line) for line in text.splitlines()]


def test_lines_come_out_with_verdict_and_stage(cases, tmp_path, capsys):
    output = tmp_path / "judged.jsonl"
    assert main(["verify", str(cases), "--output", str(output)]) == 0
    judged = read(output.read_text(encoding="utf-8"))
    assert [(line["verdict"], line["stage"]) for line in judged] == [
        (1, "numeric"),
        (0, "symbolic"),
        (1, "exact"),
        (None, "refused"),
    ]
    assert [{**line, "verdict": 0, "stage": ""} for line in judged] == [
        {**x, "verdict": 0, "stage": ""} for x in LINES
    ]
    assert capsys.readouterr().out == (
        "4 pairs: 2 equal, 1 different, 1 undecided; by stage: numeric 1, symbolic 1, exact 1, refused 1\n"
    )
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_without_output_the_lines_go_to_standard_output(cases, capsys):
    assert main(["verify", str(cases), "--strict"]) == 0
    captured = capsys.readouterr()
    assert [line["verdict"] for line in read(captured.out)] == [1, 0, 0, None]
    assert "4 pairs: 1 equal, 2 different, 1 undecided" in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no lines"),
        ('{"prediction": "1", "reference": "1"}\n{', "line 2 is no JSON"),
        ("[1]", "line 1 is list, not an object"),
        ('{"prediction": "1"}', "line 1 has no `reference`"),
        ('{"prediction": 1, "reference": "1"}', "`prediction` of type int: it must be text. Convert it."),
        ('{"prediction": "1", "reference": null}', "`reference` of type NoneType: it must be text or a number"),
    ],
)
def test_bad_input(content, message, tmp_path, capsys):
    path = tmp_path / "cases.jsonl"
    path.write_text(content, encoding="utf-8")
    assert main(["verify", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_other_files(suffix, tmp_path, capsys):
    rows = Dataset.from_list([{"prediction": r"\boxed{1/2}", "reference": "0.5"}] * 2)
    path = tmp_path / f"cases.{suffix}"
    {"json": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet}[suffix](path)
    assert main(["verify", str(path)]) == 0
    assert [line["verdict"] for line in read(capsys.readouterr().out)] == [1, 1]


def test_other_files_that_are_none(tmp_path, capsys):
    (tmp_path / "cases.parquet").write_text("no parquet")
    assert main(["verify", str(tmp_path / "cases.parquet")]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_bad_paths(cases, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none.jsonl")]) == 2
    assert "can't be read" in capsys.readouterr().err
    assert main(["verify", str(cases), "--output", str(tmp_path / "no" / "out.jsonl")]) == 2
    assert "Make the folder first" in capsys.readouterr().err


def test_compare_shows_what_math_verify_judges_differently(cases, tmp_path, capsys):
    with cases.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prediction": r"\boxed{27\text{ cm}}", "reference": "0.27 m"}) + "\n")
    assert main(["verify", str(cases), "--output", str(tmp_path / "out.jsonl"), "--compare"]) == 0
    report = capsys.readouterr().out
    assert "line 5: 1 (units), math-verify 0: '27 cm' against '0.27 m'" in report
    assert "line 1:" not in report


def test_compare_without_math_verify_is_refused(cases, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["verify", str(cases), "--compare"]) == 2
    assert 'pip install "trl-ulorl[math]"' in capsys.readouterr().err


def test_a_peer_that_hangs_is_killed_and_started_anew():
    with peers.Peer("math-verify", time_limit=0.5) as peer:
        assert peer.verify(r"$\frac{1}{2}$", "$0.5$")[0::2] == (True, "")
        peer._process.send_signal(19)  # SIGSTOP
        assert peer.verify("$1$", "$1$")[0::2] == (None, "killed")
        assert peer.verify("$1$", "$1$")[0::2] == (True, "")
