"""Every check of `UloRLConfig` that needs more than one field, and the defaults that follow from other fields.

Each is called by `UloRLConfig.__post_init__`, in the order in which they stand here. A message says what was given, what must
hold and why, and the way out.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from .microbatches import TOKEN_SUM_LOSS_TYPES
from .rollout.schedule import ContinuousSchedule

if TYPE_CHECKING:
    from .config import UloRLConfig

# What decoding in segments sets itself, or what a cut into segments would change the meaning of.
_RESERVED_GENERATION_KWARGS = (
    "max_new_tokens",
    "max_length",
    "max_time",
    "min_new_tokens",
    "min_length",
    "num_beams",
    "num_return_sequences",
    "return_dict_in_generate",
    "stop_strings",
    "eos_token_id",
    "pad_token_id",
)
# Fields of their own, whose checks would be bypassed, and ways to restrict sampling that no field has.
_SAMPLING_KWARGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
# What changes neither lengths nor distributions.
_ALLOWED_GENERATION_KWARGS = (
    "do_sample",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "prefill_chunk_size",
    "disable_compile",
)
_LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def check_counts(config: UloRLConfig) -> None:
    """Refuse numbers that are no counts."""
    for name, least in {
        "num_generations": 2,
        "num_iterations": 1,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 1,
        "num_segments": 1,
        "segment_length": 1,
        "max_inflight_groups": 1,
        "max_staleness": 0,
        "overlong_cache_length": 1,
        "decode_batch_size": 1,
        "vllm_max_model_length": 1,
        "vllm_tensor_parallel_size": 1,
        "rollout_slots": 1,
    }.items():
        value = getattr(config, name)
        may_be_unset = type(config).__dataclass_fields__[name].default is None
        if value is None and may_be_unset:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"`{name}` ({value!r}) must be a whole number of at least {least}"
                + (", or left out." if may_be_unset else ".")
            )


def explain_batch_size(config: UloRLConfig, error: ValueError) -> None:
    """Say what a batch size follows from, where the parent's message does not."""
    size, generations = config.generation_batch_size, config.num_generations
    if size and size % generations:
        raise ValueError(
            f"`generation_batch_size` ({size}) must be a multiple of `num_generations` ({generations}), since a "
            "prompt's rollouts are trained on together. It is `per_device_train_batch_size` "
            f"({config.per_device_train_batch_size}) x processes ({config.world_size}) x `steps_per_generation` "
            f"({config.steps_per_generation}): change one of them, or `num_generations`."
        ) from error


def check_numbers(config: UloRLConfig) -> None:
    """Refuse texts where numbers are needed, and weights that no sum can hold."""
    optimizer = ("learning_rate", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
    for name in ("temperature", "top_p", "epsilon", "beta", *optimizer):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{name}` ({value!r}) must be a number.")  # noqa: TRY004 - as all bad fields
    weights = config.reward_weights
    if weights is not None and not all(isinstance(each, int | float) and math.isfinite(each) for each in weights):
        raise ValueError(f"`reward_weights` ({weights!r}) must hold finite numbers: rewards are summed with them.")


def check_optimizer(config: UloRLConfig) -> None:
    """Refuse numbers that the optimizer would only when training begins, and a run whose length is not what it seems."""
    for name, most, reason in (
        ("learning_rate", math.inf, "the step along the gradient"),
        ("weight_decay", math.inf, "the pull towards zero"),
        ("max_grad_norm", math.inf, "the largest norm of a gradient; 0 is no limit"),
        ("adam_beta1", 1.0, "the share of the last mean"),
        ("adam_beta2", 1.0, "the share of the last mean"),
        ("adam_epsilon", math.inf, "what is added to a root"),
    ):
        value = getattr(config, name)
        if not 0 <= value < most:
            bounds = "finite and not negative" if most == math.inf else f"in [0, {most:g})"
            raise ValueError(f"`{name}` ({value!r}) must be {bounds}: it is {reason}. Correct it, or leave it out.")
    if config.max_steps == 0 or config.max_steps < -1:
        raise ValueError(
            f"`max_steps` ({config.max_steps}) would be taken for no limit, and `num_train_epochs` "
            f"({config.num_train_epochs}) be trained. Pass a positive number, or leave it out for that."
        )


def check_choices(config: UloRLConfig) -> None:
    """Refuse unknown names."""
    for name, choices in {
        "importance_mode": ("pois", "sais"),
        "overlong": ("wrong", "mask", "soft"),
        "rollout_schedule": ("segment", "continuous"),
        "vllm_mode": ("colocate", "server"),
        "loss_type": _LOSS_TYPES,
        "resume_rollout": ("strict", "discard"),
        "importance_sampling_level": ("token", "sequence"),
        "scale_rewards": ("group", "batch", "none"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    }.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"`{name}` ({getattr(config, name)!r}) must be one of {', '.join(map(repr, choices))}.")


def check_segments(config: UloRLConfig) -> None:
    """Set the length of a segment, and refuse segments that do not reach the limit."""
    if config.segment_length is None:
        config.segment_length = math.ceil(config.max_completion_length / config.num_segments)
    if config.segment_length * config.num_segments < config.max_completion_length:
        needed = math.ceil(config.max_completion_length / config.segment_length)
        raise ValueError(
            f"`segment_length` ({config.segment_length}) times `num_segments` ({config.num_segments}) is below "
            f"`max_completion_length` ({config.max_completion_length}): rollouts would need more segments than "
            f"stated to reach the limit. Raise `num_segments` to at least {needed}, lower "
            "`max_completion_length`, or leave `segment_length` out."
        )
    if config.rollout_schedule == "continuous":
        _check_continuous(config)
    elif config.rollout_slots is not None:
        raise ValueError(
            f"`rollout_slots` ({config.rollout_slots}) belongs to `rollout_schedule='continuous'`; under 'segment' "
            "every unfinished rollout decodes in each round. Leave it out, or bound the rollouts held with "
            "`max_inflight_groups`."
        )


def _check_continuous(config: UloRLConfig) -> None:
    if not config.use_vllm:
        raise ValueError(
            "`rollout_schedule='continuous'` needs an engine that takes up and gives back rollouts at any token, and "
            "the transformers engine decodes whole segments. Set `use_vllm=True`, or use "
            "`rollout_schedule='segment'`."
        )
    if config.num_segments == 1:
        raise ValueError(
            "`rollout_schedule='continuous'` carries unfinished rollouts over to the next policy, but "
            "`num_segments` (1) asks for rollouts of one policy (TOIS). Set `num_segments` to 2 or more, or use "
            "`rollout_schedule='segment'`."
        )


def check_vllm(config: UloRLConfig) -> None:
    """Refuse what vLLM could do, but not to segments."""
    if config.generation_kwargs:
        raise ValueError(
            f"`generation_kwargs` holds {sorted(config.generation_kwargs)}, which vLLM would take as `SamplingParams`: "
            "they set what segments set themselves, or change sampling behind the recorded log-probabilities. Remove "
            "them; temperature, `top_p`, `top_k`, `min_p` and `repetition_penalty` are fields of their own."
        )
    if config.vllm_structured_outputs_regex is not None:
        raise ValueError(
            f"`vllm_structured_outputs_regex` ({config.vllm_structured_outputs_regex!r}) would be matched from the start "
            "again in every segment, and restricts sampling behind the recorded log-probabilities. Remove it, or ask "
            "for the form in the prompt and the reward."
        )
    if config.vllm_mode == "colocate":
        _check_colocated_vllm(config)
        return
    for name, flag in (("decode_batch_size", "--max-num-seqs"), ("vllm_max_model_length", "--max-model-len")):
        if getattr(config, name) is not None:
            raise ValueError(
                f"`{name}` ({getattr(config, name)}) has no effect on a vLLM server, which is started with its own limits. "
                f"Leave it out, and start the server with `{flag}`."
            )


def _check_colocated_vllm(config: UloRLConfig) -> None:
    if config.vllm_max_model_length is not None and config.vllm_max_model_length <= config.max_completion_length:
        raise ValueError(
            f"`vllm_max_model_length` ({config.vllm_max_model_length}) leaves no room for a prompt before "
            f"`max_completion_length` ({config.max_completion_length}) tokens: it bounds both together. Set it to the "
            "longest prompt plus `max_completion_length`, or leave it out for the model's own limit."
        )
    if config.world_size % config.vllm_tensor_parallel_size:
        raise ValueError(
            f"`vllm_tensor_parallel_size` ({config.vllm_tensor_parallel_size}) does not divide the number of processes "
            f"({config.world_size}), so some would be left without an engine. Change one of the two."
        )


def check_inflight(config: UloRLConfig) -> None:
    """Set how many groups and slots there are, and refuse what can not be met."""
    batch = config.groups_per_batch
    if config.max_inflight_groups is not None and config.max_inflight_groups < batch:
        raise ValueError(
            f"`max_inflight_groups` ({config.max_inflight_groups}) must be at least one batch of groups ({batch} = "
            f"`generation_batch_size` {config.generation_batch_size} / `num_generations` {config.num_generations}), or "
            "no batch could ever be filled. Raise it, or leave it out."
        )
    if config.rollout_schedule == "segment":
        default = config.num_segments * batch
    else:
        slots = config.rollout_slots or 2 * config.generation_batch_size
        default = ContinuousSchedule.inflight_groups(slots, config.num_generations, batch)
    if config.max_staleness is None:
        config.max_inflight_groups = config.max_inflight_groups or default
    else:
        _check_staleness(config, batch, default)
    if config.rollout_schedule == "continuous":
        _check_slots(config)


def _check_slots(config: UloRLConfig) -> None:
    assert config.max_inflight_groups is not None
    held = config.max_inflight_groups * config.num_generations
    if config.rollout_slots is None:
        config.rollout_slots = min(2 * config.generation_batch_size, held)
    num_engines = max(1, config.world_size // config.ranks_per_engine)
    room = (
        None if config.decode_batch_size is None else config.decode_batch_size * config.ranks_per_engine * num_engines
    )
    if room is not None and room < config.rollout_slots:
        raise ValueError(
            f"`decode_batch_size` ({config.decode_batch_size}) lets {room} rollouts decode at a time on all devices, fewer "
            f"than `rollout_slots` ({config.rollout_slots}): the others would wait inside the engine. Leave "
            f"`decode_batch_size` out, or set `rollout_slots` to {room}."
        )
    if not num_engines <= config.rollout_slots <= held:
        raise ValueError(
            f"`rollout_slots` ({config.rollout_slots}) must lie between the number of ranks that decode "
            f"({num_engines}) and the rollouts that may be held ({held} = `max_inflight_groups` "
            f"{config.max_inflight_groups} x `num_generations` {config.num_generations}), or slots would stay empty. "
            "Change it, or raise `max_inflight_groups`, and `max_staleness` where that is the bound."
        )


def _check_staleness(config: UloRLConfig, batch: int, default: int) -> None:
    assert config.max_staleness is not None
    least = config.updates_per_batch - 1
    if config.max_staleness < least:
        raise ValueError(
            f"`max_staleness` ({config.max_staleness}) can't be met: a batch feeds {config.updates_per_batch} optimizer "
            f"steps, so the last is {least} versions after the first. Raise it to at least {least}, or lower "
            "`num_iterations` or `steps_per_generation`."
        )
    held = batch * ((config.max_staleness - least) // config.updates_per_batch + 1)
    if config.max_inflight_groups is not None and config.max_inflight_groups > held:
        raise ValueError(
            f"`max_inflight_groups` ({config.max_inflight_groups}) can't be held under `max_staleness` "
            f"({config.max_staleness}), which leaves room for {held} groups: more of them could not all be trained "
            "on in time. Leave `max_inflight_groups` out, or raise `max_staleness`."
        )
    config.max_inflight_groups = config.max_inflight_groups or min(held, default)
    if config.rollout_schedule == "segment" and config.max_staleness < config.num_segments - 1:
        warnings.warn(
            f"`max_staleness` ({config.max_staleness}) is below `num_segments` - 1 ({config.num_segments - 1}): the "
            "longest rollouts are decoded to their end in one round and everyone waits for them again. Use fewer "
            "segments or allow more staleness.",
            UserWarning,
            stacklevel=5,
        )


def check_drain(config: UloRLConfig) -> None:
    """Refuse `drain` where batches and updates do not end together."""
    if not config.drain:
        return
    micro, accumulation = config.micro_steps_per_batch, config.gradient_accumulation_steps
    if micro % accumulation and accumulation % micro:
        raise ValueError(
            f"`drain` can't be met: a batch feeds {micro} backward passes (`steps_per_generation` "
            f"{config.steps_per_generation} x `num_iterations` {config.num_iterations}) and an update takes "
            f"{accumulation}, so batches and updates don't end together. Make one a multiple of the other."
        )
    if config.max_steps > 0 and config.max_steps % config.updates_per_batch:
        raise ValueError(
            f"`drain` can't be met: `max_steps` ({config.max_steps}) ends inside a batch, which feeds "
            f"{config.updates_per_batch} updates. Make `max_steps` a multiple of {config.updates_per_batch}."
        )


def check_sampling(config: UloRLConfig) -> None:
    """Refuse what changes sampling behind the recorded log-probabilities."""
    given_kwargs = set(config.generation_kwargs or {})
    reserved = sorted(given_kwargs & set(_RESERVED_GENERATION_KWARGS))
    if reserved:
        raise ValueError(
            f"`generation_kwargs` holds {reserved}: segment rollout sets lengths and stops itself, samples one sequence "
            "at a time and continues it token for token. Remove them; the limit is `max_completion_length`."
        )
    sampling = sorted(given_kwargs & set(_SAMPLING_KWARGS))
    if sampling:
        raise ValueError(
            f"`generation_kwargs` holds {sampling}, which would change sampling behind the log-probabilities that "
            "tokens are recorded with. Use the configuration's own fields of these names; typical and cut-off "
            "sampling are not supported."
        )
    unknown = sorted(given_kwargs - set(_ALLOWED_GENERATION_KWARGS) - {*reserved, *sampling})
    if unknown:
        raise ValueError(
            f"`generation_kwargs` holds {unknown}, which might act on every segment or on the distribution that tokens are "
            f"sampled from. Remove them; allowed are {', '.join(_ALLOWED_GENERATION_KWARGS)}."
        )
    if config.top_k in (-1, None):
        config.top_k = 0  # the paper's and vLLM's spelling of off
    for name, is_valid, rule in (
        ("temperature", 0 < config.temperature < math.inf, "positive: log-probabilities are taken at it"),
        ("top_p", 0 < config.top_p <= 1, "in (0, 1]; 1 is off"),
        ("top_k", config.top_k >= 0, "0 (off) or more"),
        ("min_p", config.min_p is None or 0 <= config.min_p <= 1, "in [0, 1]; 0 is off"),
        ("repetition_penalty", 0 < config.repetition_penalty < math.inf, "positive; 1 is off"),
        ("epsilon", 0 <= config.epsilon < math.inf, "0 or more: it is the width of the clip range"),
    ):
        if not is_valid:
            raise ValueError(
                f"`{name}` ({getattr(config, name)}) must be {rule}. The paper samples with temperature 0.85 only."
            )
    restricted = {
        "top_p": config.top_p < 1,
        "top_k": config.top_k > 0,
        "min_p": bool(config.min_p),
        "repetition_penalty": config.repetition_penalty != 1,
    }
    given = ", ".join(f"`{name}` ({getattr(config, name)})" for name, is_set in restricted.items() if is_set)
    if given and config.importance_mode == "sais":
        raise ValueError(
            f"{given} changes the distribution that tokens are sampled from, but SAIS divides by log-probabilities "
            "over the full vocabulary: its ratios would be biased by the probability that was cut away. Remove it "
            "(the paper samples with temperature only), or use `importance_mode='pois'`."
        )
    if given:
        warnings.warn(
            f"{given} changes the distribution that tokens are sampled from: the gradient is that of another policy "
            "than the one that sampled. The paper trains with temperature only.",
            UserWarning,
            stacklevel=4,
        )


def check_importance(config: UloRLConfig) -> None:
    """Refuse corrections and ratios that contradict the importance mode or the masking."""
    if config.use_transformers_continuous_batching:
        raise ValueError(
            "`use_transformers_continuous_batching=True` generates whole completions and returns no "
            "log-probabilities of the samples, which segments need. Leave it off."
        )
    if config.vllm_importance_sampling_correction:
        if config.importance_mode == "sais":
            raise ValueError(
                "`importance_mode='sais'` and `vllm_importance_sampling_correction=True` both weigh a token against the policy that "
                "sampled it, so that the ratio would be squared. Leave the correction off."
            )
        if config.vllm_importance_sampling_mode.startswith("sequence"):
            raise ValueError(
                f"`vllm_importance_sampling_mode` ({config.vllm_importance_sampling_mode!r}) sums the log-ratio over a "
                "completion: at 64k tokens a mean gap of 1.7e-5 per token is enough to delete it from the loss. "
                "Set `vllm_importance_sampling_correction=False`, or use a token-level mode with "
                "`num_segments=1`."
            )
        if config.num_segments > 1:
            raise ValueError(
                "`vllm_importance_sampling_correction` divides by the log-probabilities that tokens were sampled "
                f"with, so with `num_segments` ({config.num_segments}) it would re-weight older segments: that undoes "
                "POIS and counts SAIS's ratio twice. Set it to False; for that ratio itself use "
                "`importance_mode='sais'`."
            )
    if config.dmmpts is not None and config.importance_sampling_level == "sequence":
        raise ValueError(
            "`dmmpts` masks tokens, but with `importance_sampling_level='sequence'` every token of a response moves "
            "the one ratio that they share, so the mask would have no clear effect. Use "
            "`importance_sampling_level='token'`, or set `dmmpts=None`."
        )


def check_overlong(config: UloRLConfig) -> None:
    """Refuse a second say on truncated rollouts, and set the reach of the soft punishment."""
    if config.mask_truncated_completions:
        raise ValueError(
            f"`mask_truncated_completions=True` says again what `overlong` ({config.overlong!r}) decides. Remove it; "
            "to leave truncated rollouts out of the loss, set `overlong='mask'`."
        )
    if config.overlong_cache_length is None:
        if config.overlong == "soft":
            config.overlong_cache_length = max(1, config.max_completion_length // 5)
        return
    if config.overlong != "soft" or config.overlong_cache_length > config.max_completion_length:
        raise ValueError(
            f"`overlong_cache_length` ({config.overlong_cache_length}) must lie in (0, `max_completion_length` = "
            f"{config.max_completion_length}] and belongs to `overlong='soft'` (here {config.overlong!r}): the "
            "punishment grows over that many tokens before the limit. Leave it out for a fifth of the limit."
        )


def check_micro_batches(config: UloRLConfig) -> None:
    """Refuse to join rows where the loss of an update would depend on it."""
    if not config.dynamic_micro_batches:
        return
    if config.loss_type not in TOKEN_SUM_LOSS_TYPES:
        raise ValueError(
            f"`loss_type` ({config.loss_type!r}) is a mean over the rows of a micro-batch, so it would change with the "
            "number of rows that `dynamic_micro_batches` puts into one. Choose one of "
            f"{', '.join(map(repr, TOKEN_SUM_LOSS_TYPES))}, or leave `dynamic_micro_batches` out."
        )


def check_checkpoints(config: UloRLConfig) -> None:
    """Refuse a second way to save on a signal, which knows nothing of the rollout."""
    if config.enable_jit_checkpoint:
        raise ValueError(
            "`enable_jit_checkpoint=True` saves in the middle of an update, where gradients and the rest of the batch "
            "would be lost. Leave it off: `graceful_stop` (on by default) saves on SIGTERM, at the end of the engine call "
            "or of the update."
        )
