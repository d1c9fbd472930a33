"""What is added to TRL's model card."""

import pytest
from huggingface_hub import ModelCard

from trl_ulorl import UloRLConfig, model_card

LEDGER = {
    "groups": {"admitted": 6, "trained": 4, "filtered": 1, "set_aside": 0, "ready": 1, "unfinished": 0},
    "tokens": {"generated": 60, "trained": 40, "filtered": 10, "set_aside": 0, "held": 10},
}
HISTORY = [
    {"step": 1, "accuracy": 0.25, "entropy": 0.5},
    {
        "step": 1,
        "eval_avg_at_k": 0.4,
        "eval_standard_error": 0.021,
        "eval_pass_at_k": 0.7,
        "eval_maj_at_k": 0.5,
        "eval_truncated_fraction": 0.01,
        "eval_mean_length": 30.4,
    },
    {"step": 2, "accuracy": None, "entropy": 0.25},
]


def card_of(tmp_path, text, history=HISTORY, **overrides):
    path = tmp_path / "README.md"
    path.write_text(f"---\ntags:\n- trl\n---\n{text}")
    args = UloRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_completion_length=64, **overrides)
    model_card.add_run(path, args, steps=2, history=history, ledger=LEDGER)
    return ModelCard.load(path)


def test_the_run_stands_before_the_framework_versions(tmp_path):
    card = card_of(tmp_path, "# Card\n\nof [None](https://huggingface.co/None)\n\n### Framework versions\n\n- TRL\n")
    titles = ["# Card", "### Method", "### Settings", "### Figures", "### Ledger", "### Framework versions", "- TRL"]
    places = [card.text.index(title) for title in titles]
    assert places == sorted(places)
    assert card.data.tags == ["trl"]
    assert "of a model that is not on the Hub" in card.text


def test_a_template_without_that_title_gets_the_run_at_its_end(tmp_path):
    assert "### Ledger" in card_of(tmp_path, "# Card\n").text


def test_figures_are_the_last_ones_logged(tmp_path):
    text = card_of(tmp_path, "").text
    assert "After 2 optimizer steps" in text
    assert "| accuracy of the groups completed in a step | 0.250 |" in text
    assert "| token entropy, nats | 0.250 |" in text
    assert "| 1 | 40.0% ± 2.1 | 70.0% | 50.0% | 1.0% | 30 |" in text
    assert "| groups | 6 admitted | 4 trained, 1 filtered, 0 set aside, 1 ready, 0 unfinished |" in text


def test_a_single_held_out_problem_has_no_standard_error(tmp_path):
    text = card_of(tmp_path, "", [{**HISTORY[1], "eval_standard_error": float("nan")}]).text
    assert "| 1 | 40.0% | 70.0% | 50.0% | 1.0% | 30 |" in text


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({}, "in segments of 8; unfinished ones go on under the newer policy (schedule `segment`)"),
        (
            {},
            "**DMMPTs**: positive tokens of a probability above 0.99 are masked in responses whose entropy is below 0.2",
        ),
        ({"dmmpts": {"dynamic": False}}, "are masked in all responses"),
        ({"dmmpts": None}, "No masking of well-mastered positive tokens"),
        ({"importance_mode": "sais"}, "**SAIS** importance sampling, segment-aware"),
        ({"num_segments": 1}, "**On-policy rollout** (TOIS) of up to 64 tokens"),
        ({"overlong": "mask"}, "Truncated outputs are left out of the loss"),
        ({}, "| `learning_rate` | 1e-06 |"),
        ({}, "| `lr_scheduler_type` | constant |"),
        ({}, "| `segment_length` | 8 |"),
    ],
)
def test_method_and_settings_are_those_of_the_run(tmp_path, overrides, text):
    assert text in card_of(tmp_path, "", **overrides).text
