"""The scripts of benchmarks/paper: two short runs, made for real, stand for those of every arm."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from trl_ulorl.cli import training

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
REDUCED = ["--steps", "3", "--seeds", "2", "--problems", "4"]
FIGURES = {
    "fig2_importance": ["fig2_importance"],
    "fig4_masking": ["fig4_masking"],
    "fig5_sigma": ["fig5_sigma"],
    "gate": ["gate"],
    "mastered": ["mastered"],
    "ages": ["ages"],
    "overlong": ["overlong"],
    "rewards": ["rewards"],
    "table2_ablation": ["table2_ablation"],
    "table3_length": ["table3_length"],
    "sweeps": ["sweep_segments", "sweep_learning_rate", "sweep_sigma", "sweep_tau"],
    "wall_clock": ["wall_clock"],
    "pois_guards": ["pois_guards"],
}


@pytest.fixture(scope="module")
def paper():
    """Import a script by name, as if it were started from its folder."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module
    for name in names & sys.modules.keys():  # such plain names may be others' too
        del sys.modules[name]


@pytest.fixture(scope="module")
def runs(paper, tmp_path_factory):
    """The module `runs`, with a folder of its own for the runs."""
    module = paper("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUNS", tmp_path_factory.mktemp("runs"))
        yield module


@pytest.fixture(scope="module")
def short_runs(runs):
    """One run of ours, with masking, and one of stock TRL."""
    short = {"max_steps": 3, "eval_problems": 4, "eval_k": 2, "num_train_problems": 200}
    kinds = {"ulorl": {"dmmpts": {"tau": 0.99, "sigma": 0.5}}, "trl": {"trainer": "trl", "dmmpts": "none"}}
    settings = [runs.setting({**short, **options}, 1) for options in kinds.values()]
    return dict(zip(kinds, runs.complete(settings, jobs=2), strict=True))


@pytest.mark.slow
def test_a_run_is_made_once_and_says_what_it_measured(runs, short_runs):
    ours, stock = short_runs["ulorl"], short_runs["trl"]
    for run in (ours, stock):
        assert [entry["step"] for entry in run["history"]] == [1, 2, 3]
        assert all(0 < entry["entropy"] < 1 and 0 <= entry["accuracy"] <= 1 for entry in run["history"])
        seconds = [entry["cpu_seconds"] for entry in run["history"]]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert 8 * run["accuracy"] == pytest.approx(round(8 * run["accuracy"]))  # of 4 problems, 2 answers each
    assert stock["ages"] is None and "rollout/age_mean" not in stock["history"][0]
    written = runs.run_path(ours["setting"]).stat().st_mtime_ns
    assert runs.complete([ours["setting"]], jobs=1) == [ours]
    assert runs.run_path(ours["setting"]).stat().st_mtime_ns == written


@pytest.mark.slow
def test_ages_are_those_that_the_trainer_logs(short_runs):
    ages = short_runs["ulorl"]["ages"]["all"]
    history = short_runs["ulorl"]["history"]
    trained = history[-1]["ledger/tokens_trained"]  # taken before the last update
    total = sum(ages.values())
    assert total > trained > 0
    # Every step trains on 64 completions; its mean age is over their tokens.
    tokens = [64 * entry["completions/mean_length"] for entry in history]
    logged = sum(entry["rollout/age_mean"] * count for entry, count in zip(history, tokens, strict=True))
    assert sum(int(age) * count for age, count in ages.items()) == pytest.approx(logged, rel=1e-3)
    assert sum(tokens) == pytest.approx(total, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("script", FIGURES)
def test_every_script_makes_its_figure(script, paper, runs, short_runs, tmp_path, monkeypatch):
    make_settings = runs.setting

    def seeded(overrides, seed):
        """Check an arm's options as the training script would, and let one of the short runs stand for it."""
        options = make_settings(overrides, seed)
        assert options["max_steps"] == 3 and options["eval_problems"] == 4
        kind = options["trainer"]
        if kind == "ulorl" and seed == 1:
            known = {name: value for name, value in options.items() if name != "trainer"}
            config = tmp_path / "config.yaml"
            config.write_text(yaml.safe_dump({**known, "output_dir": str(tmp_path)}))
            training.parse(["--config", str(config)])
        runs.run_path(options).write_text(json.dumps(short_runs[kind]))
        return options

    monkeypatch.setattr(runs, "setting", seeded)
    module = paper(script)
    if hasattr(module, "make_model"):
        monkeypatch.setattr(module, "make_model", lambda hidden_size: None)  # minutes each
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *REDUCED, "--output", str(tmp_path)])
    module.main()
    for name in FIGURES[script]:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert content["options"] == {"steps": 3, "seeds": 2, "problems": 4}
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_reward_functions(paper):
    functions = paper("reward_functions")
    functions._draws.cache_clear()
    prompt = [{"role": "user", "content": "1+2="}]
    right, wrong = ([{"role": "assistant", "content": rf"\boxed{{{answer}}}"}] for answer in (3, 4))
    rows = {"prompts": [prompt] * 4, "completions": [right, wrong, wrong, right], "answer": ["3"] * 4}
    assert functions.signed_reward(**rows) == [1, -1, -1, 1]
    drawn = [functions.loose_reward(**rows) for _ in range(250)]
    functions._draws.cache_clear()
    assert drawn[0] == functions.loose_reward(**rows)
    flipped = np.abs(np.array(drawn) - [1, 0, 0, 1])
    assert set(np.unique(flipped)) == {0, 1}
    # 1000 draws: a standard error of 0.015.
    assert flipped.mean() == pytest.approx(functions.FLIPPED, abs=0.05)


def test_shares_by_probability(paper):
    # Advantages 1 and 2, probabilities 0.6 and 0.995: gradients 0.4 and 0.01.
    rows = paper("mastered").shares(np.array([0.6, 0.995]), np.array([1.0, 2.0]), np.array([0.6, 0.2]))
    assert [row["tokens"] for row in rows] == [0, 0.5, 0, 0, 0, 0.5, 0]
    assert rows[1]["gradient"] == pytest.approx(0.4 / 0.41) and rows[5]["entropy"] == pytest.approx(0.25)


def test_intervals_of_three_seeds(paper):
    study = paper("study")
    # 1, 2, 6: mean 3, deviation sqrt(7), t = 4.303: half-width 4.303 * sqrt(7 / 3) = 6.573.
    assert study.interval([1.0, 2.0, 6.0]) == {"mean": 3.0, "low": -3.573, "high": 9.573, "each": [1.0, 2.0, 6.0]}
    assert study.interval([2.0]) == {"mean": 2.0, "low": None, "high": None, "each": [2.0]}
    assert study.running_mean([1.0] * 8 + [3.0] * 8) == [1.0] * 8 + [2.0] + [3.0] * 7
    assert study.running_mean([1.0, float("nan"), 3.0]) == [1.0, 1.0, 3.0]


def test_a_figure_of_some_arms(paper, monkeypatch, capsys):
    study = paper("study")
    arms = (study.Arm("one"), study.Arm("two"), study.Arm("three"))
    monkeypatch.setattr(sys, "argv", ["figure.py", "--arms", "one", "three"])
    seen = []
    monkeypatch.setattr(study, "make_runs", lambda chosen, options: seen.extend(chosen) or {})
    with pytest.raises(KeyError):  # there are no runs
        study.figure("figure", None, arms, ())
    assert seen == [arms[0], arms[2]]
    monkeypatch.setattr(sys, "argv", ["figure.py", "--arms", "four"])
    with pytest.raises(SystemExit):
        study.figure("figure", None, arms, ())
    assert "'four'" in capsys.readouterr().err


def test_the_gate_opens_where_half_of_the_responses_stay_below(paper):
    gate = paper("gate")

    def run(*shares):
        history = [{"step": n + 1, "dmmpts/low_entropy_frac": share} for n, share in enumerate(shares)]
        return {"history": history}

    assert gate.opening(run(0.1, 0.9, 0.1, 0.2, 0.5, 0.6, 0.7)) == 4
    assert gate.opening(run(0.1, 0.2, 0.3, 0.4)) is None
    early, late = run(0.0, 0.0, 0.5, 0.5, 0.5), run(0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5)
    cut = gate.aligned([early, late, run(0.0, 0.0, 0.0)])
    assert [[entry["step"] for entry in each["history"]] for each in cut] == [[-2, -1, 0, 1, 2]] * 2
    assert [each["history"][2]["dmmpts/low_entropy_frac"] for each in cut] == [0.5, 0.5]


def test_on_policy_shares(paper, runs, tmp_path):
    # One group of two rollouts, trained by version 3: one ended in its second segment under version 2, the other under 1.
    rollouts = [{"segments": [[0, 16], [2, 4]]}, {"segments": [[1, 10]]}]
    groups = [
        {"outcome": "trained", "left": 3, "rollouts": rollouts},
        {"outcome": "filtered", "left": 3, "rollouts": rollouts},
        {"outcome": "trained", "left": 3, "rollouts": [{"segments": [[1, 8], [3, 6]]}, {"segments": [[3, 5]]}]},
    ]
    log = tmp_path / "rollouts.jsonl"
    log.write_text("".join(json.dumps(group) + "\n" for group in groups))
    ages = runs.ages(log)
    assert ages["all"] == {"0": 11, "1": 4, "2": 18, "3": 16}
    assert ages["last_segment"] == {"0": 11, "1": 4, "2": 10}
    assert ages["last_segment_alone"] == {"0": 15, "1": 10}
    shares = paper("ages").shares({"ages": ages})
    assert shares["all tokens"] == 11 / 49
    assert shares["last segments"] == 11 / 25
    assert shares["last segments, without the wait in the pool"] == 15 / 25
    assert shares["last segments of rollouts with several"] == 6 / 10
    assert shares["mean age, last segments"] == 24 / 25


def test_table_1_is_read_from_the_speed_benchmark(paper):
    table1 = paper("table1_speed")
    phases = ("completions_per_second_rollout_blocks", "completions_per_second_step_blocks")
    # Two blocks at half the pace in between.
    arms = {
        "segments_1": {phase: [10.0, 5.0, 10.0] for phase in phases},
        "segments_4": {phases[0]: [20.0, 10.0, 20.0], phases[1]: [15.0, 7.5, 15.0]},
    }
    assert table1.rows(arms) == [("segments_1", 1, 1, 1), ("segments_4", 2, 1.5, pytest.approx(2.063, abs=1e-3))]
    with pytest.raises(ValueError, match="lack `segments_1`"):
        table1.rows({"trl": arms["segments_1"]})


def test_figures_are_compared_with_the_committed_ones(paper):
    compared = paper("compare").compared
    finals = {"accuracy": {"mean": 0.6, "low": 0.5, "high": 0.7}}
    for mean, is_in in ((0.55, True), (0.75, False)):
        (row,) = compared(
            {"arms": {"POIS": {"finals": {"accuracy": {"mean": mean}}}}}, {"arms": {"POIS": {"finals": finals}}}
        )
        assert row == ("POIS", "accuracy", mean, finals["accuracy"], is_in)
