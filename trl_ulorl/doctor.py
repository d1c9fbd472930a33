"""Checks of a model, an engine and a configuration before a long run: does what training rests on hold here?

Each check takes a `Patient`, a trainer as training would build it, and returns a `Check` with its figures. None trains;
the one that changes weights puts them back. docs/doctor.md says what each finds and what to do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from .config import DMMPTsConfig
from .planner import BYTES_PER_HELD_TOKEN
from .rollout.engine import DecodeRequest, SegmentEngine
from .rollout.transformers import TransformersEngine
from .trainer import UloRLTrainer

Figures = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Check:
    """What one check found.

    Args:
        name: The check.
        ok: Whether it passed.
        figure: What was measured; the first entry is the one that decides.
        message: What that means, and after a failure the way out.
    """

    name: str
    ok: bool
    figure: Figures
    message: str


@dataclass(frozen=True)
class Tolerance:
    """How far engine and trainer may be apart in the precision of a run, in nats.

    float32 leaves only the order of summation. bfloat16 has 8 bits of mantissa: a logit of 20 is off by up to 0.06, and
    kernels round differently, so that single tokens may be far off and only the mean is judged.

    Args:
        mean: Mean gap of a token.
        largest: Gap of any token; None: not judged.
        tie: Gap of two tokens whose order rounding may turn.
    """

    mean: float
    largest: float | None
    tie: float


_CACHED_TOKENS = 272  # two blocks of the largest that vLLM has, 128 tokens on a CPU, and a little more
EXACT = Tolerance(mean=1e-4, largest=2e-3, tie=2e-3)
ROUNDED = Tolerance(mean=0.03, largest=None, tie=0.25)


@dataclass(eq=False)
class Completion:
    """What an engine made of a prompt, call by call."""

    prompt_ids: NDArray[Any]
    limit: int
    token_ids: list[int] = field(default_factory=list)
    per_token_logps: list[float] = field(default_factory=list)
    is_stopped: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended or used up its limit."""
        return self.is_stopped or len(self.token_ids) >= self.limit

    @property
    def all_ids(self) -> NDArray[np.int32]:
        """Prompt and completion."""
        return np.concatenate([self.prompt_ids, np.asarray(self.token_ids, dtype=np.int32)]).astype(np.int32)


class Patient:
    """A trainer under examination.

    Args:
        trainer: Built from the configuration, not trained.
        num_prompts: Prompts that are decoded.
        num_tokens: Most tokens that a check decodes for each.
    """

    def __init__(self, trainer: UloRLTrainer, *, num_prompts: int, num_tokens: int) -> None:
        self.trainer = trainer
        self.num_tokens = min(num_tokens, trainer.args.max_completion_length)
        rows = trainer.train_dataset.select(range(min(num_prompts, len(trainer.train_dataset))))
        self.prompts = [np.asarray(ids, np.int32) for ids in trainer._tokenized(list(rows["prompt"]))]

    @property
    def engine(self) -> SegmentEngine:
        """The engine that training would decode with."""
        return self.trainer.rollout_engine

    @property
    def segment_length(self) -> int:
        """Tokens of a segment, in the proportion that the configuration has to its limit."""
        return max(1, -(-self.num_tokens // max(2, self.trainer.args.num_segments)))

    @property
    def tolerance(self) -> Tolerance:
        """What rounding may do in this run's precision."""
        is_exact = self.trainer.model.dtype == torch.float32 and self.trainer.accelerator.mixed_precision == "no"
        return EXACT if is_exact else ROUNDED

    def decode(self, prompts: Sequence[NDArray[Any]], limits: Sequence[int], segment_length: int) -> list[Completion]:
        """Decode prompts to their end or limit, by at most `segment_length` tokens a call, noting broken promises."""
        completions = [Completion(ids, limit) for ids, limit in zip(prompts, limits, strict=True)]
        while unfinished := [completion for completion in completions if not completion.is_finished]:
            budgets = [min(segment_length, c.limit - len(c.token_ids)) for c in unfinished]
            requests = [DecodeRequest(c.all_ids, budget) for c, budget in zip(unfinished, budgets, strict=True)]
            answered = set()
            for decoded in self.engine.decode(requests):
                completion, budget = unfinished[decoded.request_index], budgets[decoded.request_index]
                answered.add(decoded.request_index)
                ids = [int(token) for token in decoded.token_ids]
                completion.faults += _faults(ids, decoded.is_stopped, budget, self.trainer.eos_token_ids)
                completion.token_ids += ids
                completion.per_token_logps += [float(logp) for logp in decoded.per_token_logps]
                completion.is_stopped = decoded.is_stopped
            if len(answered) < len(requests) or any(not c.token_ids for c in unfinished):
                raise RuntimeError(
                    f"The engine answered {len(answered)} of {len(requests)} requests, or without a token: see its log."
                )
        return completions

    @cached_property
    def samples(self) -> list[Completion]:
        """Completions sampled in segments, as training would."""
        return self.decode(self.prompts, [self._room(ids) for ids in self.prompts], self.segment_length)

    def _room(self, prompt_ids: NDArray[Any]) -> int:
        return max(1, min(self.num_tokens, self.trainer._rows.room(prompt_ids.size)))

    def score(self, all_ids: NDArray[Any], num_completion: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the trainer's log-probabilities and entropies of the last tokens, each of shape `(num_completion,)`."""
        ids = torch.from_numpy(all_ids.astype(np.int64))[None].to(self.trainer.accelerator.device)
        model = self.trainer.model
        was_training = model.training
        model.train(False)
        try:
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                logps, entropies, _ = self.trainer._get_per_token_logps_and_entropies(
                    model, ids, torch.ones_like(ids), num_completion, compute_entropy=True
                )
        finally:
            model.train(was_training)
        assert entropies is not None
        return logps[0].double().cpu().numpy(), entropies[0].double().cpu().numpy()

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """Have the engine take the likeliest token."""
        engine = cast(Any, self.engine)
        if isinstance(engine, TransformersEngine):
            config = engine._generation_config
            kept = config.do_sample, config.temperature
            config.do_sample, config.temperature = False, 1.0
            try:
                yield
            finally:
                config.do_sample, config.temperature = kept
        else:
            generation = engine._generation
            kept = generation.temperature
            generation.temperature = 0.0
            try:
                yield
            finally:
                generation.temperature = kept

    @contextmanager
    def changed_weights(self) -> Iterator[None]:
        """Add noise to the trained weights, half of each tensor's own spread, and take it away again."""
        trained = [value for value in self.trainer.model.parameters() if value.requires_grad]
        kept = [value.detach().clone() for value in trained]
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for value in trained:
                    noise = torch.randn(value.shape, generator=generator).to(value)
                    value.add_(0.5 * noise * (float(value.float().std(unbiased=False)) or 0.01))
            self.trainer._last_loaded_step = -1  # an engine with weights of its own loads them anew
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(trained, kept, strict=True):
                    value.copy_(before)
            self.trainer._last_loaded_step = -1


def _faults(ids: list[int], is_stopped: bool, budget: int, eos_token_ids: Sequence[int]) -> list[str]:
    """Return which promises of an engine a decoded segment breaks."""
    ends = [place for place, token in enumerate(ids) if token in eos_token_ids]
    faults = []
    if len(ids) > budget:
        faults.append(f"{len(ids)} tokens for a budget of {budget}")
    if ends and ends[0] != len(ids) - 1:
        faults.append("tokens behind an end of sequence")
    if is_stopped != (bool(ends) and ends[-1] == len(ids) - 1):
        faults.append(f"said to be {'ended' if is_stopped else 'unfinished'}, but its last token says otherwise")
    if not is_stopped and len(ids) < budget:
        faults.append(f"given up after {len(ids)} of {budget} tokens")
    return faults


# --------------------------------------------------------------------------------------------------------------- checks


def check_segments(patient: Patient) -> Check:
    """Compare greedy decoding in segments with greedy decoding in one call, token for token."""
    with patient.greedy():
        limits = [patient._room(ids) for ids in patient.prompts]
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


@dataclass(frozen=True)
class Machine:
    """Bytes that the machine has for this process.

    Args:
        host: Memory of the host, shared by all processes on it.
        device: Memory of the accelerator; None without one.
    """

    host: int
    device: int | None

    @classmethod
    def here(cls) -> Machine:
        """Look at this machine."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
        host = host if text == "max" else min(host, int(text))
        return cls(host, torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None)


def check_memory(patient: Patient, machine: Machine, num_processes: int = 1) -> Check:
    """Add up what pools at their limit, weights, optimizer state and keys and values take, against what there is.

    Args:
        patient: Its figures are those of one process.
        machine: What there is.
        num_processes: Processes of the training on this machine. Each holds the batch; what is in flight lives on one.
    """
    trainer, args = patient.trainer, patient.trainer.args
    config = trainer.model.config.get_text_config()
    assert args.max_inflight_groups is not None
    groups = args.max_inflight_groups * num_processes + args.groups_per_batch * num_processes**2
    pools = groups * args.num_generations * args.max_completion_length * BYTES_PER_HELD_TOKEN
    parameters = list(trainer.model.parameters())
    weights = sum(value.numel() * value.element_size() for value in parameters)
    # A gradient and the two moments of Adam, each in the precision of the weight it belongs to.
    states = sum(3 * value.numel() * value.element_size() for value in parameters if value.requires_grad)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv_token = 2 * config.num_hidden_layers * kv_heads * head_size * trainer.model.dtype.itemsize
    at_once = (
        args.sequences_per_engine
        if args.use_vllm
        else args.decode_batch_size or args.per_device_train_batch_size * args.steps_per_generation
    )
    sequence = max(len(ids) for ids in patient.prompts) + args.max_completion_length
    cache = kv_token * sequence * (1 if args.use_vllm else at_once)  # vLLM queues what does not fit, beyond one
    host_needed, device_needed = pools, weights + states + cache
    if machine.device is None:
        host_needed, device_needed = pools + device_needed * num_processes, 0
    figure: Figures = {
        "host_needed_gib": host_needed / 2**30,
        "host_gib": machine.host / 2**30,
        "device_needed_gib": device_needed / 2**30,
        "device_gib": None if machine.device is None else machine.device / 2**30,
        "pools_gib": pools / 2**30,
        "weights_gib": weights / 2**30,
        "gradients_and_optimizer_gib": states / 2**30,
        "kv_gib": cache / 2**30,
        "kv_bytes_per_token": kv_token,
    }
    problems = []
    if host_needed > machine.host:
        problems.append(f"the host needs {host_needed / 2**30:.3g} GiB and has {machine.host / 2**30:.3g}")
    if machine.device is not None and device_needed > machine.device:
        problems.append(f"the device needs {device_needed / 2**30:.3g} GiB and has {machine.device / 2**30:.3g}")
    if not problems:
        message = (
            f"Pools at their limit, weights, optimizer and cache need {(host_needed + device_needed) / 2**30:.3g} GiB."
        )
        return Check("memory_will_do", True, figure, message + " Activations come on top.")
    message = "; ".join(problems) + (
        ", without activations. Lower `decode_batch_size` for the cache, `max_inflight_groups` for the pools; shard "
        "weights and optimizer over devices with ZeRO-3 or FSDP2 (this counts one device alone), or train a LoRA adapter."
    )
    return Check("memory_will_do", False, figure, message[0].upper() + message[1:])


# ------------------------------------------------------------------------------------------------------- sigma and tau

TAUS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
MASTERED_RANGE = (0.2, 0.9)


def measure_entropy(patient: Patient) -> Check:
    """Measure the starting entropy and the share of mastered tokens, and propose `sigma` and `tau`."""
    scores = [patient.score(c.all_ids, len(c.token_ids)) for c in patient.samples]
    logps = np.concatenate([logp for logp, _ in scores])
    entropies = np.array([entropy.mean() for _, entropy in scores])
    sigma, tau = proposed_sigma(entropies), proposed_tau(logps)
    given = cast(DMMPTsConfig | None, patient.trainer.args.dmmpts)
    error = float(entropies.std(ddof=1) / np.sqrt(entropies.size)) if entropies.size > 1 else None
    figure: Figures = {
        "sigma_proposed": sigma,
        "tau_proposed": tau,
        "entropy_mean": float(entropies.mean()),
        "entropy_standard_error": error,
        "mastered_frac": float((logps >= np.log(0.99)).mean()),
        "mastered_frac_at_proposed_tau": float((logps >= np.log(tau)).mean()),
        "sigma": None if given is None else given.sigma,
        "tau": None if given is None else given.tau,
        "outputs": len(scores),
    }
    message = (
        f"Starting entropy {entropies.mean():.3g} nats, {figure['mastered_frac']:.0%} of the tokens above 0.99: sigma "
        f"{sigma:g} and tau {tau:g} would keep it there."
    )
    return Check("entropy", bool(np.isfinite(entropies).all()), figure, message)


def proposed_sigma(response_entropies: NDArray[np.float64]) -> float:
    """Return the mean entropy of the responses in nats, to two digits: masking then holds it where training starts.

    The paper's 0.2 is 0.8 to 1.4 times the starting entropies of its three models.

    Example:
        >>> proposed_sigma(np.array([0.1, 0.2, 0.168]))
        0.16
    """
    return float(f"{max(float(response_entropies.mean()), 1e-3):.2g}")


def proposed_tau(per_token_logps: NDArray[np.float64]) -> float:
    """Return the paper's 0.99 if 20 to 90 % of the tokens are at least so likely, else the nearest that does this.

    Fewer, and masking could not hold the entropy; more, and a masked response would teach next to nothing.

    Example:
        >>> proposed_tau(np.log([0.999, 0.5, 0.5, 0.5]))
        0.99
        >>> proposed_tau(np.log([0.9992] * 99 + [0.99995]))
        0.9995
    """
    shares = {tau: float((per_token_logps >= np.log(tau)).mean()) for tau in TAUS}
    least, most = MASTERED_RANGE
    if shares[0.99] > most:
        return next((tau for tau in TAUS if tau > 0.99 and shares[tau] <= most), TAUS[-1])
    if shares[0.99] < least:
        return next((tau for tau in reversed(TAUS) if tau < 0.99 and shares[tau] >= least), TAUS[0])
    return 0.99


CHECKS: tuple[Callable[[Patient], Check], ...] = (
    check_segments,
    check_logps,
    check_cap,
    check_stale_cache,
    check_rope,
)
