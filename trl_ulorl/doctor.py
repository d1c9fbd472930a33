"""Checks of a model, an engine and a configuration before a long run: does what training rests on hold here?

Each check takes a `Patient`, a trainer as training would build it, and returns a `Check` with its figures. None trains;
the one that changes weights puts them back. docs/doctor.md says what each finds and what to do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from .doctor_patient import Check, Completion, Figures, Patient, Tolerance
from .trainer import UloRLTrainer

_CACHED_TOKENS = 272  # two blocks of the largest that vLLM has, 128 tokens on a CPU, and a little more


# --------------------------------------------------------------------------------------------------------------- checks


def check_segments(patient: Patient) -> Check:
    """Compare greedy decoding in segments with greedy decoding in one call, token for token."""
    with patient.greedy():
        limits = [patient.room(ids) for ids in patient.prompts]
        whole = patient.decode(patient.prompts, limits, patient.num_tokens)
        cut = patient.decode(patient.prompts, limits, patient.segment_length)
    gaps = [_tie_gap(patient, a, b) for a, b in zip(whole, cut, strict=True) if a.token_ids != b.token_ids]
    worst, tie = max(gaps, default=0.0), patient.tolerance.tie
    figure: Figures = {
        "largest_tie_nats": worst,
        "different": len(gaps),
        "prompts": len(whole),
        "segments_mean": float(np.mean([-(-len(c.token_ids) // patient.segment_length) for c in cut])),
    }
    if worst <= tie:
        message = f"{len(whole) - len(gaps)} of {len(whole)} outputs are the same token for token"
        message += f"; the others part at ties of at most {worst:.2g} nats, which rounding decides." if gaps else "."
        return Check("segments_equal_one_shot", True, figure, message)
    message = (
        f"{len(gaps)} of {len(whole)} outputs change when they are decoded in segments, where the trainer sees {worst:.3g} "
        f"nats between the two tokens (rounding explains {tie:g}). The engine does not continue the prefix that it is "
        "given: check its release, its cache of prefixes and its handling of positions."
    )
    return Check("segments_equal_one_shot", False, figure, message)


def _tie_gap(patient: Patient, first: Completion, second: Completion) -> float:
    """Return how far apart the trainer sees the two tokens at which two outputs part, in nats."""
    common = next(
        (i for i, (a, b) in enumerate(zip(first.token_ids, second.token_ids, strict=False)) if a != b),
        min(len(first.token_ids), len(second.token_ids)),
    )
    if common >= min(len(first.token_ids), len(second.token_ids)):
        return float("inf")  # one stops where the other goes on, with the same tokens: no tie explains it
    ends = [c.prompt_ids.size + common + 1 for c in (first, second)]
    logps = [patient.score(c.all_ids[:end], 1)[0][0] for c, end in zip((first, second), ends, strict=True)]
    return float(abs(logps[0] - logps[1]))


def check_logps(patient: Patient) -> Check:
    """Compare the log-probabilities that the engine sampled with and the trainer's, by position."""
    gaps = [np.abs(patient.score(c.all_ids, len(c.token_ids))[0] - c.per_token_logps) for c in patient.samples]
    figure, ok = _gap_figure(gaps, patient.tolerance)
    if ok:
        message = (
            f"Engine and trainer agree within {figure['max']:.2g} nats per token, {figure['mean']:.2g} in the mean."
        )
    else:
        message = (
            f"Engine and trainer differ by {figure['max']:.3g} nats at most, {figure['mean']:.3g} in the mean "
            f"(allowed: {_allowed(patient.tolerance)}). Importance ratios of fresh tokens would be wrong. Give both the same "
            "precision (float32, or bf16 in both), sample with `top_p=1`, `top_k=0` and no `min_p`, and check rope settings "
            "if the gap grows with the position."
        )
    return Check("logps_agree", ok, figure, message)


def _gap_figure(gaps: Sequence[NDArray[np.float64]], tolerance: Tolerance) -> tuple[Figures, bool]:
    """Return mean and largest gap and where it grows: the means of the quarters of the longest output's positions."""
    width = max(gap.size for gap in gaps)
    positions = np.concatenate([np.arange(gap.size) for gap in gaps])
    every = np.concatenate(gaps)
    figure: Figures = {
        "mean": float(every.mean()),
        "max": float(every.max()),
        "max_at": int(positions[every.argmax()]),
    }
    for quarter in range(4):
        inside = (positions * 4 // width) == quarter
        figure[f"mean_quarter_{quarter + 1}"] = float(every[inside].mean()) if inside.any() else None
    is_small = bool(np.isfinite(every).all()) and float(every.mean()) <= tolerance.mean
    return figure, is_small and (tolerance.largest is None or float(every.max()) <= tolerance.largest)


def _allowed(tolerance: Tolerance) -> str:
    mean = f"{tolerance.mean:g} in the mean"
    return mean if tolerance.largest is None else f"{mean}, {tolerance.largest:g} for any token"


def check_cap(patient: Patient) -> Check:
    """Decode to limits of 1, 2, 3, ... tokens in short segments, and look whether each is kept to the token."""
    limits = [1 + index % 7 for index in range(len(patient.prompts))]
    completions = [*patient.decode(patient.prompts, limits, 3), *patient.samples]
    broken = [fault for completion in completions for fault in completion.faults]
    over = sum(len(completion.token_ids) > completion.limit for completion in completions)
    at_the_cap = sum(not completion.is_stopped and not completion.faults for completion in completions)
    figure: Figures = {
        "faults": len(broken),
        "over_the_cap": over,
        "at_the_cap": at_the_cap,
        "outputs": len(completions),
    }
    if not broken and not over:
        return Check("cap_holds", True, figure, f"All {len(completions)} outputs keep to their budgets and limits.")
    message = (
        f"{len(broken)} segments break what an engine promises, the first: {broken[0] if broken else 'over the cap'}. The "
        "length limit would not hold, or rollouts would end or go on wrongly: mend the engine."
    )
    return Check("cap_holds", False, figure, message)


def check_stale_cache(patient: Patient) -> Check:
    """Change the weights, continue prefixes that the engine knows, and compare with the trainer's new log-probabilities."""
    # Engines keep whole blocks only: the texts are repeated until they fill some.
    length = _CACHED_TOKENS + min(0, patient.trainer._rows.room(_CACHED_TOKENS) - 1)
    prefixes = [
        np.resize(c.all_ids, max(length, (c.all_ids.size + c.prompt_ids.size + 1) // 2)) for c in patient.samples
    ]
    limits = [max(1, min(patient.segment_length, patient.trainer._rows.room(ids.size))) for ids in prefixes]
    patient.decode(prefixes, limits, patient.segment_length)  # so that the engine has seen the very prefixes
    with patient.changed_weights():
        continued = patient.decode(prefixes, limits, patient.segment_length)
        fresh = [patient.score(c.all_ids, len(c.token_ids))[0] for c in continued]
    before = [patient.score(c.all_ids, len(c.token_ids))[0] for c in continued]
    figure, ok = _gap_figure(
        [np.abs(new - c.per_token_logps) for new, c in zip(fresh, continued, strict=True)], patient.tolerance
    )
    effect = float(np.concatenate([np.abs(new - old) for new, old in zip(fresh, before, strict=True)]).mean())
    figure = {"mean": figure["mean"], "max": figure["max"], "effect_of_the_change_mean": effect}
    if effect < 5 * patient.tolerance.mean:
        message = (
            f"The changed weights move log-probabilities by {effect:.2g} nats only, too little to tell. Check a model whose "
            "weights are trained, or with more prompts (`--problems`)."
        )
        return Check("no_stale_cache", False, figure, message)
    if ok:
        message = f"After a change of {effect:.2g} nats the engine follows within {figure['max']:.2g}."
        return Check("no_stale_cache", True, figure, message)
    message = (
        f"After a change of the weights by {effect:.2g} nats the engine is {figure['mean']:.3g} off in the mean (allowed: "
        f"{_allowed(patient.tolerance)}): it decodes with old weights, or with keys and values of old ones. Check the weight "
        "sync, and that its cache of prefixes is emptied."
    )
    return Check("no_stale_cache", False, figure, message)


def check_rope(patient: Patient) -> Check:
    """Compare the positions that configuration, model, engine and a saved model have, and what prompt and limit need."""
    trainer = patient.trainer
    config = trainer.model.config.get_text_config()
    wanted = _positions(config)
    problems = _rotary_faults(trainer.model, config)
    with tempfile.TemporaryDirectory() as folder:
        trainer.model.config.save_pretrained(folder)
        saved = _positions(AutoConfig.from_pretrained(folder).get_text_config())
    if saved != wanted:
        problems.append(f"a saved configuration comes back as {saved} instead of {wanted}")
    engine_positions, engine_limit = _engine_positions(trainer)
    if engine_positions is not None and engine_positions != wanted:
        problems.append(f"the engine has {engine_positions}, the model {wanted}")
    longest = max(len(ids) for ids in patient.prompts)
    needed = longest + trainer.args.max_completion_length
    for name, limit in (("the model", config.max_position_embeddings), ("the engine", engine_limit)):
        if limit is not None and needed > limit:
            problems.append(
                f"a prompt of {longest} tokens and a completion of {trainer.args.max_completion_length} need {needed} "
                f"positions, {name} has {limit}"
            )
    own = trainer.model.generation_config
    for name in ("max_length", "max_new_tokens"):
        most = getattr(own, name, None) if own is not None else None
        if most is not None and most < needed and not (name == "max_length" and most == 20):  # transformers' default
            problems.append(f"the saved generation configuration has {name} {most}, and would cut outputs of {needed}")
    figure: Figures = {
        "problems": len(problems),
        "positions": config.max_position_embeddings,
        "needed": needed,
        "engine_limit": engine_limit,
        "rope": str(wanted.get("rope_parameters")),
    }
    if not problems:
        return Check(
            "rope_agrees", True, figure, f"Model, engine and saved configuration agree; {needed} positions fit."
        )
    message = "; ".join(problems) + (
        ". Set `rope_parameters` and `max_position_embeddings` in `model_init_kwargs`, so that all take them from one place."
    )
    return Check("rope_agrees", False, figure, message[0].upper() + message[1:])


def _positions(config: Any) -> dict[str, Any]:
    values = config.to_dict()
    return {name: values[name] for name in ("max_position_embeddings", "rope_parameters") if name in values}


def _rotary_faults(model: Any, config: Any) -> list[str]:
    """Return which rotary embeddings turn at other frequencies than the configuration says."""
    faults = []
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        if last == "inv_freq":
            module = model.get_submodule(path)
            expected = type(module)(config=config).inv_freq.to(buffer)
            if expected.shape != buffer.shape or not torch.allclose(expected, buffer, rtol=1e-3):
                faults.append(f"{path} turns at other frequencies than the configuration says")
    return faults


def _engine_positions(trainer: UloRLTrainer) -> tuple[dict[str, Any] | None, int | None]:
    """Return what an engine with a configuration of its own has; None where it shares the model or does not tell."""
    if not trainer.args.use_vllm:
        return None, None
    limit = int(cast(Any, trainer.rollout_engine).max_model_length)
    if trainer.args.vllm_mode == "server":
        return None, limit
    engine_config = trainer.vllm_generation.llm.llm_engine.model_config.hf_text_config
    return _positions(engine_config), limit


CHECKS: tuple[Callable[[Patient], Check], ...] = (
    check_segments,
    check_logps,
    check_cap,
    check_stale_cache,
    check_rope,
)
