"""What the schedules would give on an engine and a distribution of lengths, before anything is trained.

Every setting runs the collectors that training runs, over simulated rollouts: schedule, pools and ledger are the real
ones, only the time of the engine is a model. Needs numpy alone. docs/plan.md says what the model leaves out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rollout.collector import CollectorSettings, ExperienceCollector, Prompt
from .rollout.continuous import ContinuousCollector
from .rollout.pool import RolloutGroup
from .rollout.prompts import PromptStream
from .rollout.schedule import ContinuousSchedule, SegmentSchedule
from .rollout.scoring import RewardInput, RewardScorer
from .rollout.segmented import SegmentCollector
from .rollout.simulated import DecodeTime, SimulatedEngine

RESOLUTION = 1024  # simulated tokens of a rollout of full length
PADDING_RATIO = 1.05  # padded to real tokens where each micro-batch is cut to its own longest row
BYTES_PER_HELD_TOKEN = 8  # an int32 id and a float32 log-probability

_SAMPLE_SIZE = 8192  # lengths that stand for a distribution
_MEASURED_ROLLOUTS = 16_384
_MIN_STEPS = 16
_PROMPT_ID = 7
_SPEED_TOLERANCE = 0.05  # of the best speed may be given up for younger data


# ----------------------------------------------------------------------------------------------- lengths, decode time


def lognormal_lengths(median: float, sigma: float) -> NDArray[np.int64]:
    """Return a sample that stands for log-normal lengths: its quantiles at equal distances.

    Args:
        median: Tokens.
        sigma: Standard deviation of the logarithm. With a 99th percentile known, it is ln(p99 / median) / 2.326.

    Example:
        >>> lengths = lognormal_lengths(1000, 0.5)
        >>> int(np.median(lengths)), round(float(np.log(lengths).std()), 2)
        (1000, 0.5)
    """
    normal = NormalDist()
    quantiles = [normal.inv_cdf(q) for q in _equal_distances()]
    return _whole_lengths(median * np.exp(sigma * np.array(quantiles)))


def histogram_lengths(edges: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
    """Return a sample that stands for a histogram, with lengths spread evenly within each bin.

    Args:
        edges: Bounds of the bins in tokens, ascending, shape `(N + 1,)`.
        counts: Rollouts in each bin, shape `(N,)`.

    Raises:
        ValueError: If the shapes don't match, edges don't ascend, or there is no count.
    """
    bounds, heights = np.asarray(edges, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if bounds.ndim != 1 or heights.shape != (bounds.size - 1,) or (np.diff(bounds) <= 0).any():
        raise ValueError(
            f"The histogram has `edges` of shape {bounds.shape} and `counts` of shape {heights.shape}: edges must "
            "ascend and be one more than the counts, since they are the bounds of the bins. Give both bounds of each bin."
        )
    if not (heights >= 0).all() or not 0 < heights.sum() < math.inf:
        raise ValueError(
            f"The histogram's `counts` add up to {heights.sum()}: they must be numbers of rollouts, not negative and not "
            "all 0, since lengths are drawn in their proportion. Check the file."
        )
    shares = np.concatenate([[0.0], np.cumsum(heights) / heights.sum()])
    return _whole_lengths(np.interp(_equal_distances(), shares, bounds))


def _equal_distances() -> NDArray[np.float64]:
    return np.asarray((np.arange(_SAMPLE_SIZE) + 0.5) / _SAMPLE_SIZE)


def _whole_lengths(lengths: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


def curve_decode_time(points: Mapping[int, float]) -> DecodeTime:
    """Return the time of a decode step by a measured curve: straight between its points and beyond both ends.

    It does not fall beyond the last point.

    Args:
        points: Seconds of a step by number of sequences, two points at least.

    Raises:
        ValueError: If there are fewer points, or a time is not positive, or not for one sequence by the line.

    Example:
        >>> decode_time = curve_decode_time({10: 0.004, 20: 0.006})
        >>> [round(decode_time(b), 4) for b in (5, 15, 40)]
        [0.003, 0.005, 0.01]
    """
    sizes = np.array(sorted(points), dtype=np.float64)
    seconds = np.array([points[size] for size in sorted(points)], dtype=np.float64)
    if sizes.size < 2 or sizes[0] < 1 or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError(
            f"The decode curve ({dict(points)}) must have at least two points, each a number of sequences and the "
            "seconds of a decode step over them, above 0: the rest is read off straight lines. Measure more points."
        )
    slopes = np.diff(seconds) / np.diff(sizes)
    first_slope, last_slope = float(slopes[0]), max(0.0, float(slopes[-1]))
    if seconds[0] - first_slope * (sizes[0] - 1) <= 0:
        raise ValueError(
            f"The decode curve ({dict(points)}) falls to {seconds[0] - first_slope * (sizes[0] - 1):.2g} s at one "
            "sequence, on the line through its first two points: a step takes time however few sequences there are. "
            "Add a point for 1 sequence."
        )

    def decode_time(num_sequences: int) -> float:
        if num_sequences < sizes[0]:
            return float(seconds[0] - first_slope * (sizes[0] - num_sequences))
        if num_sequences > sizes[-1]:
            return float(seconds[-1] + last_slope * (num_sequences - sizes[-1]))
        return float(np.interp(num_sequences, sizes, seconds))

    return decode_time


def stock_padding_ratio(
    lengths: ArrayLike, *, completions_per_batch: int, max_completion_length: int, seed: int = 0
) -> float:
    """Return padded to real completion tokens where a whole batch is padded to its longest row, as TRL does.

    Args:
        lengths: As in `simulate`.
        completions_per_batch: Rows of a generation batch.
        max_completion_length: Length limit of a rollout.
        seed: Seed of the draws.
    """
    sample = np.minimum(_checked_lengths(lengths).ravel(), max_completion_length)
    drawn = np.random.default_rng(seed).choice(sample, (64, completions_per_batch))
    return float(drawn.max(axis=1).mean() / drawn.mean())


# ------------------------------------------------------------------------------------------------------ one simulation


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The rollout phase under one setting; averages are over the measured steps, and a step trains one batch.

    Args:
        arm: Name of the setting.
        num_slots: Rollouts that could decode at a time.
        max_inflight_groups: Most groups held.
        num_steps: Steps that were measured, after those of the warm-up.
        rollout_seconds: Of a step.
        completions_per_second_rollout: Trained completions that carry a gradient, per second of the rollout phase.
        gradient_frac: Share of the trained completions that are in groups with differing rewards.
        trained_tokens: Of a step.
        occupancy: Sequences that decoded, as a share of what could have.
        groups_held_mean: Unfinished and ready groups and the batch, once it is complete.
        groups_held_max: Most of them.
        age_mean: Steps since the tokens of a batch were sampled.
        age_max: Of the oldest token.
        on_policy_frac: Share of the trained tokens that the current policy sampled.
        prefilled_tokens_per_trained_token: Tokens of continued rollouts that were computed again.
        prefill_seconds: Spent on prompts and prefixes, of a step.
        pool_bytes_max: Most host memory of the pools, the batch included.
        kv_tokens_max: Most tokens of the sequences that decoded at a time.
    """

    arm: str
    num_slots: int
    max_inflight_groups: int
    num_steps: int
    rollout_seconds: float
    completions_per_second_rollout: float
    gradient_frac: float
    trained_tokens: float
    occupancy: float
    groups_held_mean: float
    groups_held_max: int
    age_mean: float
    age_max: float
    on_policy_frac: float
    prefilled_tokens_per_trained_token: float
    prefill_seconds: float
    pool_bytes_max: int
    kv_tokens_max: int


def simulate(
    arm: str,
    *,
    lengths: ArrayLike,
    max_completion_length: int,
    groups_per_batch: int,
    num_generations: int = 8,
    decode_time: DecodeTime,
    prefill_seconds: float = 0.0,
    prefill_quadratic_seconds: float = 0.0,
    prompt_length: int = 0,
    slots: int | None = None,
    max_inflight_groups: int | None = None,
    mixed_frac: float = 1.0,
    num_steps: int | None = None,
    num_warmup_steps: int | None = None,
    seed: int = 0,
    resolution: int = RESOLUTION,
) -> Figures:
    """Simulate the rollout phase of one setting.

    One simulated token stands for `max_completion_length / resolution` tokens where that is more than one, so that long
    outputs take no longer than short ones; lengths are rounded to whole simulated tokens.

    Args:
        arm: "trl" decodes a batch to its end, without dynamic sampling. "segments_<n>" is Algorithm 1 with `n` segments
            (1 is on-policy, with dynamic sampling), "continuous" the other schedule.
        lengths: Lengths to draw from with replacement, by `seed` and serial number, so that all settings decode the
            same rollouts: shape `(N,)`, or `(N, num_generations)` to draw those of a group together. Longer ones than
            the limit are truncated.
        max_completion_length: Length limit of a rollout.
        groups_per_batch: Groups that a step trains on.
        num_generations: Rollouts per group.
        decode_time: Seconds of a decode step over a number of sequences.
        prefill_seconds: Seconds per token of a prompt or prefix. While it is computed the others wait.
        prefill_quadratic_seconds: Seconds per square of its tokens, the attention's share.
        prompt_length: Tokens of a prompt.
        slots: Sequences that decode at a time. None: with "continuous" two batches, else no limit.
        max_inflight_groups: Most groups held. None: as in `UloRLConfig`, `n` batches of groups with segments and with
            "continuous" what the slots need.
        mixed_frac: Share of groups with differing rewards.
        num_steps: Steps to measure. None: enough for 16,384 rollouts, at least 16.
        num_warmup_steps: Steps before them. None: until the pools are in their steady state.
        seed: Seed of lengths and rewards.
        resolution: Simulated tokens of a rollout of full length.

    Raises:
        ValueError: If `arm` is none of those, or a length or a size is out of range.
    """
    num_segments, is_continuous = _parse_arm(arm)
    sample = _checked_lengths(lengths)
    _check_counts(max_completion_length, groups_per_batch, num_generations)
    completions = groups_per_batch * num_generations
    scale = max(1.0, max_completion_length / resolution)
    cap = round(max_completion_length / scale)
    if slots is None and is_continuous:
        slots = 2 * completions
    if max_inflight_groups is None:
        max_inflight_groups = (
            ContinuousSchedule.inflight_groups(slots or 0, num_generations, groups_per_batch)
            if is_continuous
            else num_segments * groups_per_batch
        )
    engine = SimulatedEngine(
        seed=seed,
        lengths=np.rint(sample / scale).astype(np.int64),
        decode_time=lambda num_sequences: scale * decode_time(num_sequences),
        prefill_seconds=scale * prefill_seconds,
        prefill_quadratic_seconds=scale**2 * prefill_quadratic_seconds,
        max_sequences=slots,
    )
    bounds: dict[str, Any] = {"groups_per_batch": groups_per_batch, "max_inflight_groups": max_inflight_groups}
    prompt = Prompt([_PROMPT_ID] * round(prompt_length / scale), cap)
    common: dict[str, Any] = {
        "engine": engine,
        "prompts": PromptStream(1024, seed=seed, shuffle=False),
        "scorer": _PlannedRewards(mixed_frac, seed),
        "settings": CollectorSettings(
            num_generations=num_generations,
            max_completion_length=cap,
            num_segments=num_segments,
            dynamic_sampling=arm != "trl",
            reward_weights=(1.0,),
            scored_at_batch_time=False,
            correctness_index=0,
            truncated_is_wrong=False,
        ),
        "tokenize": lambda rows: [prompt for _ in rows],
        "render": lambda group, rollout: RewardInput(rollout, None, None, np.empty(0, dtype=np.int32), {}),
    }
    collector: ExperienceCollector
    if is_continuous:
        assert slots is not None
        collector = ContinuousCollector(schedule=ContinuousSchedule(**bounds, num_slots=slots), **common)
    else:
        schedule = SegmentSchedule(
            **bounds, segment_length=math.ceil(cap / num_segments), is_on_policy=num_segments == 1
        )
        collector = SegmentCollector(schedule=schedule, **common)
    if num_steps is None:
        num_steps = max(_MIN_STEPS, _MEASURED_ROLLOUTS // completions)
    if num_warmup_steps is None:
        num_warmup_steps = 2 * max_inflight_groups // groups_per_batch if is_continuous or num_segments > 1 else 0
    return _measure(
        collector,
        engine,
        arm=arm,
        scale=scale,
        num_slots=max_inflight_groups * num_generations if slots is None else slots,
        num_steps=num_steps,
        num_warmup_steps=num_warmup_steps,
    )


def _parse_arm(arm: str) -> tuple[int, bool]:
    """Return the number of segments and whether the schedule is the continuous one."""
    name, _, number = arm.partition("_")
    if arm in ("trl", "continuous"):
        return (1, False) if arm == "trl" else (2, True)
    if name == "segments" and number.isdecimal() and int(number) >= 1:
        return int(number), False
    raise ValueError(f"`arm` ({arm!r}) must be 'trl', 'continuous', or 'segments_' and a number of segments.")


def _checked_lengths(lengths: ArrayLike) -> NDArray[np.float64]:
    sample = np.asarray(lengths, dtype=np.float64)
    if sample.ndim not in (1, 2) or not sample.size or not (np.isfinite(sample) & (sample >= 1)).all():
        raise ValueError(
            f"`lengths` has shape {sample.shape} and values from {sample.min(initial=math.inf)} to "
            f"{sample.max(initial=-math.inf)}: lengths must be at least one token each, in one list or one per group, "
            "since rollouts are drawn from them. Check the file."
        )
    return sample


def _check_counts(max_completion_length: int, groups_per_batch: int, num_generations: int) -> None:
    least = {"max_completion_length": (max_completion_length, 2), "groups_per_batch": (groups_per_batch, 1)}
    for name, (value, bound) in {**least, "num_generations": (num_generations, 2)}.items():
        if value < bound:
            raise ValueError(f"`{name}` ({value}) must be a whole number of at least {bound}.")


def _measure(
    collector: ExperienceCollector,
    engine: SimulatedEngine,
    *,
    arm: str,
    scale: float,
    num_slots: int,
    num_steps: int,
    num_warmup_steps: int,
) -> Figures:
    trained, held, ages, oldest, on_policy = [], [], [], [], []
    busy_steps = slot_steps = prefilled = num_filled = held_tokens = 0
    started = prefill_started = 0.0
    for version in range(num_warmup_steps + num_steps):
        if version == num_warmup_steps:
            started, prefill_started, engine.peak_tokens = engine.seconds, engine.total_prefill_seconds, 0
        batch = collector.collect(version)
        if version >= num_warmup_steps:
            metrics, report = collector.metrics(version), collector.report
            trained.append(sum(group.num_tokens for group in batch))
            held.append(len(collector.unfinished) + len(collector.ready) + len(batch))
            ages.append(metrics["rollout/age_mean"] * trained[-1])
            on_policy.append(metrics["rollout/on_policy_frac"] * trained[-1])
            oldest.append(metrics["rollout/age_max"])
            busy_steps += report.busy_steps
            slot_steps += report.slot_steps
            prefilled += report.prefilled_tokens
            num_filled += sum(not _is_mixed(group) for group in batch)
            held_tokens = max(held_tokens, collector.ledger_balance()["tokens"]["held"])
        collector.finish_batch(version)
    seconds = engine.seconds - started
    num_groups = num_steps * collector.schedule.groups_per_batch
    gradient_frac = 1 - num_filled / num_groups
    num_completions = num_groups * len(batch[0].rollouts)
    return Figures(
        arm=arm,
        num_slots=num_slots,
        max_inflight_groups=collector.schedule.max_inflight_groups,
        num_steps=num_steps,
        rollout_seconds=seconds / num_steps,
        completions_per_second_rollout=gradient_frac * num_completions / seconds,
        gradient_frac=gradient_frac,
        trained_tokens=scale * sum(trained) / num_steps,
        occupancy=busy_steps / slot_steps,
        groups_held_mean=sum(held) / num_steps,
        groups_held_max=max(held),
        age_mean=sum(ages) / sum(trained),
        age_max=max(oldest),
        on_policy_frac=sum(on_policy) / sum(trained),
        prefilled_tokens_per_trained_token=prefilled / sum(trained),
        prefill_seconds=(engine.total_prefill_seconds - prefill_started) / num_steps,
        pool_bytes_max=round(scale * BYTES_PER_HELD_TOKEN * held_tokens),
        kv_tokens_max=round(scale * engine.peak_tokens),
    )


def _is_mixed(group: RolloutGroup) -> bool:
    return float(np.ptp(group.rewards)) > 0


class _PlannedRewards(RewardScorer):
    """Gives a share of the groups differing rewards, at once and without a thread."""

    def __init__(self, mixed_frac: float, seed: int) -> None:  # the parent's would start the thread
        self.num_failures = Counter()
        self._mixed_frac = mixed_frac
        self._seed = seed

    def submit(self, item: RewardInput) -> None:
        """Set the rewards of a finished rollout."""
        rollout = item.rollout
        draw = np.random.default_rng([self._seed, rollout.group_id]).random() if self._mixed_frac < 1 else 0.0
        rollout.rewards = np.array([rollout.index % 2 if draw < self._mixed_frac else 1], dtype=np.float32)

    def wait(self) -> None:
        """Return: all is scored."""


# ---------------------------------------------------------------------------------------------------- comparing settings


def standard_arms(*, groups_per_batch: int, num_generations: int) -> dict[str, dict[str, Any]]:
    """Return the settings that a plan compares: names, and the arguments of `simulate` that make them.

    All else is as `UloRLConfig` has it by default.
    """
    arms: dict[str, dict[str, Any]] = {"trl": {"arm": "trl"}}
    arms.update({f"segments_{count}": {"arm": f"segments_{count}"} for count in (1, 2, 4, 8)})
    for batches in (1, 2, 3):
        slots = batches * groups_per_batch * num_generations
        arms[f"continuous_{batches}x"] = {"arm": "continuous", "slots": slots}
    return arms


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A whole step under one setting, and how it compares with stock TRL's.

    Args:
        update_seconds: Of a step.
        step_seconds: Rollout and update.
        completions_per_second_step: Trained completions that carry a gradient, per second of the whole step.
        speedup_rollout: Such completions per second of the rollout phase, in multiples of stock TRL's.
        speedup_step: The same of the whole step.
        kv_gib: Key-value cache that the rollouts need at their peak; None where the size of a token is not known.
        is_within_kv_limit: Whether that fits; None where one of the two is not known.
    """

    update_seconds: float
    step_seconds: float
    completions_per_second_step: float
    speedup_rollout: float
    speedup_step: float
    kv_gib: float | None
    is_within_kv_limit: bool | None


def whole_steps(
    figures: Mapping[str, Figures],
    *,
    update_seconds: float,
    padding_ratio_stock: float,
    padding_ratio: float = PADDING_RATIO,
    kv_bytes_per_token: float | None = None,
    kv_gib: float | None = None,
) -> dict[str, PlannedStep]:
    """Add the update to the rollout phase, and compare with stock TRL.

    The update takes time in proportion to the tokens that go through the model, padding included.

    Args:
        figures: By name of the setting; "trl" must be among them.
        update_seconds: Of stock TRL's step; `share / (1 - share)` times its rollout phase, if its share is known.
        padding_ratio_stock: Padded to real tokens of stock TRL's update.
        padding_ratio: The same of the other settings.
        kv_bytes_per_token: Bytes of a token in the key-value cache.
        kv_gib: Size of the cache.

    Raises:
        ValueError: If stock TRL trained on no group with a gradient, so that there is nothing to compare with.
    """
    stock = figures["trl"]
    if not stock.gradient_frac:
        raise ValueError(
            f"With so small a share of groups with differing rewards (`--mixed-frac`) no group of stock TRL's {stock.num_steps} "
            "steps has differing rewards, so there is no speed to compare with. Raise `--steps` or the share."
        )
    seconds_per_token = update_seconds / (padding_ratio_stock * stock.trained_tokens)
    stock_speed = _completions_per_second(stock, stock.rollout_seconds + update_seconds)
    steps = {}
    for name, arm in figures.items():
        ratio = padding_ratio_stock if arm.arm == "trl" else padding_ratio
        update = seconds_per_token * ratio * arm.trained_tokens
        speed = _completions_per_second(arm, arm.rollout_seconds + update)
        needed = None if kv_bytes_per_token is None else arm.kv_tokens_max * kv_bytes_per_token / 2**30
        steps[name] = PlannedStep(
            update_seconds=update,
            step_seconds=arm.rollout_seconds + update,
            completions_per_second_step=speed,
            speedup_rollout=arm.completions_per_second_rollout / stock.completions_per_second_rollout,
            speedup_step=speed / stock_speed,
            kv_gib=needed,
            is_within_kv_limit=None if needed is None or kv_gib is None else needed <= kv_gib,
        )
    return steps


def _completions_per_second(figures: Figures, step_seconds: float) -> float:
    return figures.completions_per_second_rollout * figures.rollout_seconds / step_seconds


def recommended(figures: Mapping[str, Figures], steps: Mapping[str, PlannedStep]) -> str | None:
    """Choose the setting of the youngest data within 5 % of the best speed that fits the key-value cache.

    Returns:
        Its name, or None if no setting fits.
    """
    fitting = [name for name in figures if steps[name].is_within_kv_limit is not False]
    if not fitting:
        return None
    best = max(steps[name].speedup_step for name in fitting)
    fast = [name for name in fitting if steps[name].speedup_step >= (1 - _SPEED_TOLERANCE) * best]
    return min(fast, key=lambda name: (figures[name].age_mean, -steps[name].speedup_step))
