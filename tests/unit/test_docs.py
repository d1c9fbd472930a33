"""The documentation keeps up with the code: names, fields, defaults and metrics, in both directions."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from trl import GRPOConfig

import trl_ulorl
from trl_ulorl import DMMPTsConfig, UloRLConfig
from trl_ulorl.diagnostics import UpdateSums
from trl_ulorl.objective import NUM_STATS, importance_metrics
from trl_ulorl.rewards import RuleAudit, VerifierReward
from trl_ulorl.rewards.verify import STAGE_NAMES
from trl_ulorl.rollout.pool import Finish, Ledger, RolloutGroup, Segment
from trl_ulorl.rollout.report import (
    CompletedGroup,
    StepReport,
    batch_metrics,
    completed_metrics,
    ledger_metrics,
    step_metrics,
)

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OWN_METRIC = re.compile(r"accuracy|(?:rollout|ledger|importance|dmmpts|verifier)/\S+")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows_of(text):
    """Map the names in the first column of all tables to their rows' other cells."""
    rows = {}
    for line in text.splitlines():
        match = re.match(r"\| `([^`]+)` \|(.*)\|$", line)
        if match:
            rows[match[1]] = [cell.strip() for cell in match[2].split(" | ")]
    return rows


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# -------------------------------------------------------------------------------------------------------- public names


@pytest.mark.parametrize("name", trl_ulorl.__all__)
def test_public_name_is_in_the_docs(name):
    assert name in rows_of(text_of("index.md"))


# -------------------------------------------------------------------------------------------------------------- fields


def defaults_of(config_class):
    return {
        field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory
        for field in dataclasses.fields(config_class)
    }


def own_defaults():
    """Defaults of the fields that `UloRLConfig` adds or changes, and of `DMMPTsConfig`'s."""
    parent = defaults_of(GRPOConfig)
    own = {name: default for name, default in defaults_of(UloRLConfig).items() if parent.get(name, ...) != default}
    return {**own, **defaults_of(DMMPTsConfig)}


@pytest.mark.parametrize("name", own_defaults())
def test_field_has_a_row_with_its_default(name):
    default = own_defaults()[name]
    shown = default() if callable(default) else default
    assert rows_of(text_of("config.md"))[name][0] == f"`{shown}`"


def test_config_page_names_no_field_that_does_not_exist():
    known = {field.name for field in dataclasses.fields(UloRLConfig)} | set(defaults_of(DMMPTsConfig))
    derived = {"steps_per_generation"}
    single_words = {name for name in rows_of(text_of("config.md")) if re.fullmatch(r"[a-z_]+", name)}
    assert single_words - derived <= known
    assert set(own_defaults()) <= single_words


# ------------------------------------------------------------------------------------------------------------- metrics


def scored_group():
    group = RolloutGroup.start(
        group_id=0, row_index=0, prompt_ids=[1], max_length=2, admitted_version=0, num_generations=2
    )
    for rollout in group.rollouts:
        rollout.extend(Segment.from_values([1, 2], [0.0, 0.0], 0), Finish.EOS)
        rollout.rewards = np.array([rollout.index], dtype=np.float32)
    return group


def metrics_of_the_rollout():
    group = scored_group()
    return [
        *step_metrics(StepReport()),
        *batch_metrics([group], 1),
        *completed_metrics([CompletedGroup.of(group)], 0),
        *ledger_metrics(Ledger().balance(ready=0, unfinished=0, held_tokens=0)),
    ]


def metrics_of_an_update():
    ones = torch.ones(1, 3)
    sums = UpdateSums(DMMPTsConfig(), num_ages=3, epsilon_low=0.2, epsilon_high=0.2)
    inputs = {
        "advantages": torch.ones(1),
        "completion_mask": ones,
        "sampling_per_token_logps": -ones,
        "token_ages": torch.tensor([[0, 1, 2]]),
    }
    sums.add(inputs, -ones, ones, torch.zeros(1, 3, dtype=torch.bool), torch.ones(3))
    return [*sums.metrics(sums.take()), *importance_metrics(torch.ones(3, NUM_STATS))]


def metrics_of_the_verifier():
    class Judge:
        def judge(self, pairs):
            return [False] * len(pairs)

    names = []
    reward = VerifierReward(audit=RuleAudit(Judge(), fraction=1))
    boxes = [r"\boxed{1}", r"\boxed{2}"]
    reward(completions=boxes, answer=["1", "1"], log_metric=lambda name, value: names.append(name))
    return names


def metrics_written_out_in_the_source():
    """Names that stand in the source as plain strings, wherever they are emitted."""
    pattern = re.compile(rf'"({OWN_METRIC.pattern})"')
    return [
        name
        for path in (ROOT / "trl_ulorl").rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
        if re.fullmatch(r"accuracy|[a-z]+/[a-z0-9_]+", name)
    ]


def normalised(name):
    name = re.sub(r"_age_\d+\+?$", "_age_<a>", name)
    return re.sub(r"^verifier/stage_\w+_frac$", "verifier/stage_<name>_frac", name)


def emitted():
    names = [
        *metrics_of_the_rollout(),
        *metrics_of_an_update(),
        *metrics_of_the_verifier(),
        *metrics_written_out_in_the_source(),
    ]
    return {normalised(name) for name in names}


def test_names_are_collected_from_every_source():
    """The tests below would pass on an empty list."""
    assert {
        "accuracy",
        "rollout/rounds",
        "rollout/in_flight",  # written out in the collector
        "rollout/age_mean",
        "ledger/groups_set_aside",
        "importance/kl_age_<a>",
        "importance/stale_ess",
        "dmmpts/masked_frac",
        "verifier/stage_<name>_frac",
        "verifier/audit_false_negative_frac",
        "verifier/failed",
    } <= emitted()


@pytest.mark.parametrize("name", sorted(emitted()))
def test_metric_has_a_row(name):
    rows = rows_of(text_of("metrics.md"))
    assert name in rows, f"{name} needs a row in docs/metrics.md"
    formula, unit = rows[name][:2]
    assert formula and unit


def test_no_row_for_a_metric_that_nothing_emits():
    documented = {name for name in rows_of(text_of("metrics.md")) if OWN_METRIC.fullmatch(name)}
    assert documented <= emitted()


@each_page
def test_metrics_mentioned_anywhere_exist(page):
    mentioned = set(re.findall(r"`([^`\s]+)`", page.read_text(encoding="utf-8")))
    own = {name for name in mentioned if OWN_METRIC.fullmatch(name) and not name.endswith(("/", "…"))}
    own -= {"ledger/groups_<name>", "ledger/tokens_<name>"}
    assert {normalised(name) for name in own} <= emitted()


def test_every_stage_of_the_verifier_is_named():
    for page in ("metrics.md", "rewards.md"):
        for stage in STAGE_NAMES:
            assert f"`{stage}`" in text_of(page), (page, stage)


# --------------------------------------------------------------------------------------------------- code, links, pages


@each_page
def test_yaml_blocks_hold_fields_of_the_configuration(page):
    known = {field.name for field in dataclasses.fields(UloRLConfig)}
    for block in code_blocks(page, "yaml"):
        assert set(yaml.safe_load(block)) <= known


def test_quickstart_has_blocks_to_check():
    page = ROOT / "docs" / "quickstart.md"
    assert code_blocks(page, "python")
    assert code_blocks(page, "yaml")


@each_page
def test_keyword_arguments_of_configurations_are_fields(page):
    known = {field.name for field in dataclasses.fields(UloRLConfig)}
    for block in code_blocks(page, "python"):
        for call in re.findall(r"UloRLConfig\((.*?)^\s*\)", block, re.MULTILINE | re.DOTALL):
            # A field stands at the start of its line; deeper keywords are those of nested calls.
            assert set(re.findall(r"^\s+(\w+)=", call, re.MULTILINE)) <= known


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([\w/]+\.md)?(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), (target, anchor)


def test_navigation_lists_every_page_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [path for entry in site["nav"] for path in entry.values()]
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in PAGES]
