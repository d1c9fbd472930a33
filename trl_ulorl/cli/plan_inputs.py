"""What `trl-ulorl plan` simulates, from its options: lengths, batch and engine."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NORMAL_P99 = 2.326_348  # standard deviations


def check_pairs(options: argparse.Namespace) -> None:
    """Check what may not be given alone, or together.

    Raises:
        ValueError: If it is.
    """
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


def read_workload(options: argparse.Namespace) -> dict[str, Any]:
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


def read_engine(options: argparse.Namespace) -> dict[str, Any]:
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
