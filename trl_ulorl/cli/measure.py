"""Measure the time of decode steps and of prefixes with the package's own engines, on this machine."""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..rollout.engine import DecodeRequest, SegmentEngine
from ..rollout.transformers import TransformersEngine

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Tokens before the decode steps that are measured. vLLM computes 4,096 of them at a time, so that at the largest size the
# last sequence starts 16 steps after the first: all decode side by side in the steps that the longer run has more.
_CONTEXT = 256
_NUM_STEPS = 64
_PREFIX = 4096  # tokens of the longer prefix that is measured
_REPEATS = 3
_TRIES = 5  # of a measurement that comes out negative
_MAX_SECONDS = 30.0  # of one measurement, after which no larger one is made


def measured_engine(name: str, engine_name: str, max_completion_length: int) -> dict[str, Any]:
    """Return `decode_curve`, `prefill_seconds` and `prefill_quadratic_seconds` of a model on this machine.

    Args:
        name: The model, a path or a name on the Hub.
        engine_name: "transformers" or "vllm".
        max_completion_length: No context longer than this is measured.
    """
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    longest = min(max_completion_length, model.config.get_text_config().max_position_embeddings, _PREFIX + 1)
    if engine_name == "vllm":
        engine: SegmentEngine = _vllm_engine(model, name, longest)
    else:
        engine = _transformers_engine(model)
    probe = _Probe(engine, model.config.get_text_config().vocab_size)
    num_steps = min(_NUM_STEPS, max(1, longest // 4))
    return {
        "decode_curve": probe.decode_curve(min(_CONTEXT, longest - 2 * num_steps), num_steps),
        **probe.prefill(longest - 1),
    }


def _transformers_engine(model: Any) -> TransformersEngine:
    model = model.to(Accelerator().device)
    config = cast(Any, GenerationConfig)(do_sample=True, temperature=1.0, pad_token_id=0)
    return TransformersEngine(
        generation_model=lambda: nullcontext(model),
        generation_config=config,
        eos_token_ids=[],
        pad_token_id=0,
        max_batch_size=max(_SIZES),
    )


def _vllm_engine(model: Any, name: str, longest: int) -> SegmentEngine:
    from ..rollout.vllm import ColocatedEngine, SegmentVLLM

    generation = SegmentVLLM(
        model,
        Accelerator(cpu=not torch.cuda.is_available()),
        AutoTokenizer.from_pretrained(name),
        max_model_length=longest,
        num_sequences=max(_SIZES),
    )
    return ColocatedEngine(generation, sync_weights=lambda: None, eos_token_ids=[])


class _Probe:
    """Times the engine on random tokens, anew each time, so that no cache of prefixes is hit."""

    def __init__(self, engine: SegmentEngine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)

    def decode_curve(self, context: int, num_steps: int) -> dict[int, float]:
        """Return the seconds of a decode step by number of sequences."""
        curve: dict[int, float] = {}
        for size in _SIZES:
            started = time.perf_counter()
            self._seconds(size, context, 2)  # what is compiled or captured at the first use of a shape
            short = long = math.inf
            for _ in range(_TRIES):
                short = min(short, self._seconds(size, context, num_steps))
                long = min(long, self._seconds(size, context, 2 * num_steps))
                if long > short:  # else something else has held up the shorter ones
                    break
            curve[size] = (long - short) / num_steps
            sys.stderr.write(f"measured: {size} sequences, {curve[size] * 1e3:.3g} ms per decode step\n")
            if time.perf_counter() - started > _MAX_SECONDS and len(curve) > 1:
                break
        smooth = _not_falling(np.array(list(curve.values())))
        if smooth[0] <= 0:
            raise RuntimeError(
                f"The measured decode steps ({curve}) take no time at all: other processes took more of the machine than "
                "the decoding. Repeat the measurement on an idle machine, or pass `--decode-curve`."
            )
        return dict(zip(curve, smooth.tolist(), strict=True))

    def prefill(self, length: int) -> dict[str, float]:
        """Return the parabola through no prefix, half of `length` and `length`, or the line if it bends down."""
        step = self._seconds(1, 1, 1)
        half, whole = (max(0.0, self._seconds(1, tokens, 1) - step) for tokens in (length // 2, length))
        quadratic = (whole / length - half / (length // 2)) / (length - length // 2)
        if quadratic <= 0 or half <= 0:
            quadratic = 0.0
        return {
            "prefill_seconds": max(0.0, whole / length - quadratic * length),
            "prefill_quadratic_seconds": quadratic,
        }

    def _seconds(self, size: int, context: int, num_steps: int) -> float:
        """Return the least time of a few runs: others on the machine can only add to it."""
        return min(self._run(size, context, num_steps) for _ in range(_REPEATS))

    def _run(self, size: int, context: int, num_steps: int) -> float:
        ids = self._random.integers(0, self._vocab_size, (size, context))
        requests = [DecodeRequest(row, num_steps) for row in ids]
        started = time.perf_counter()
        for _ in self._engine.decode(requests):
            pass
        return time.perf_counter() - started


def _not_falling(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest values, in least squares, that never fall: more sequences don't take less time."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            other_mean, other_count = blocks.pop()
            mean = (mean * count + other_mean * other_count) / (count + other_count)
            count += other_count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
