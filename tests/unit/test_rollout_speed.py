"""The parts of benchmarks/rollout_speed.py that need no vLLM."""

import importlib.util
from pathlib import Path

import pytest

from trl_ulorl import UloRLConfig
from trl_ulorl.planner import standard_arms

PATH = Path(__file__).parents[2] / "benchmarks" / "rollout_speed.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("rollout_speed", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {"OMP_NUM_THREADS": "1"})  # it sets defaults for its own workers
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("groups", [4, 16])
def test_arms_are_those_that_the_planner_simulates(bench, tmp_path, groups):
    planned = standard_arms(groups_per_batch=groups, num_generations=bench.GENERATIONS)
    for name in bench.ARMS[1:]:
        arguments = bench.schedule_arguments(name, bench.Setting(groups=groups))
        config = UloRLConfig(
            str(tmp_path), use_vllm=True, use_cpu=True, per_device_train_batch_size=groups * 8, **arguments
        )
        plan = planned["continuous_2x" if name == "continuous" else name]
        if config.rollout_schedule == "continuous":
            assert config.rollout_slots == plan["slots"]
            assert plan.get("max_inflight_groups", config.max_inflight_groups) == config.max_inflight_groups
        else:
            assert plan["arm"] == f"segments_{config.num_segments}"


def block(seconds, lengths):
    """Make a block of two steps: 4 completions of the given lengths, half of the time in the rollout."""
    return {
        "steps": 2.0,
        "seconds": seconds,
        "rollout_seconds": seconds / 2,
        "decode_seconds": seconds / 4,
        "trained_completions": 4.0,
        "trained_tokens": float(sum(lengths)),
        "decoded_tokens": float(sum(lengths)),
        "busy_steps": float(sum(lengths)),
        "slot_steps": 4.0 * max(lengths),
        "padded_tokens": 30.0,
        "real_tokens": 20.0,
        "rollout/age_mean": 1.0,
        "rollout/on_policy_frac": 1.0,
        "age_max": seconds,
        "bookkeeping_seconds": 0.1,
        "lengths": lengths,
    }


def test_figures_of_an_arm(bench):
    figures = bench.summary([block(1.0, [1, 2, 3, 4]), block(3.0, [1, 1, 1, 7])])
    assert figures["completions_per_second_step"] == pytest.approx((4 + 4 / 3) / 2)  # the median of two blocks
    assert figures["completions_per_second_rollout"] == pytest.approx((8 + 8 / 3) / 2)
    assert figures["occupancy"] == pytest.approx(20 / (16 + 28))
    assert figures["age_mean"] == 0.5  # two blocks of two steps, whose means add up to 1 in each
    assert figures["age_max"] == 3.0
    assert figures["padding_ratio"] == 1.5
    assert figures["bookkeeping_frac"] == pytest.approx(0.2 / 4)
    assert figures["trained_length_mean"] == pytest.approx(20 / 8)


def test_ratios_pair_the_blocks_of_a_round(bench):
    """The machine slows down tenfold between two rounds, which changes no ratio."""
    key = "completions_per_second_rollout_blocks"
    arms = {"trl": {key: [10.0, 1.0, 10.0]}, "segments_4": {key: [20.0, 2.0, 20.0]}}
    assert bench.paired_ratio(arms, "segments_4", "trl", "rollout") == 2.0


def test_a_target_is_judged_only_if_its_arms_ran(bench):
    fast, slow = bench.summary([block(1.0, [1, 2, 3, 4])]), bench.summary([block(2.0, [1, 2, 3, 4])])
    plan = {
        "segments_4": {
            "completions_per_second": 1.0,
            "measured_rollout_over_predicted": 0.8,
            "measured_decode_over_predicted": 0.9,
        }
    }
    targets = bench.check({"arms": {"trl": slow, "segments_4": fast}, "planner": plan})
    assert targets["segments_4 rollout / trl"]["ok"]
    assert not targets["segments_4 rollout / planner's"]["ok"]
    assert targets["largest deviation of the decoding from the planner"]["measured"] == pytest.approx(0.1)
    assert not [name for name in targets if name.startswith("continuous")]


@pytest.mark.parametrize(("planned", "bound"), [(1.1, 0.99), (2.0, 1.15)])
def test_the_continuous_schedule_is_asked_for_what_the_engine_can_give(bench, planned, bound):
    arms = {name: bench.summary([block(1.0, [1, 2, 3, 4])]) for name in ("segments_4", "continuous")}
    over = {"measured_rollout_over_predicted": 1.0, "measured_decode_over_predicted": 1.0}
    plans = {
        "segments_4": {"completions_per_second": 10.0, **over},
        "continuous": {"completions_per_second": 10.0 * planned, **over},
    }
    target = bench.check({"arms": arms, "planner": plans})["continuous rollout / segments_4"]
    assert target["target"] == pytest.approx(bound) and target["measured"] == pytest.approx(1.0)
    assert target["ok"] == (bound < 1)


def test_a_block_is_held_against_the_probes_around_it(bench):
    """An engine whose every decode step takes a second, but two for the second block: what was measured slows with it."""

    def probe(seconds):
        curve = {str(size): seconds for size in (1, 256)}
        return {
            "decode_curve": curve,
            "prefill_seconds": 1e-9,
            "request_seconds": 0.0,
            "sync_seconds": seconds,
            "prompt_length": 8.0,
        }

    setting = bench.Setting(groups=1, max_completion_length=8)
    # One-shot decoding of 8 tokens takes 8 steps, and loading the weights as long as one.
    blocks = {
        "trl": [
            {**block(4 * 9.0 * pace, [8] * 8), "trained_completions": 8.0, "index": index}
            for index, pace in ((0, 1.0), (2, 2.0))
        ]
    }
    arms = {name: bench.summary(parts) for name, parts in blocks.items()}
    found = bench.planned(arms, blocks, [probe(pace) for pace in (1.0, 1.0, 2.0, 2.0)], setting)
    assert found["planner"]["trl"]["measured_decode_over_predicted"] == pytest.approx(1.0, rel=1e-6)
    assert found["planner"]["trl"]["measured_rollout_over_predicted"] == pytest.approx(0.5, rel=1e-6)
    assert found["decode_curve"] == {1: 1.5, 256: 1.5}
    assert found["engine"]["sync_seconds"] == 1.5
