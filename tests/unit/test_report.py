"""The report's data: its numbers are those of the logs, what is not recorded says so, and text never becomes markup."""

import base64
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_run import SIGMA, closed_groups, logged_steps, sample, write_lines, write_run

from trl_ulorl.cli import build_parser, main
from trl_ulorl.records import METRICS, ROLLOUTS, RUN, write_json
from trl_ulorl.report import statistics
from trl_ulorl.report.page import evenly, findings, model_name, seconds, tiles, visible
from trl_ulorl.report.run import DISAGREEMENTS, NoRunError, Rollouts, read_run
from trl_ulorl.report.statistics import Series
from trl_ulorl.samples import SAMPLES

ROOT = Path(__file__).parents[2]


def report_of(folder):
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def charts_of(page):
    """What the page gives to plotly."""
    return json.loads(re.search(r'<script type="application/json" id="plotted">(.*?)</script>', page, re.DOTALL)[1])[
        "charts"
    ]


def numbers(values):
    """plotly's arrays, which are lists or base64."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return values


def curve(charts, chart, name, *, is_mean=False):
    """Steps and values of a curve as logged, or of its running mean."""
    traces = [trace for trace in charts[chart]["data"] if trace["name"] == name]
    trace = traces[-1 if is_mean else 0]
    return numbers(trace["x"]), numbers(trace["y"])


def text_of(page):
    """The page's words, without its scripts, styles and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_curves_are_what_was_logged(tmp_path):
    history, _ = write_run(tmp_path)
    charts = charts_of(report_of(tmp_path))
    for chart, name, metric in (
        ("accuracy", "completed groups", "accuracy"),
        ("entropy", "token entropy", "entropy"),
        ("masked", "masked tokens", "dmmpts/masked_frac"),
        ("lengths", "completed, mean", "rollout/completed_length_mean"),
        ("truncated", "trained", "completions/clipped_ratio"),
    ):
        steps, values = curve(charts, chart, name)
        assert steps == [entry["step"] for entry in history]
        assert values == [entry[metric] for entry in history]
    values = [entry["entropy"] for entry in history]
    _, means = curve(charts, "entropy", "token entropy", is_mean=True)
    assert means == pytest.approx([np.mean(values[max(0, i - 2) : i + 1]) for i in range(len(values))])
    assert curve(charts, "entropy", "target sigma")[1] == [SIGMA, SIGMA]


def test_few_entries_are_drawn_without_a_mean(tmp_path):
    history, _ = write_run(tmp_path, num_steps=5)
    (accuracy,) = charts_of(report_of(tmp_path))["accuracy"]["data"]
    assert numbers(accuracy["y"]) == [entry["accuracy"] for entry in history]


def test_histograms_and_tables_are_those_of_the_rollouts(tmp_path):
    _, records = write_run(tmp_path)
    page = report_of(tmp_path)
    charts = charts_of(page)
    rows = [(record, rollout) for record in records for rollout in record["rollouts"]]
    ages = {"finished": {}, "trained": {}}
    for record, rollout in rows:
        for version, length in rollout["segments"]:
            for name in ("finished", "trained") if record["outcome"] == "trained" else ("finished",):
                age = record["left"] - version
                ages[name][age] = ages[name].get(age, 0) + length
    for trace in charts["ages"]["data"]:
        counts = ages[trace["name"].split()[0]]
        assert numbers(trace["y"]) == pytest.approx([counts[age] / sum(counts.values()) for age in sorted(counts)])
        assert f"({sum(counts.values()):,} tokens)" in trace["name"]
    finished, trained = charts["length-shares"]["data"]
    assert finished["name"] == f"finished ({len(rows)})"
    assert trained["name"] == f"trained ({sum(record['outcome'] == 'trained' for record, _ in rows)})"
    for trace in (finished, trained):
        assert sum(numbers(trace["y"])[:-1]) == pytest.approx(1)
    lengths = np.array([sum(n for _, n in rollout["segments"]) for _, rollout in rows])
    shown = f"all finished {len(rows)} {lengths.sum():,} {lengths.mean():,.1f}"
    assert shown in text_of(page)


def test_verifier_stages_are_counted(tmp_path):
    _, records = write_run(tmp_path)
    page = report_of(tmp_path)
    rollouts = [rollout for record in records for rollout in record["rollouts"]]
    for stage in ("exact", "numeric", "symbolic"):
        mine = [rollout for rollout in rollouts if rollout.get("stage") == stage]
        right = sum(rollout["rewards"][0] for rollout in mine)
        assert f" {stage} {len(mine)} {right:.0f} {len(mine) - right:.0f} 0 " in text_of(page)
    truncated = sum(rollout["finish"] == "length" for rollout in rollouts)
    assert truncated and f"truncated, not called {truncated} 0 {truncated} 0" in text_of(page)


def test_ledger_and_times_are_shown(tmp_path):
    write_run(tmp_path)
    words = text_of(report_of(tmp_path))
    ledger = json.loads((tmp_path / "run.json").read_text())["ledger"]
    assert " ".join(f"{value:,}" for value in ledger["groups"].values()) in words
    assert " ".join(f"{value:,}" for value in ledger["tokens"].values()) in words
    assert "decoding 3.0 min 60.0%" in words  # 30 steps of 6 s in steps of 10 s
    assert "waiting for rewards 15.0 s 5.0%" in words
    assert "all steps 5.0 min 100.0%" in words


def test_the_headline_is_the_runs(tmp_path):
    history, _ = write_run(tmp_path)
    evaluations = [
        {"eval_avg_at_k": 0.25, "eval_standard_error": 0.02, "step": 0},
        {"eval_avg_at_k": 0.5, "eval_standard_error": 0.025, "step": 30},
    ]
    write_lines(tmp_path / "metrics.jsonl", [evaluations[0], *history, evaluations[1]])
    shown = {tile["label"]: tile for tile in tiles(read_run(tmp_path))}
    assert shown["Held-out accuracy"]["figure"] == "50.0% ± 2.5"
    assert "from 25.0% in step 0" in shown["Held-out accuracy"]["remark"]
    assert shown["Training accuracy"]["figure"] == f"{np.mean([e['accuracy'] for e in history[-10:]]):.1%}"
    assert shown["Token entropy"]["figure"] == f"{np.mean([e['entropy'] for e in history[-10:]]):.3f} nats"
    assert "sigma 0.2" in shown["Token entropy"]["remark"]
    assert shown["Token age"]["figure"] == "1.50 versions"
    assert shown["Time"]["figure"] == "5.0 min"


def test_numbers_that_json_does_not_have_are_written_as_null(tmp_path):
    write_json(tmp_path / "a.json", {"error": math.nan, "ends": [-math.inf, (1.5, math.inf)], "n": 3})
    content = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert content == {"error": None, "ends": [None, [1.5, None]], "n": 3}


@pytest.mark.parametrize("error", [None, float("nan")])
def test_a_single_held_out_problem_has_no_standard_error(tmp_path, error):
    """Over one problem there is none: null in metrics.jsonl, NaN in a checkpoint's log and in older summaries."""
    measured = {"eval_avg_at_k": 0.5, "eval_standard_error": error, "step": 0}
    write_lines(tmp_path / METRICS, [measured, *logged_steps(6)])
    page = text_of(report_of(tmp_path))
    assert "Held-out accuracy 50.0% avg@k, step 0" in page
    summary = {"accuracy_before": 0.5, "accuracy_after": 0.75, "standard_error_before": error}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "standard_error_after": error, "steps": 6}))
    write_lines(tmp_path / METRICS, logged_steps(6))
    assert "Held-out accuracy 75.0% avg@k in step 6" in text_of(report_of(tmp_path))


def test_times_count_every_step_where_not_all_are_logged():
    history = logged_steps(20, every=5)
    seconds = statistics.phase_seconds(history, 0.5)  # two steps share a rollout
    assert seconds == pytest.approx({"decode": 60, "score": 5, "exchange": 2.5, "update": 132.5})


@given(st.integers(1, 5000), st.integers(2, 700))
def test_a_thinned_series_keeps_the_mean_of_equally_many_points(length, max_points):
    values = np.random.default_rng(length).normal(size=length)
    thinned = Series(np.arange(length, dtype=float), values).thinned(max_points)
    assert len(thinned) <= max_points
    parts = [values[start : start + thinned.per_point] for start in range(0, length, thinned.per_point)]
    assert thinned.values == pytest.approx([part.mean() for part in parts])
    counts = [len(part) for part in parts]
    assert np.average(thinned.values, weights=counts) == pytest.approx(values.mean())
    assert np.average(thinned.steps, weights=counts) == pytest.approx((length - 1) / 2)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=60), st.integers(0, 59))
def test_every_rollout_is_in_one_length_bin(lengths, num_trained):
    records = [
        {
            "group": index,
            "left": 0,
            "outcome": "trained" if index < num_trained else "filtered",
            "rollouts": [{"finish": "eos", "segments": [[0, length]], "rewards": []}],
        }
        for index, length in enumerate(lengths)
    ]
    bins = statistics.length_bins(Rollouts.from_records(records, 0))
    assert bins.finished.sum() == len(lengths) and bins.trained.sum() == min(num_trained, len(lengths))
    assert (bins.trained <= bins.finished).all()
    assert bins.edges[0] == min(lengths) and bins.edges[-1] == max(lengths) + 1


def test_timeline_windows_are_the_start_middle_and_end():
    records = [record for record in closed_groups(300) if record["outcome"] == "trained"]
    windows = statistics.timeline_windows(list(reversed(records)))
    count = statistics.WINDOW_ROLLOUTS // 4
    assert [record["group"] for record in windows["start"]] == [record["group"] for record in records[:count]]
    assert [record["group"] for record in windows["end"]] == [record["group"] for record in records[-count:]]
    assert len(windows["middle"]) == count
    assert list(statistics.timeline_windows(records[:5])) == ["all"]
    assert list(statistics.timeline_windows(records[: count + 5])) == ["start", "end"]
    assert statistics.timeline_windows(closed_groups(3)[2:]) == {}


def test_a_timeline_bar_is_a_segment(tmp_path):
    write_run(tmp_path, num_groups=9)
    bars = charts_of(report_of(tmp_path))["timeline-all"]["data"][0]
    trained = [r for r in closed_groups(9) if r["outcome"] == "trained"]
    segments = [pair for record in trained for rollout in record["rollouts"] for pair in rollout["segments"]]
    assert numbers(bars["x"]) == [length for _, length in segments]
    colours = {}
    for (version, _), colour in zip(segments, bars["marker"]["color"], strict=True):
        colours.setdefault(version, set()).add(colour)
    assert all(len(each) == 1 for each in colours.values())  # one colour per version, and another for each
    assert len(set.union(*colours.values())) == len(colours) > 1


def test_drift_by_age_is_in_the_order_of_ages():
    history = [
        {"step": step, **{f"importance/kl_age_{a}": float(step) for a in ("10+", "2", "0")}} for step in range(6)
    ]
    assert statistics.by_age(history, "kl") == {"0": 4.5, "2": 4.5, "10+": 4.5}


# --- what deserves a look ---------------------------------------------------------------------------------------------


def test_findings_are_the_trainers_alarms_and_what_is_not_finite(tmp_path):
    history, _ = write_run(tmp_path, max_steps=50)
    history[3]["loss"] = None
    history[10]["importance/stale_kl"] = 0.5
    history[12]["rollout/filled_groups"] = 2.0
    write_lines(tmp_path / "metrics.jsonl", history)
    found = findings(read_run(tmp_path))
    assert found[0] == "The run has come to step 30 of 50: it goes on, or it was stopped."
    assert found[1] == "`loss` was not finite in 1 log entries."
    assert found[2].startswith("Step 11: Tokens of older policies have drifted")
    assert "in 1 of 30 log entries" in found[3]
    assert len(found) == 4
    assert "Worth a look" in report_of(tmp_path)


def test_a_healthy_run_has_no_findings(tmp_path):
    write_run(tmp_path)
    assert findings(read_run(tmp_path)) == []
    assert "Worth a look" not in report_of(tmp_path)


# --- text stays text --------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>]]></script>&lt;b&gt; \u202e\x00\x1b[31m {{ 7*7 }} \ud800"
)


def test_completions_never_become_markup(tmp_path):
    _, records = write_run(tmp_path, texts=(HOSTILE,))
    records[0]["rollouts"][0]["stage"] = HOSTILE
    write_lines(tmp_path / "rollouts.jsonl", records)
    disagreement = {"prediction": HOSTILE, "reference": HOSTILE, "rules": 1, "judge": 0}
    write_lines(tmp_path / "disagreements.jsonl", [disagreement])
    content = json.loads((tmp_path / "_samples.json").read_text())
    for name in ("question", "prompt", "reference"):
        content["samples"][0][name] = HOSTILE
    content["samples"][0]["rollouts"][0]["extracted"] = HOSTILE
    (tmp_path / "_samples.json").write_text(json.dumps(content))
    run = json.loads((tmp_path / "run.json").read_text())
    run["model"], run["settings"]["run_name"], run["reward_functions"] = HOSTILE, HOSTILE, [HOSTILE]
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = report_of(tmp_path)
    assert page.count("<script") == 3 and page.count("</script>") == 3  # ours: the data, plotly, the page's own
    assert "<img" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.replace("<span", "")
    assert "\x00" not in page and "\x1b" not in page and "\u202e" not in page
    assert "{{ 7*7 }}" in page and "␛[31m" in page and "[U+202E]" in page
    labels = charts_of(page)["stages"]["data"][0]["y"]
    assert all("<" not in label for label in labels)  # plotly reads tags in labels


@given(st.text())
def test_visible_text_has_no_character_that_acts(text):
    shown = visible(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069]", shown)
    assert visible(shown) == shown


def test_the_page_allows_no_script_but_its_own_and_no_request(tmp_path):
    write_run(tmp_path)
    page = report_of(tmp_path)
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy.startswith("default-src 'none';")
    assert policy.count("'sha256-") == 2 and "unsafe-eval" not in policy
    assert not re.findall(r'(?:src|href)="(?!#)', re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


# --- what is not recorded, what is damaged ----------------------------------------------------------------------------


def whole_ledger(count):
    rest = {"filtered": 0, "set_aside": 0}
    return {
        "groups": {"admitted": count, "trained": count, **rest, "ready": 0, "unfinished": 0},
        "tokens": {"generated": count, "trained": count, **rest, "held": 0},
    }


def test_a_run_of_an_earlier_release_is_read(tmp_path):
    records = closed_groups(30)
    for record in records:
        for rollout in record["rollouts"]:
            rollout.pop("stage", None)
    write_lines(tmp_path / "rollouts.jsonl", records)
    summary = {"steps": 8, "ledger": whole_ledger(30), "accuracy_before": 0.4, "standard_error_before": 0.02}
    summary |= {"accuracy_after": 0.7, "standard_error_after": 0.01}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = report_of(tmp_path)
    words = text_of(page)
    assert "70.0% ± 1.0" in words and "from 40.0% in step 0" in words
    assert words.count("Not recorded.") >= 6
    for remedy in ("writes metrics.jsonl as it trains", "_samples.json . It is written", "run.json . UloRLTrainer"):
        assert remedy in words
    assert "No stage was recorded" in words
    assert "ages" in charts_of(page) and "accuracy" not in charts_of(page)


def test_the_log_of_a_checkpoint_is_read_where_there_is_no_other(tmp_path):
    for step in (10, 9):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "rollout").mkdir(parents=True)
        state = {"log_history": logged_steps(step)}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        ledger = whole_ledger(step)
        (folder / "rollout" / "ledger.json").write_text(json.dumps(ledger))
    (tmp_path / "checkpoint-11").mkdir()  # not whole
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"log_history": [')  # being written
    run = read_run(tmp_path)
    assert run.last_step == 10 and run.ledger[0] == whole_ledger(10)
    assert run.files == ("checkpoint-10/trainer_state.json", "checkpoint-10/rollout/ledger.json")
    assert "leave that at True" in text_of(report_of(tmp_path))


def test_the_newest_ledger_is_taken(tmp_path):
    history, _ = write_run(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    del run["ledger"]  # still training
    (tmp_path / "run.json").write_text(json.dumps(run))
    history[-1].update({"ledger/groups_admitted": 7.0, "ledger/groups_trained": 7.0, "ledger/tokens_generated": 5.0})
    write_lines(tmp_path / "metrics.jsonl", history)
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 12, "ledger": {"groups": {}, "tokens": {}}})
    )  # an older one
    balance, when = read_run(tmp_path).ledger
    assert balance == {"groups": {"admitted": 7, "trained": 7}, "tokens": {"generated": 5}}
    assert "step 30" in when


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    write_run(tmp_path, num_groups=12)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"group": 12, "ro')
    assert len(read_run(tmp_path).records) == 12


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not the folder of a run: it has neither `metrics.jsonl`"),
        ({"config.json": "{}"}, "Pass the `output_dir` of a training that has begun"),
        ({"metrics.jsonl": "[1]\n"}, "Line 1 of .*metrics.jsonl is no JSON object"),
        ({"metrics.jsonl": '{"loss": 1}\n'}, "Line 1 of .*metrics.jsonl` has no `step`"),
        ({"rollouts.jsonl": '{"group": 1}\n'}, "has no `left`: it was not written by a training"),
        ({"rollouts.jsonl": "{}}\n"}, "Line 1 of .* is no JSON .*Move it away"),
        ({"rollouts.jsonl": "", "run.json": "{"}, "run.json` can't be read .*Move it away"),
        ({"rollouts.jsonl": "", "run.json": "[]"}, "run.json` holds no JSON object"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, capsys, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(NoRunError, match=message):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_and_outputs_that_cannot_be_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere` is no folder. Pass the `output_dir`" in capsys.readouterr().err
    write_run(tmp_path / "run", num_steps=3, num_groups=6)
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path)]) == 2
    assert "is a folder. Name a file" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "no" / "r.html")]) == 2
    assert "Make the folder first" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out.startswith(str(tmp_path / "r.html"))


def test_a_missing_package_is_named_with_what_installs_it(tmp_path, capsys, monkeypatch):
    write_run(tmp_path, num_steps=3, num_groups=6)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("trl_ulorl.cli.report.find_spec", lambda name: None if name == "plotly" else object())
    assert main(["report", str(tmp_path)]) == 2
    assert 'pip install "trl-ulorl[report]"' in capsys.readouterr().err


def test_an_empty_run_has_a_report(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [])
    words = text_of(report_of(tmp_path))
    assert "Not recorded." in words


def test_help_needs_no_heavy_import():
    code = "import sys; from trl_ulorl.cli import main; main(['report', '--help'])"
    check = "assert not {'plotly', 'jinja2', 'numpy', 'torch', 'trl'} & set(sys.modules), sorted(sys.modules)"
    program = f"try:\n    {code}\nexcept SystemExit:\n    {check}\n"
    run = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "RUN_DIR/report.html" in run.stdout


# --- small things -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/somewhere/of/mine/model", "model"),
        ("./model", "model"),
        ("outputs/a/b", "b"),
        ("gpt2", "gpt2"),
        (None, "a model that has no name"),
    ],
)
def test_a_report_names_the_model_but_not_where_it_lies(name, shown):
    assert model_name(name) == shown


def test_seconds_are_shown_in_a_unit_that_leaves_some():
    assert [seconds(each) for each in (0.04, 59, 119, 121, 7200, 86400)] == [
        "0.0 s",
        "59.0 s",
        "119.0 s",
        "2.0 min",
        "2.0 h",
        "24.0 h",
    ]


@given(st.integers(0, 200), st.integers(2, 30))
def test_evenly_spread_items_hold_both_ends(length, count):
    items = list(range(length))
    chosen = evenly(items, count)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(length, count)
    if items:
        assert chosen[0] == items[0] and chosen[-1] == items[-1]


def test_only_some_samples_are_shown_and_the_page_says_so(tmp_path):
    write_run(tmp_path)
    samples = [sample(left, f"text of {left}") for left in range(1, 41)]
    (tmp_path / "_samples.json").write_text(json.dumps({"every": 1, "samples": samples}))
    words = text_of(report_of(tmp_path))
    assert "Samples: 16 of the 40 recorded, evenly spread." in words
    assert words.count("segment 2 · version") == 16
    assert "40 tokens not shown" in words


def test_docs_name_every_option_and_file():
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (commands,) = (each for each in build_parser()._actions if each.choices)
    options = {name for action in commands.choices["report"]._actions for name in action.option_strings}
    assert options - {"-h", "--help"} == {"--output"}
    assert "`--output FILE.html`" in text
    for name in (RUN, METRICS, ROLLOUTS, SAMPLES, DISAGREEMENTS, "summary.json"):
        assert f"| `{name}` |" in text
