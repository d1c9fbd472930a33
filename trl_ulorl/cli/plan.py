"""`trl-ulorl plan`: how fast each schedule would be, and at what price, on a given engine and distribution of lengths."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..planner import Figures
    from .recipe import RecipePlan

_DESCRIPTION = """
With --config add up what a training configuration's step is and takes in memory. With lengths and an engine simulate the schedules of training, the same code, on a model of your rollout engine, and print speed and price of each:
TRL's own way, 1, 2, 4 and 8 segments, and the continuous schedule with slots for 1, 2 and 3 batches. Options of training
may follow --config.
"""
_EXAMPLE = """
example: a recipe on GPUs of 80 GB
  trl-ulorl plan --config examples/configs/qwen3_4b_128k.yaml --launch examples/accelerate_configs/zero3.yaml --gpu-gib 79

example: 64k outputs of which half end before 15k, on an engine whose decode step takes 20 ms and 10 us per sequence
  trl-ulorl plan --max-completion-length 65536 --median 15144 --sigma 1 --step-seconds 0.02 --sequence-seconds 1e-5
"""
_NORMAL_P99 = 2.326_348  # standard deviations


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="what a configuration takes, and how fast each schedule would be",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, takes_training_options="config")
    recipe = parser.add_argument_group("a training configuration")
    recipe.add_argument(
        "--config", type=Path, metavar="FILE", help="as `trl-ulorl train` takes it; its sizes are taken below too"
    )
    recipe.add_argument("--launch", type=Path, metavar="FILE", help="accelerate's launch file (default: plain DDP)")
    recipe.add_argument(
        "--num-processes", type=_count, metavar="N", help="processes, one per GPU (default: the launch file's, or 1)"
    )
    recipe.add_argument("--gpu-gib", type=_positive, metavar="GIB", help="memory of a GPU; colocated vLLM needs it")

    lengths = parser.add_argument_group("lengths of completions, in tokens: a file, or a log-normal distribution")
    lengths.add_argument(
        "--lengths", type=Path, metavar="FILE", help="list of lengths, histogram, or the rollouts.jsonl of a training"
    )
    lengths.add_argument("--median", type=_positive, metavar="TOKENS", help="median of the log-normal distribution")
    lengths.add_argument("--sigma", type=_not_negative, help="standard deviation of the logarithm")
    lengths.add_argument("--p99", type=_positive, metavar="TOKENS", help="99th percentile, in the place of --sigma")
    lengths.add_argument(
        "--max-completion-length",
        type=partial(_whole, least=2),
        metavar="TOKENS",
        help="limit; the rest is truncated (default: the configuration's)",
    )
    lengths.add_argument(
        "--prompt-length",
        type=_count_or_zero,
        metavar="TOKENS",
        help="of each prompt (default: 0; in a configuration's memory 2,048)",
    )

    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--num-generations",
        type=partial(_whole, least=2),
        help="rollouts per prompt (default: the configuration's, or 8)",
    )
    batch.add_argument(
        "--groups-per-batch", type=_count, help="prompts per step (default: an engine's of the configuration, or 128)"
    )
    batch.add_argument(
        "--mixed-frac", type=_share, default=1.0, help="share of groups with differing rewards (default: 1)"
    )

    engine = parser.add_argument_group("one rollout engine: a line, a curve, or a measurement")
    engine.add_argument("--step-seconds", type=_positive, metavar="T0", help="decode step: T0 + T1 x sequences")
    engine.add_argument("--sequence-seconds", type=_not_negative, metavar="T1", help="what each sequence adds")
    engine.add_argument(
        "--decode-curve", metavar="CURVE", help='"8:0.0036,32:0.006": sequences and seconds of a step; or a JSON file'
    )
    engine.add_argument("--measure", metavar="MODEL", help="measure curve and prefill with this model, here and now")
    engine.add_argument(
        "--engine", choices=("transformers", "vllm"), help="what --measure decodes with (default: transformers)"
    )
    engine.add_argument(
        "--prefill-seconds",
        type=_not_negative,
        metavar="P1",
        help="prefix of n tokens: P1 x n + P2 x n^2 (default: 0)",
    )
    engine.add_argument("--prefill-quadratic-seconds", type=_not_negative, metavar="P2", help="(default: 0)")
    engine.add_argument("--kv-bytes-per-token", type=_positive, metavar="BYTES", help="of a token in the KV cache")
    engine.add_argument("--kv-gib", type=_positive, metavar="GIB", help="size of the KV cache")

    update = parser.add_argument_group("update")
    update.add_argument("--update-share", type=_proper_share, help="its share of TRL's own step (default: 0.2)")
    update.add_argument("--update-seconds", type=_not_negative, help="of TRL's own step, in the place of the share")
    update.add_argument(
        "--padding-ratio-stock", type=_ratio, help="padded to real tokens in TRL's update (default: by the lengths)"
    )
    update.add_argument("--padding-ratio", type=_ratio, help="the same in this package's update (default: 1.05)")

    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--steps", type=_count, help="steps to measure (default: 16, more for small batches)")
    simulation.add_argument("--seed", type=_count_or_zero, default=0, help="of lengths and rewards (default: 0)")
    simulation.add_argument("--output", type=Path, metavar="FILE", help="write parameters and figures there as JSON")


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return value


def _number(text: str, least: float, most: float = sys.float_info.max) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        bounds = f"of at least {least:g}" if most == sys.float_info.max else f"between {least:g} and {most:g}"
        raise argparse.ArgumentTypeError(f"{text} is not a number {bounds}")
    return value


_count = partial(_whole, least=1)
_count_or_zero = partial(_whole, least=0)
_not_negative = partial(_number, least=0)
_positive = partial(_number, least=1e-12)
_share = partial(_number, least=0, most=1)
_proper_share = partial(_number, least=0, most=0.99)
_ratio = partial(_number, least=1)


# ------------------------------------------------------------------------------------------------------------- running


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code; what fails after the input was read is raised."""
    try:
        _check_output(options)
        recipe = _read_recipe(options)
        is_simulated = recipe is None or _asks_for_simulation(options)
        if is_simulated:
            workload = _read_workload(options)
            engine = _read_engine(options)
            _check_pairs(options)
    except ValueError as error:
        sys.stderr.write(f"trl-ulorl plan: {error}\n")
        return 2
    plan: dict[str, Any] = {}
    if recipe is not None:
        from .recipe import report

        plan["recipe"] = recipe.to_dict()
        sys.stdout.write(report(recipe) + ("\n" if is_simulated else ""))
    if is_simulated:
        plan.update(_simulated(options, workload, engine))
        sys.stdout.write(_report(plan))
    if options.output is not None:
        options.output.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    return 0


def _check_pairs(options: argparse.Namespace) -> None:
    if options.kv_gib is not None and options.kv_bytes_per_token is None:
        raise ValueError(
            f"`--kv-gib` ({options.kv_gib:g}) needs `--kv-bytes-per-token`: contexts are counted in tokens. It is 2 x "
            "layers x key-value heads x head size x bytes per number."
        )
    if options.update_share is not None and options.update_seconds is not None:
        raise ValueError(
            f"`--update-share` ({options.update_share:g}) and `--update-seconds` ({options.update_seconds:g}) are both "
            "given, and state the same in two ways. Leave one of them out."
        )


def _check_output(options: argparse.Namespace) -> None:
    if options.output is not None and not options.output.resolve().parent.is_dir():
        raise ValueError(f"`--output` ({options.output}) lies in a folder that does not exist. Make the folder first.")


def _read_recipe(options: argparse.Namespace) -> RecipePlan | None:
    """Return the plan of the configuration, if there is one, and take over what a simulation needs of it."""
    sizes: dict[str, float] = {"num_generations": 8, "groups_per_batch": 128, "prompt_length": 0}
    recipe = None
    if options.config is None:
        given = [
            f"`--{name.replace('_', '-')}`"
            for name in ("launch", "num_processes", "gpu_gib")
            if getattr(options, name)
        ]
        if given:
            raise ValueError(
                f"{', '.join(given)} needs a training configuration, whose memory is added up. Pass `--config FILE.yaml`."
            )
        if options.max_completion_length is None:
            raise ValueError(
                "`--max-completion-length` is missing: longer outputs are cut there. Pass it, or a configuration in "
                "`--config`."
            )
    else:
        from .recipe import plan_recipe

        twice = [name for name in ("max_completion_length", "num_generations") if getattr(options, name) is not None]
        if twice:
            raise ValueError(
                f"`--{twice[0].replace('_', '-')}` and `--config` both say how long or how many outputs are. Leave it out, or "
                f"change the configuration with `--{twice[0]}`."
            )
        recipe = plan_recipe(options)
        engines = recipe.sizes["engines"]
        sizes = {
            "max_completion_length": recipe.run.max_completion_length,
            "num_generations": recipe.run.num_generations,
            "groups_per_batch": max(1, recipe.run.groups_per_batch // engines),
            "prompt_length": 0,
            "kv_bytes_per_token": float(recipe.memory.kv_bytes_per_token),
        }
        if recipe.memory.kv_tokens is not None:
            sizes["kv_gib"] = recipe.memory.kv_tokens * recipe.memory.kv_bytes_per_token / 2**30
    for name, value in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return recipe


def _asks_for_simulation(options: argparse.Namespace) -> bool:
    names = ("lengths", "median", "step_seconds", "decode_curve", "measure")
    return any(getattr(options, name) is not None for name in names)


def _read_workload(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `simulate` that say what is decoded."""
    return {
        "lengths": _read_lengths(options),
        "max_completion_length": options.max_completion_length,
        "prompt_length": options.prompt_length,
        "num_generations": options.num_generations,
        "groups_per_batch": options.groups_per_batch,
        "mixed_frac": options.mixed_frac,
        "num_steps": options.steps,
        "seed": options.seed,
    }


def _read_lengths(options: argparse.Namespace) -> NDArray[np.int64]:
    from ..planner import lognormal_lengths
    from .lengths import read_lengths

    if (options.lengths is None) == (options.median is None):
        given = "neither" if options.lengths is None else "both"
        raise ValueError(
            f"`--lengths` and `--median`: {given} given, but rollouts are drawn from one distribution. Pass a file of "
            "lengths, or the median of a log-normal distribution with `--sigma` or `--p99`."
        )
    spreads = {"--sigma": options.sigma, "--p99": options.p99}
    given_spreads = [name for name, value in spreads.items() if value is not None]
    if options.lengths is not None:
        if given_spreads:
            raise ValueError(
                f"`--lengths` ({options.lengths}) and `{given_spreads[0]}` are both given, but a file has its own spread. "
                f"Leave `{given_spreads[0]}` out."
            )
        return read_lengths(options.lengths, options.num_generations)
    if len(given_spreads) != 1:
        raise ValueError(
            f"`--median` ({options.median:g}) needs `--sigma` or `--p99`, and not both: the long tail is what schedules "
            "differ in. Without a sample, `--sigma 1` is usual for reasoning."
        )
    if options.p99 is not None and options.p99 < options.median:
        raise ValueError(
            f"`--p99` ({options.p99:g}) is below `--median` ({options.median:g}): 99 % of the lengths must be shorter "
            "than it, 50 % shorter than the median. Swap the two."
        )
    sigma = options.sigma if options.p99 is None else math.log(options.p99 / options.median) / _NORMAL_P99
    return lognormal_lengths(options.median, sigma)


def _read_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's parameters, without the curve if that is still to be measured."""
    line = (options.step_seconds, options.sequence_seconds)
    sources = {
        "--step-seconds": line != (None, None),
        "--decode-curve": options.decode_curve,
        "--measure": options.measure,
    }
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise ValueError(
            f"The time of a decode step is given by {' and '.join(f'`{name}`' for name in given) or 'nothing'}, but one "
            "source is needed. Pass `--step-seconds` and `--sequence-seconds`, `--decode-curve`, or `--measure`."
        )
    engine = {
        "prefill_seconds": options.prefill_seconds or 0.0,
        "prefill_quadratic_seconds": options.prefill_quadratic_seconds or 0.0,
    }
    if options.engine and not options.measure:
        raise ValueError(
            f"`--engine` ({options.engine}) says what a measurement decodes with, but none is asked for. Pass `--measure` "
            "and a model, or leave `--engine` out."
        )
    if options.decode_curve:
        return {"decode_curve": _read_curve(options.decode_curve), **engine}
    if options.measure:
        return engine
    if None in line:
        raise ValueError(
            f"`--step-seconds` ({line[0]}) and `--sequence-seconds` ({line[1]}) go together: a decode step takes the "
            "first, and the second for each sequence. Pass both."
        )
    return {"step_seconds": line[0], "sequence_seconds": line[1], **engine}


def _read_curve(text: str) -> dict[int, float]:
    from ..planner import curve_decode_time

    try:
        if ":" in text:
            pairs: Any = [part.split(":") for part in text.split(",")]
        else:
            values: Any = json.loads(Path(text).read_text(encoding="utf-8"))
            for name in ("parameters", "decode_curve"):  # the output of a plan holds the one in the other
                values = values.get(name, values) if isinstance(values, dict) else values
            pairs = [*values.items()] if isinstance(values, dict) else values
        curve = {int(size): float(seconds) for size, seconds in pairs}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`--decode-curve` ({text}) does not give points ({error}). Write numbers of sequences and seconds as "
            '"8:0.0036,32:0.006", or pass a JSON file with {"8": 0.0036, "32": 0.006}, alone, as `decode_curve`, or in the output of a plan.'
        ) from error
    curve_decode_time(curve)
    return curve


def _simulated(options: argparse.Namespace, workload: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as JSON values."""
    from tqdm import tqdm

    from .. import planner
    from ..rollout.simulated import linear_decode_time

    if options.measure:
        from .measure import measured_engine

        measured = measured_engine(options.measure, options.engine or "transformers", options.max_completion_length)
        given = {name: value for name, value in engine.items() if getattr(options, name) is not None}
        engine = {**measured, **given}
    if "decode_curve" in engine:
        decode_time = planner.curve_decode_time(engine["decode_curve"])
    else:
        decode_time = linear_decode_time(engine["step_seconds"], engine["sequence_seconds"])
    prefill = {name: engine[name] for name in ("prefill_seconds", "prefill_quadratic_seconds")}
    sizes = {"groups_per_batch": options.groups_per_batch, "num_generations": options.num_generations}
    figures: dict[str, Figures] = {}
    with _collector_warnings_off():
        for name, arm in (bar := tqdm(planner.standard_arms(**sizes).items(), desc="simulating", unit="setting")):
            bar.set_postfix_str(name)
            figures[name] = planner.simulate(**arm, **workload, **prefill, decode_time=decode_time)
    completions = options.groups_per_batch * options.num_generations
    padding = {
        "padding_ratio_stock": options.padding_ratio_stock
        or planner.stock_padding_ratio(
            workload["lengths"],
            completions_per_batch=completions,
            max_completion_length=options.max_completion_length,
            seed=options.seed,
        ),
        "padding_ratio": options.padding_ratio or planner.PADDING_RATIO,
    }
    share = 0.2 if options.update_share is None else options.update_share
    update_seconds = options.update_seconds
    if update_seconds is None:
        update_seconds = share / (1 - share) * figures["trl"].rollout_seconds
    memory = {"kv_bytes_per_token": options.kv_bytes_per_token, "kv_gib": options.kv_gib}
    steps = planner.whole_steps(figures, update_seconds=update_seconds, **padding, **memory)
    parameters = {**workload, **engine, "update_seconds": update_seconds, **padding, **memory}
    parameters["lengths"] = _summary(workload["lengths"], options.max_completion_length)
    return {
        "parameters": parameters,
        "arms": {name: {**dataclasses.asdict(figures[name]), **dataclasses.asdict(steps[name])} for name in figures},
        "recommendation": planner.recommended(figures, steps),
    }


@contextmanager
def _collector_warnings_off() -> Iterator[None]:
    """Leave out the warnings of batches that have to be filled, in every step: a column of the report says it."""
    logger = logging.getLogger("trl_ulorl.rollout.collector")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _summary(lengths: NDArray[np.int64], limit: int) -> dict[str, float]:
    import numpy as np

    cut = np.minimum(lengths, limit)
    return {
        "mean": float(cut.mean()),
        **{f"p{percent}": float(np.percentile(cut, percent)) for percent in (50, 90, 99)},
        "max": float(cut.max()),
        "below_half_frac": float((lengths < limit / 2).mean()),
        "truncated_frac": float((lengths > limit).mean()),
    }


# -------------------------------------------------------------------------------------------------------------- report


def _report(plan: dict[str, Any]) -> str:
    arms: dict[str, dict[str, Any]] = plan["arms"]
    lines = ["Parameters"]
    for name, value in plan["parameters"].items():
        if value is not None:
            lines.append(f"  {name:26} {_shown(value)}")
    lines += [
        "",
        "Speed, in multiples of trl's: completions with a gradient per second of rollout, and of the whole step",
    ]
    lines += _table(arms, _SPEED_COLUMNS)
    lines += ["", "Price"]
    lines += _table(arms, _PRICE_COLUMNS)
    return "\n".join([*lines, "", _recommendation(plan)]) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_SPEED_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rollout s": lambda arm: f"{arm['rollout_seconds']:.4g}",
    "update s": lambda arm: f"{arm['update_seconds']:.4g}",
    "step s": lambda arm: f"{arm['step_seconds']:.4g}",
    "x rollout": lambda arm: f"{arm['speedup_rollout']:.2f}",
    "x step": lambda arm: f"{arm['speedup_step']:.2f}",
    "completions/s": lambda arm: f"{arm['completions_per_second_step']:.4g}",
    "with gradient": lambda arm: f"{arm['gradient_frac']:.0%}",
    "slots busy": lambda arm: f"{arm['occupancy']:.0%}",
    "prefill s": lambda arm: f"{arm['prefill_seconds']:.3g}",
}
_PRICE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "groups held": lambda arm: f"{arm['groups_held_mean']:.0f} / {arm['groups_held_max']}",
    "age": lambda arm: f"{arm['age_mean']:.1f} / {arm['age_max']:.0f}",
    "on-policy": lambda arm: f"{arm['on_policy_frac']:.0%}",
    "recomputed": lambda arm: f"{arm['prefilled_tokens_per_trained_token']:.2f}",
    "pools GB": lambda arm: f"{arm['pool_bytes_max'] / 1e9:.3g}",
    "KV Mtokens": lambda arm: f"{arm['kv_tokens_max'] / 1e6:.3g}",
    "KV GiB": lambda arm: "-" if arm["kv_gib"] is None else f"{arm['kv_gib']:.4g}",
    "fits": lambda arm: {None: "-", True: "yes", False: "NO"}[arm["is_within_kv_limit"]],
}


def _table(arms: dict[str, dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> list[str]:
    rows = [["setting", *columns], *([name, *(show(arm) for show in columns.values())] for name, arm in arms.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _recommendation(plan: dict[str, Any]) -> str:
    name, arms = plan["recommendation"], plan["arms"]
    if name is None:
        least = min(arms, key=lambda other: arms[other]["kv_tokens_max"])
        return (
            f"Recommended: none. No setting fits {plan['parameters']['kv_gib']:g} GiB of key-value cache; the smallest, "
            f"{least}, needs {arms[least]['kv_gib']:.4g}. Use more engines or fewer groups per batch."
        )
    arm = arms[name]
    fitting = [other for other in arms if arms[other]["is_within_kv_limit"] is not False]
    fastest = max(fitting, key=lambda other: arms[other]["speedup_step"])
    reason = f"{arm['speedup_step']:.2f} times trl's speed at a mean age of {arm['age_mean']:.1f} steps"
    if fastest == name:
        reason += ", the fastest"
    else:
        reason += (
            f"; {fastest} is the fastest, {arms[fastest]['speedup_step']:.2f} times at {arms[fastest]['age_mean']:.1f}"
        )
    if len(fitting) < len(arms):
        reason += f" of those that fit {plan['parameters']['kv_gib']:g} GiB of key-value cache"
    return f"Recommended: {name} ({_options(arm)})\n  {reason}."


def _options(arm: dict[str, Any]) -> str:
    if arm["arm"] == "continuous":
        return (
            f'rollout_schedule="continuous", rollout_slots={arm["num_slots"]}, '
            f"max_inflight_groups={arm['max_inflight_groups']}; needs vLLM"
        )
    return "GRPOTrainer" if arm["arm"] == "trl" else f"num_segments={arm['arm'].removeprefix('segments_')}"
