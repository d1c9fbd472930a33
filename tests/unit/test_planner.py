"""The planner: figures worked out by hand on small cases, the paper's Table 1, and helpers for lengths and curves."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from trl_ulorl import UloRLConfig, planner
from trl_ulorl.planner import (
    Figures,
    curve_decode_time,
    histogram_lengths,
    lognormal_lengths,
    recommended,
    simulate,
    standard_arms,
    stock_padding_ratio,
    whole_steps,
)
from trl_ulorl.rollout.pool import Segment
from trl_ulorl.rollout.simulated import linear_decode_time

STEP = linear_decode_time(1.0, 0.25)  # 1 s, and 0.25 s for each sequence


def small(arm, **overrides):
    values = {
        "lengths": [8],
        "max_completion_length": 8,
        "groups_per_batch": 2,
        "num_generations": 2,
        "decode_time": STEP,
        "num_steps": 4,
    }
    return simulate(arm, **{**values, **overrides})


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_stock_decodes_a_batch_to_its_end():
    """Four rollouts of 8 tokens: 8 steps over 4 sequences, and nothing is held beside the batch."""
    figures = small("trl", prompt_length=3)
    assert figures.rollout_seconds == pytest.approx(8 * STEP(4))
    assert figures.completions_per_second_rollout == pytest.approx(4 / (8 * STEP(4)))
    assert figures.trained_tokens == 32
    assert figures.occupancy == 1
    assert (figures.groups_held_mean, figures.groups_held_max) == (2, 2)
    assert (figures.age_mean, figures.age_max, figures.on_policy_frac) == (0, 0, 1)
    assert figures.prefilled_tokens_per_trained_token == 0
    assert figures.kv_tokens_max == 4 * (3 + 8)
    assert figures.pool_bytes_max == 8 * 32


def test_lengths_of_a_group_are_drawn_together():
    """A group of 2 and 6 tokens: 2 steps over both, 4 over one. Drawn apart, equal lengths would come up too."""
    figures = small("trl", lengths=[[2, 6]], groups_per_batch=1)
    assert figures.rollout_seconds == pytest.approx(2 * STEP(2) + 4 * STEP(1))
    assert figures.occupancy == pytest.approx(8 / 12)


def test_two_segments_by_hand():
    """All rollouts take two segments of 4: a step decodes the second one of a batch and the first one of the next.

    So 8 sequences decode for 4 steps, half of the trained tokens are one version old, and each rollout is sent again
    once, with its 4 tokens.
    """
    figures = small("segments_2", prefill_seconds=0.5, prefill_quadratic_seconds=0.125)
    prefill = 4 * (4 * 0.5 + 16 * 0.125)
    assert figures.prefill_seconds == pytest.approx(prefill)
    assert figures.rollout_seconds == pytest.approx(4 * STEP(8) + prefill)
    assert (figures.age_mean, figures.age_max, figures.on_policy_frac) == (0.5, 1, 0.5)
    assert figures.prefilled_tokens_per_trained_token == 0.5
    assert (figures.groups_held_mean, figures.groups_held_max) == (4, 4)
    assert figures.kv_tokens_max == 4 * 8 + 4 * 4
    assert figures.pool_bytes_max == 8 * (4 * 8 + 4 * 4)


def test_continuous_slots_by_hand():
    """Four slots, rollouts of 8 tokens: they end together, so a step decodes exactly its batch."""
    figures = small("continuous", slots=4)
    assert figures.rollout_seconds == pytest.approx(8 * STEP(4))
    assert figures.occupancy == 1
    assert figures.age_max == 0


def test_a_limit_of_sequences_makes_the_others_wait():
    assert small("trl", slots=1).rollout_seconds == pytest.approx(4 * 8 * STEP(1))
    assert small("trl", slots=1).kv_tokens_max == 8


def test_longer_rollouts_are_truncated():
    assert small("trl", lengths=[100]) == small("trl")


def test_stock_trains_on_groups_without_a_gradient_and_on_policy_rollout_repeats():
    stock = small("trl", mixed_frac=0.5, num_steps=400)
    assert stock.gradient_frac == pytest.approx(0.5, abs=0.08)
    assert stock.rollout_seconds == pytest.approx(8 * STEP(4))
    sampled = small("segments_1", mixed_frac=0.5, num_steps=400)
    assert sampled.gradient_frac == 1
    assert sampled.rollout_seconds > 1.5 * stock.rollout_seconds


def test_the_same_seed_gives_the_same_figures():
    lengths = lognormal_lengths(3, 1)
    first, again, other = (small("segments_4", lengths=lengths, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


# --- what long outputs and real engines come to -----------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["trl", "segments_4", "continuous"])
def test_a_coarser_resolution_changes_little(arm):
    """Against one simulated token per token; 16 tokens each here are 128 at 128k with the default."""
    arguments = {
        "lengths": lognormal_lengths(1000, 1),
        "max_completion_length": 16_384 // 4,
        "groups_per_batch": 16,
        "num_generations": 4,
        "decode_time": linear_decode_time(0.02, 1e-4),
        "prefill_seconds": 1e-5,
        "prefill_quadratic_seconds": 1e-8,
        "prompt_length": 64,
        "num_steps": 32,
    }
    exact = dataclasses.asdict(simulate(arm, **arguments, resolution=4096))
    coarse = dataclasses.asdict(simulate(arm, **arguments, resolution=256))
    for name in (
        "rollout_seconds",
        "trained_tokens",
        "occupancy",
        "groups_held_mean",
        "kv_tokens_max",
        "pool_bytes_max",
    ):
        assert coarse[name] == pytest.approx(exact[name], rel=0.02), name
    assert coarse["age_mean"] == pytest.approx(exact["age_mean"], rel=0.03)
    assert coarse["prefill_seconds"] == pytest.approx(exact["prefill_seconds"], rel=0.05)


LIMIT = 65_536
# Log-normal with 78 % below half of the limit; a decode step's time grows by 0.05 % per sequence. docs/plan.md
GPU_LIKE = {
    "lengths": lognormal_lengths(15_144, 1.0),
    "max_completion_length": LIMIT,
    "groups_per_batch": 128,
    "num_generations": 8,
    "decode_time": linear_decode_time(0.02, 1e-5),
    "num_steps": 4,
    "resolution": 256,
}


@pytest.fixture(scope="module")
def gpu_like():
    names = ("trl", "segments_2", "segments_4", "continuous_2x", "continuous_3x")
    arms = standard_arms(groups_per_batch=128, num_generations=8)
    return {name: simulate(**arms[name], **GPU_LIKE) for name in names}


def test_lengths_are_those_of_the_papers_example():
    assert (GPU_LIKE["lengths"] < LIMIT / 2).mean() == pytest.approx(0.78, abs=0.005)


def test_table_1_of_the_paper(gpu_like):
    """Whole steps with the update at 20 % of the one with a single segment, and no padding in any."""
    update = 0.25 * gpu_like["trl"].rollout_seconds
    steps = whole_steps(gpu_like, update_seconds=update, padding_ratio_stock=1, padding_ratio=1)
    assert steps["segments_2"].speedup_step == pytest.approx(1.60, rel=0.1)
    assert steps["segments_4"].speedup_step == pytest.approx(2.06, rel=0.1)


def test_speed_on_a_gpu_like_engine(gpu_like):
    padding = stock_padding_ratio(GPU_LIKE["lengths"], completions_per_batch=1024, max_completion_length=LIMIT)
    update = 0.25 * gpu_like["trl"].rollout_seconds
    steps = whole_steps(gpu_like, update_seconds=update, padding_ratio_stock=padding)
    assert 2.4 <= padding <= 3.2
    assert steps["segments_4"].speedup_rollout >= 2.06
    assert steps["continuous_2x"].speedup_rollout >= 2.3
    assert steps["continuous_3x"].speedup_step >= 3


def test_speed_on_vllms_cpu_curve():
    """Four groups of 8 on the decode steps that vLLM takes for a tiny model on a CPU."""
    arguments = {
        "lengths": lognormal_lengths(59, 1.0),
        "max_completion_length": 256,
        "groups_per_batch": 4,
        "decode_time": curve_decode_time({8: 0.0036, 32: 0.0060, 64: 0.0086, 128: 0.0147, 256: 0.0222}),
        "num_steps": 100,
    }
    stock, segments = simulate("trl", **arguments), simulate("segments_4", **arguments)
    assert stock.rollout_seconds / segments.rollout_seconds == pytest.approx(2.3, rel=0.1)


# --- whole steps and the choice ---------------------------------------------------------------------------------------


def figures(**overrides):
    values = {field.name: 1 for field in dataclasses.fields(Figures)}
    values.update(arm="segments_4", rollout_seconds=8.0, completions_per_second_rollout=2.0, trained_tokens=100.0)
    return Figures(**{**values, **overrides})


def test_the_update_grows_with_padded_tokens():
    arms = {
        "trl": figures(arm="trl"),
        "half": figures(rollout_seconds=4.0, completions_per_second_rollout=4.0, kv_tokens_max=2**30),
    }
    steps = whole_steps(
        arms, update_seconds=2.0, padding_ratio_stock=2.5, padding_ratio=1.25, kv_bytes_per_token=3, kv_gib=2
    )
    assert (steps["trl"].update_seconds, steps["trl"].step_seconds) == (2, 10)
    assert (steps["half"].update_seconds, steps["half"].step_seconds) == (1, 5)
    assert (steps["half"].speedup_rollout, steps["half"].speedup_step) == (2, 2)
    assert steps["trl"].completions_per_second_step == pytest.approx(1.6)
    assert (steps["half"].kv_gib, steps["half"].is_within_kv_limit) == (3, False)
    assert steps["trl"].is_within_kv_limit is True
    unknown = whole_steps(arms, update_seconds=0, padding_ratio_stock=1)
    assert unknown["trl"].is_within_kv_limit is None


def arms_with(**speeds_ages_kv):
    return {
        name: figures(
            arm="trl" if name == "trl" else "segments_4",
            completions_per_second_rollout=speed,
            rollout_seconds=16 / speed,
            age_mean=age,
            kv_tokens_max=kv,
        )
        for name, (speed, age, kv) in speeds_ages_kv.items()
    }


@pytest.mark.parametrize(
    ("kv_gib", "expected"),
    [(None, "young"), (3.5, "young"), (2.5, "small"), (1.5, "trl"), (0.5, None)],
)
def test_the_youngest_of_the_fast_ones_that_fit_is_recommended(kv_gib, expected):
    """`young` is within 5 % of the fastest, `small` is not."""
    gib = 2**30
    arms = arms_with(
        trl=(1.0, 0.0, gib), fastest=(4.0, 3.0, 4 * gib), young=(3.9, 2.0, 3 * gib), small=(3.5, 1.0, 2 * gib)
    )
    memory = {} if kv_gib is None else {"kv_bytes_per_token": 1, "kv_gib": kv_gib}
    steps = whole_steps(arms, update_seconds=0.0, padding_ratio_stock=1, **memory)
    assert recommended(arms, steps) == expected


def test_constants_are_those_of_the_package(tmp_path):
    defaults = UloRLConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        rollout_schedule="continuous",
        per_device_train_batch_size=32,
        num_generations=4,
    )
    figures = planner.simulate(
        "continuous",
        lengths=[20, 40],
        max_completion_length=64,
        groups_per_batch=8,
        num_generations=4,
        decode_time=lambda num_sequences: 1.0,
        num_steps=1,
    )
    assert (defaults.rollout_slots, defaults.max_inflight_groups) == (figures.num_slots, figures.max_inflight_groups)
    segment = Segment.from_values([1, 2], [0.0, 0.0], 0)
    assert (segment.token_ids.nbytes + segment.per_token_logps.nbytes) / 2 == planner.BYTES_PER_HELD_TOKEN


# --- lengths, curves, bad input ---------------------------------------------------------------------------------------


def test_lognormal_lengths_have_their_percentiles():
    lengths = lognormal_lengths(1000, np.log(5000 / 1000) / 2.326348)
    assert np.median(lengths) == 1000
    assert np.percentile(lengths, 99) == pytest.approx(5000, rel=0.01)
    assert lognormal_lengths(1, 3).min() == 1


def test_histogram_lengths_keep_its_shares():
    lengths = histogram_lengths([0, 100, 200, 400], [1, 0, 3])
    assert (lengths <= 100).mean() == pytest.approx(0.25, abs=0.001)
    assert not ((lengths > 100) & (lengths < 200)).any()
    assert np.median(lengths[lengths >= 200]) == pytest.approx(300, abs=1)
    assert lengths.min() >= 1


@pytest.mark.parametrize(
    ("edges", "counts", "remedy"),
    [
        ([1, 2], [1, 2], "Give both bounds"),
        ([1, 1, 2], [1, 2], "Give both bounds"),
        ([1, 2, 3], [0, 0], "Check the file"),
        ([1, 2, 3], [2, -1], "Check the file"),
    ],
)
def test_bad_histograms_are_refused(edges, counts, remedy):
    with pytest.raises(ValueError, match=remedy):
        histogram_lengths(edges, counts)


def test_curve_is_straight_between_and_beyond_its_points():
    decode_time = curve_decode_time({20: 0.006, 10: 0.004, 40: 0.006})
    assert [decode_time(size) for size in (1, 10, 15, 20, 30, 80)] == pytest.approx(
        [0.0022, 0.004, 0.005, 0.006, 0.006, 0.006]
    )
    assert curve_decode_time({1: 1.0, 2: 3.0, 3: 2.0})(10) == 2.0


@pytest.mark.parametrize(
    ("points", "remedy"),
    [({8: 0.1}, "Measure more"), ({8: 0.1, 9: -1}, "Measure more"), ({8: 0.1, 9: 0.2}, "Add a point for 1 sequence")],
)
def test_bad_curves_are_refused(points, remedy):
    with pytest.raises(ValueError, match=remedy):
        curve_decode_time(points)


def test_stock_padding_is_the_longest_row_over_the_mean():
    arguments = {"completions_per_batch": 4, "max_completion_length": 10}
    assert stock_padding_ratio([10], **arguments) == 1
    # Four rows of 2 or 10 (40 is cut): their longest is 2 in one of 16 batches, on average 9.5, and their mean is 6. It is
    # tokens over tokens: the mean of the batches' own ratios would be 1.69.
    ratios = [stock_padding_ratio([2, 40], **arguments, seed=seed) for seed in range(20)]
    assert np.mean(ratios) == pytest.approx(9.5 / 6, rel=0.03)


@pytest.mark.parametrize(
    ("arm", "overrides", "remedy"),
    [
        ("segments", {}, "must be 'trl', 'continuous'"),
        ("segments_0", {}, "must be 'trl', 'continuous'"),
        ("continuous_2", {}, "must be 'trl', 'continuous'"),
        ("trl", {"lengths": [0, 3]}, "Check the file"),
        ("trl", {"lengths": []}, "Check the file"),
        ("trl", {"groups_per_batch": 0}, "at least 1"),
        ("trl", {"num_generations": 1}, "at least 2"),
    ],
)
def test_bad_arguments_are_refused(arm, overrides, remedy):
    with pytest.raises(ValueError, match=remedy):
        small(arm, **overrides)


def test_the_planner_runs_without_torch():
    code = (
        "import sys; from trl_ulorl.planner import simulate; "
        "simulate('segments_2', lengths=[4], max_completion_length=8, groups_per_batch=1, num_steps=2, decode_time=float); "
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
