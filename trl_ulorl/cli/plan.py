"""`trl-ulorl plan`: how fast each schedule would be, and at what price, on a given engine and distribution of lengths."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .inputs import ENGINES, check_output, count, count_or_zero, not_negative, number, positive, share, whole
from .plan_inputs import check_pairs, read_engine, read_workload
from .plan_report import report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..planner import Figures
    from .recipe import RecipePlan

_DESCRIPTION = """
With --config add up a training step and its memory; options of training may follow. With lengths and an engine simulate the
schedules that training uses, with its own code, and print the speed and the cost of each: TRL's own way, 1, 2, 4 and 8 segments, and
the continuous schedule with slots for 1, 2 and 3 batches.
"""
_EXAMPLE = """
example: a recipe on GPUs of 80 GB
  trl-ulorl plan --config examples/configs/qwen3_4b_128k.yaml --launch examples/accelerate_configs/zero3.yaml --gpu-gib 79

example: 64k outputs of which half end before 15k, on an engine whose decode step takes 20 ms and 10 us per sequence
  trl-ulorl plan --max-completion-length 65536 --median 15144 --sigma 1 --step-seconds 0.02 --sequence-seconds 1e-5
"""


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
        "--num-processes", type=count, metavar="N", help="processes, one per GPU (default: the launch file's, or 1)"
    )
    recipe.add_argument("--gpu-gib", type=positive, metavar="GIB", help="memory of a GPU; colocated vLLM needs it")

    lengths = parser.add_argument_group("lengths of completions, in tokens: a file, or a log-normal distribution")
    lengths.add_argument(
        "--lengths", type=Path, metavar="FILE", help="list of lengths, histogram, or the rollouts.jsonl of a training"
    )
    lengths.add_argument("--median", type=positive, metavar="TOKENS", help="median of the log-normal distribution")
    lengths.add_argument("--sigma", type=not_negative, help="standard deviation of the logarithm")
    lengths.add_argument("--p99", type=positive, metavar="TOKENS", help="99th percentile, in the place of --sigma")
    lengths.add_argument(
        "--max-completion-length",
        type=partial(whole, least=2),
        metavar="TOKENS",
        help="limit; the rest is truncated (default: the configuration's)",
    )
    lengths.add_argument(
        "--prompt-length",
        type=count_or_zero,
        metavar="TOKENS",
        help="of each prompt (default: 0; in a configuration's memory 2,048)",
    )

    batch = parser.add_argument_group("batch")
    batch.add_argument(
        "--num-generations",
        type=partial(whole, least=2),
        help="rollouts per prompt (default: the configuration's, or 8)",
    )
    batch.add_argument(
        "--groups-per-batch", type=count, help="prompts per step (default: an engine's of the configuration, or 128)"
    )
    batch.add_argument(
        "--mixed-frac", type=share, default=1.0, help="share of groups with differing rewards (default: 1)"
    )

    engine = parser.add_argument_group("one rollout engine: a line, a curve, or a measurement")
    engine.add_argument("--step-seconds", type=positive, metavar="T0", help="decode step: T0 + T1 x sequences")
    engine.add_argument("--sequence-seconds", type=not_negative, metavar="T1", help="what each sequence adds")
    engine.add_argument(
        "--decode-curve", metavar="CURVE", help='"8:0.0036,32:0.006": sequences and seconds of a step; or a JSON file'
    )
    engine.add_argument("--measure", metavar="MODEL", help="measure curve and prefill with this model, here and now")
    engine.add_argument("--engine", choices=ENGINES, help="what --measure decodes with (default: transformers)")
    engine.add_argument(
        "--prefill-seconds",
        type=not_negative,
        metavar="P1",
        help="prefix of n tokens: P1 x n + P2 x n^2 (default: 0)",
    )
    engine.add_argument("--prefill-quadratic-seconds", type=not_negative, metavar="P2", help="(default: 0)")
    engine.add_argument("--kv-bytes-per-token", type=positive, metavar="BYTES", help="of a token in the KV cache")
    engine.add_argument("--kv-gib", type=positive, metavar="GIB", help="size of the KV cache")

    update = parser.add_argument_group("update")
    update.add_argument(
        "--update-share", type=partial(number, least=0, most=0.99), help="its share of TRL's own step (default: 0.2)"
    )
    update.add_argument("--update-seconds", type=not_negative, help="of TRL's own step, in the place of the share")
    update.add_argument(
        "--padding-ratio-stock",
        type=partial(number, least=1),
        help="padded to real tokens in TRL's update (default: by the lengths)",
    )
    update.add_argument(
        "--padding-ratio", type=partial(number, least=1), help="the same in this package's update (default: 1.05)"
    )

    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--steps", type=count, help="steps to measure (default: 16, more for small batches)")
    simulation.add_argument("--seed", type=count_or_zero, default=0, help="of lengths and rewards (default: 0)")
    simulation.add_argument("--output", type=Path, metavar="FILE", help="write parameters and figures there as JSON")


# ------------------------------------------------------------------------------------------------------------- running


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code; what fails in a measurement is raised."""
    try:
        check_output(options.output)
        recipe = _read_recipe(options)
        is_simulated = recipe is None or _asks_for_simulation(options)
        if is_simulated:
            workload = read_workload(options)
            engine = read_engine(options)
            check_pairs(options)
    except ValueError as error:
        sys.stderr.write(f"trl-ulorl plan: {error}\n")
        return 2
    plan: dict[str, Any] = {}
    if recipe is not None:
        from .recipe import report as recipe_report

        plan["recipe"] = recipe.to_dict()
        sys.stdout.write(recipe_report(recipe) + ("\n" if is_simulated else ""))
    if is_simulated:
        engine = _measured(options, engine)
        try:
            plan.update(_simulated(options, workload, engine))
        except ValueError as error:
            sys.stderr.write(f"trl-ulorl plan: {error}\n")
            return 2
        sys.stdout.write(report(plan))
    if options.output is not None:
        options.output.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
    return 0


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


def _measured(options: argparse.Namespace, engine: dict[str, Any]) -> dict[str, Any]:
    """Add what is to be measured, but for what is given."""
    if not options.measure:
        return engine
    from .measure import measured_engine

    measured = measured_engine(options.measure, options.engine or "transformers", options.max_completion_length)
    return {**measured, **{name: value for name, value in engine.items() if getattr(options, name) is not None}}


def _simulated(options: argparse.Namespace, workload: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as JSON values."""
    from tqdm import tqdm

    from .. import planner
    from ..rollout.simulated import linear_decode_time

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
    update_share = 0.2 if options.update_share is None else options.update_share
    update_seconds = options.update_seconds
    if update_seconds is None:
        update_seconds = update_share / (1 - update_share) * figures["trl"].rollout_seconds
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
