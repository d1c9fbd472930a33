"""The configuration: `UloRLConfig`, `DMMPTsConfig` and every check that needs more than one field."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

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


@dataclass(frozen=True)
class DMMPTsConfig:
    """Dynamic masking of well-mastered positive tokens (section 3.2 of the paper).

    Args:
        tau: Probability from which on a token of a positive response counts as mastered, in `(0, 1]`.
        sigma: Target entropy in nats: mastered tokens are masked only in responses whose mean entropy is below it.
        dynamic: False masks them always: the paper's static-masking ablation, under which the entropy keeps rising.

    Raises:
        ValueError: If `tau` or `sigma` is out of range.
    """

    tau: float = 0.99
    sigma: float = 0.2
    dynamic: bool = True

    def __post_init__(self) -> None:
        for name in ("tau", "sigma"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), (int, float)):
                raise TypeError(
                    f"`{name}` ({getattr(self, name)!r}) must be a number. YAML reads 2e-1 as text: write it as 0.2."
                )
        if not isinstance(self.dynamic, bool):
            raise TypeError(f"`dynamic` ({self.dynamic!r}) must be true or false, without quotes.")
        if not 0 < self.tau <= 1:
            raise ValueError(
                f"`tau` ({self.tau}) must lie in (0, 1]: it is the probability above which a token counts as "
                "mastered. The paper uses 0.99."
            )
        if not (self.sigma > 0 and math.isfinite(self.sigma)):
            raise ValueError(
                f"`sigma` ({self.sigma}) must be a positive entropy in nats: masking acts in responses below it. The "
                "paper uses 0.2; for no masking at all set `dmmpts=None`, for masking always `dynamic=False`."
            )


def _parse_dmmpts(value: DMMPTsConfig | dict[str, Any] | str | None) -> DMMPTsConfig | None:
    if value is None or isinstance(value, DMMPTsConfig):
        return value
    if isinstance(value, str) and value.strip().lower() in ("none", "null", "off"):
        return None
    if not isinstance(value, dict):
        raise TypeError(
            f"`dmmpts` ({value!r}) must be a `DMMPTsConfig`, a mapping such as "
            '\'{"tau": 0.99, "sigma": 0.2}\', or None to switch the masking off.'
        )
    unknown = sorted(map(str, value.keys() - {f.name for f in dataclasses.fields(DMMPTsConfig)}))
    if unknown:
        raise ValueError(f"`dmmpts` has unknown keys {unknown}: it takes `tau`, `sigma` and `dynamic`.")
    return DMMPTsConfig(**value)


@dataclass
class UloRLConfig(GRPOConfig):
    """Configuration of [`UloRLTrainer`]: TRL's `GRPOConfig` and what UloRL adds.

    Defaults that differ from `GRPOConfig`'s are the paper's: `temperature` 0.85 and `lr_scheduler_type` "constant"
    (section 4.1), and `vllm_importance_sampling_correction` False, because it would re-weight tokens of older segments,
    which is what POIS leaves out on purpose (section 3.1.2). TRL's own defaults for the loss ("dapo"), `beta` (0), the
    number of generations (8) and the learning rate (1e-6) are the paper's already.

    Raises:
        ValueError: If fields contradict each other; the message names the way out.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "dmmpts"]  # noqa: RUF012 - transformers' own form

    if TYPE_CHECKING:  # None only until the parent's `__post_init__` has run
        max_completion_length: int = 512
        num_generations: int = 8
        generation_batch_size: int = 0
        steps_per_generation: int = 0

    # Defaults that differ from GRPOConfig's
    temperature: float = field(
        default=0.85,
        metadata={"help": "Sampling temperature; log-probs, p and H are taken at it too (section 4.1)."},
    )
    lr_scheduler_type: str = field(
        default="constant",
        metadata={"help": "Learning rate schedule; the paper's learning rate is constant (section 4.1)."},
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={"help": "TRL's correction of engine and trainer log-probs; only allowed with one segment."},
    )

    # Segment rollout (section 3.1)
    num_segments: int = field(
        default=8,
        metadata={"help": "Segments that a rollout of full length takes (8 of 16k in section 4.1); 1 is TOIS."},
    )
    segment_length: int | None = field(
        default=None,
        metadata={"help": "Most new tokens of a rollout per round. None: ceil(max_completion_length / num_segments)."},
    )
    decode_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rollouts that decode together on a device; bounds its key-value cache. None: its batch share."
        },
    )
    rollout_schedule: str = field(
        default="segment",
        metadata={"help": "'segment' is Algorithm 1. 'continuous' needs an engine that can be stopped at any token."},
    )
    rollout_slots: int | None = field(
        default=None,
        metadata={"help": "Rollouts that decode at any time under the 'continuous' schedule."},
    )
    max_inflight_groups: int | None = field(
        default=None,
        metadata={"help": "Most groups held, unfinished and ready together. None: num_segments batches."},
    )
    max_staleness: int | None = field(
        default=None,
        metadata={"help": "Most optimizer steps from a rollout's first token to its last update. None: no bound."},
    )
    drain: bool = field(
        default=False,
        metadata={"help": "Stop admitting prompts near the end, so that nothing generated stays untrained."},
    )

    # Objective (sections 3.1.2 and 3.2)
    importance_mode: str = field(
        default="pois",
        metadata={"help": "'pois': the current policy is the denominator. 'sais': the one that sampled each segment."},
    )
    # The parser can't hold a dataclass here; after `__post_init__` it is a `DMMPTsConfig` or None.
    dmmpts: dict | str | None = field(  # type: ignore[type-arg]
        default_factory=dict,
        metadata={"help": "Masking of mastered tokens: a mapping of tau (0.99), sigma (0.2), dynamic; 'none': off."},
    )
    importance_alarm: bool = field(
        default=True,
        metadata={"help": "Warn when stale tokens have drifted so far from the policy that POIS is in doubt."},
    )

    # Rewards and selection (sections 3.5 and 4)
    dynamic_sampling: bool = field(
        default=True,
        metadata={"help": "Train on groups with differing rewards only, generating until a batch is full."},
    )
    overlong: str = field(
        default="wrong",
        metadata={"help": "Truncated rollouts: 'wrong' gives 0, 'mask' leaves them out, 'soft' is DAPO's punishment."},
    )
    overlong_cache_length: int | None = field(
        default=None,
        metadata={"help": "With 'soft', tokens before the limit over which it grows. None: a fifth, as in DAPO."},
    )
    correctness_func: str | None = field(
        default=None,
        metadata={"help": "Name of the reward function that measures correctness in {0, 1}. None: the first."},
    )

    # Records
    log_rollouts: bool = field(
        default=True,
        metadata={"help": "Write one line per finished group to `rollouts.jsonl` in the output folder."},
    )

    def __post_init__(self) -> None:
        self.dmmpts = _parse_dmmpts(self._parse_json_dmmpts())  # type: ignore[assignment]
        self._check_counts()
        try:
            super().__post_init__()
        except ValueError as error:
            self._explain_batch_size(error)
            raise
        self._check_choices()
        self._check_segments()
        self._check_inflight()
        self._check_drain()
        self._check_sampling()
        self._check_importance()
        self._check_overlong()

    def _parse_json_dmmpts(self) -> Any:
        if isinstance(self.dmmpts, str) and self.dmmpts.strip().startswith("{"):
            try:
                return json.loads(self.dmmpts)
            except json.JSONDecodeError as error:
                raise ValueError(f"`dmmpts` ({self.dmmpts}) is not valid JSON ({error}).") from error
        return self.dmmpts

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: `dmmpts` as a mapping."""
        values: dict[str, Any] = super().to_dict()
        if isinstance(self.dmmpts, DMMPTsConfig):
            values["dmmpts"] = dataclasses.asdict(self.dmmpts)
        return values

    # ---------------------------------------------------------------------------------------------- derived figures

    @property
    def groups_per_batch(self) -> int:
        """Prompts that one rollout step trains on."""
        return self.generation_batch_size // self.num_generations

    @property
    def micro_steps_per_batch(self) -> int:
        """Backward passes that one generation batch feeds on each rank."""
        return self.steps_per_generation * self.num_iterations

    @property
    def updates_per_batch(self) -> int:
        """Most optimizer steps that one generation batch feeds.

        A batch need not begin with an update: where the two don't align it begins up to accumulation - gcd backward
        passes into one.
        """
        micro, accumulation = self.micro_steps_per_batch, self.gradient_accumulation_steps
        latest_start = accumulation - math.gcd(micro, accumulation)
        return math.ceil((latest_start + micro) / accumulation)

    # ------------------------------------------------------------------------------------------------------- checks

    def _check_counts(self) -> None:
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
        }.items():
            value = getattr(self, name)
            may_be_unset = type(self).__dataclass_fields__[name].default is None
            if value is None and may_be_unset:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`{name}` ({value!r}) must be a whole number of at least {least}"
                    + (", or left out." if may_be_unset else ".")
                )

    def _explain_batch_size(self, error: ValueError) -> None:
        size, generations = self.generation_batch_size, self.num_generations
        if size and size % generations:
            raise ValueError(
                f"`generation_batch_size` ({size}) must be a multiple of `num_generations` ({generations}), since a "
                "prompt's rollouts are trained on together. It is `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) x processes ({self.world_size}) x `steps_per_generation` "
                f"({self.steps_per_generation}): change one of them, or `num_generations`."
            ) from error

    def _check_choices(self) -> None:
        for name, choices in {
            "importance_mode": ("pois", "sais"),
            "overlong": ("wrong", "mask", "soft"),
            "rollout_schedule": ("segment", "continuous"),
            "loss_type": _LOSS_TYPES,
            "importance_sampling_level": ("token", "sequence"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` ({getattr(self, name)!r}) must be one of {', '.join(map(repr, choices))}.")

    def _check_segments(self) -> None:
        if self.segment_length is None:
            self.segment_length = math.ceil(self.max_completion_length / self.num_segments)
        if self.segment_length * self.num_segments < self.max_completion_length:
            needed = math.ceil(self.max_completion_length / self.segment_length)
            raise ValueError(
                f"`segment_length` ({self.segment_length}) times `num_segments` ({self.num_segments}) is below "
                f"`max_completion_length` ({self.max_completion_length}): rollouts would need more segments than "
                f"stated to reach the limit. Raise `num_segments` to at least {needed}, lower "
                "`max_completion_length`, or leave `segment_length` out."
            )
        if self.rollout_schedule == "continuous":
            raise ValueError(
                "`rollout_schedule='continuous'` needs an engine that can be stopped at any token, and the "
                "transformers engine decodes whole segments. Use `rollout_schedule='segment'`."
            )
        if self.rollout_slots is not None:
            raise ValueError(
                f"`rollout_slots` ({self.rollout_slots}) belongs to `rollout_schedule='continuous'`; under 'segment' "
                "every unfinished rollout decodes in each round. Leave it out, or bound the rollouts held with "
                "`max_inflight_groups`."
            )

    def _check_inflight(self) -> None:
        batch = self.groups_per_batch
        if self.max_inflight_groups is not None and self.max_inflight_groups < batch:
            raise ValueError(
                f"`max_inflight_groups` ({self.max_inflight_groups}) must be at least one batch of groups ({batch} = "
                f"`generation_batch_size` {self.generation_batch_size} / `num_generations` {self.num_generations}), or "
                "no batch could ever be filled. Raise it, or leave it out for `num_segments` batches."
            )
        if self.max_staleness is None:
            self.max_inflight_groups = self.max_inflight_groups or self.num_segments * batch
            return
        least = self.updates_per_batch - 1
        if self.max_staleness < least:
            raise ValueError(
                f"`max_staleness` ({self.max_staleness}) can't be met: a batch feeds {self.updates_per_batch} optimizer "
                f"steps, so the last is {least} versions after the first. Raise it to at least {least}, or lower "
                "`num_iterations` or `steps_per_generation`."
            )
        held = batch * ((self.max_staleness - least) // self.updates_per_batch + 1)
        if self.max_inflight_groups is not None and self.max_inflight_groups > held:
            raise ValueError(
                f"`max_inflight_groups` ({self.max_inflight_groups}) can't be held under `max_staleness` "
                f"({self.max_staleness}), which leaves room for {held} groups: more of them could not all be trained "
                "on in time. Leave `max_inflight_groups` out, or raise `max_staleness`."
            )
        self.max_inflight_groups = self.max_inflight_groups or min(held, self.num_segments * batch)
        if self.max_staleness < self.num_segments - 1:
            warnings.warn(
                f"`max_staleness` ({self.max_staleness}) is below `num_segments` - 1 ({self.num_segments - 1}): the "
                "longest rollouts are decoded to their end in one round and everyone waits for them again. Use fewer "
                "segments or allow more staleness.",
                UserWarning,
                stacklevel=4,
            )

    def _check_drain(self) -> None:
        if not self.drain:
            return
        micro, accumulation = self.micro_steps_per_batch, self.gradient_accumulation_steps
        if micro % accumulation and accumulation % micro:
            raise ValueError(
                f"`drain` can't be met: a batch feeds {micro} backward passes (`steps_per_generation` "
                f"{self.steps_per_generation} x `num_iterations` {self.num_iterations}) and an update takes "
                f"{accumulation}, so batches and updates don't end together. Make one a multiple of the other."
            )
        if self.max_steps > 0 and self.max_steps % self.updates_per_batch:
            raise ValueError(
                f"`drain` can't be met: `max_steps` ({self.max_steps}) ends inside a batch, which feeds "
                f"{self.updates_per_batch} updates. Make `max_steps` a multiple of {self.updates_per_batch}."
            )

    def _check_sampling(self) -> None:
        given_kwargs = set(self.generation_kwargs or {})
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
        if self.top_k in (-1, None):
            self.top_k = 0  # the paper's and vLLM's spelling of off
        for name, is_valid, rule in (
            ("temperature", 0 < self.temperature < math.inf, "positive: log-probabilities are taken at it"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 is off"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "in [0, 1]; 0 is off"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "positive; 1 is off"),
            ("epsilon", 0 <= self.epsilon < math.inf, "0 or more: it is the width of the clip range"),
        ):
            if not is_valid:
                raise ValueError(
                    f"`{name}` ({getattr(self, name)}) must be {rule}. The paper samples with temperature 0.85 only."
                )
        restricted = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": bool(self.min_p),
            "repetition_penalty": self.repetition_penalty != 1,
        }
        given = ", ".join(f"`{name}` ({getattr(self, name)})" for name, is_set in restricted.items() if is_set)
        if given and self.importance_mode == "sais":
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

    def _check_importance(self) -> None:
        if self.use_vllm:
            raise ValueError(
                "`use_vllm=True`: this version decodes segments with the transformers engine only. Set "
                "`use_vllm=False`."
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "`use_transformers_continuous_batching=True` generates whole completions and returns no "
                "log-probabilities of the samples, which segments need. Leave it off."
            )
        if self.vllm_importance_sampling_correction:
            if self.vllm_importance_sampling_mode.startswith("sequence"):
                raise ValueError(
                    f"`vllm_importance_sampling_mode` ({self.vllm_importance_sampling_mode!r}) sums the log-ratio over a "
                    "completion: at 64k tokens a mean gap of 1.7e-5 per token is enough to delete it from the loss. "
                    "Set `vllm_importance_sampling_correction=False`, or use a token-level mode with "
                    "`num_segments=1`."
                )
            if self.num_segments > 1:
                raise ValueError(
                    "`vllm_importance_sampling_correction` divides by the log-probabilities that tokens were sampled "
                    f"with, so with `num_segments` ({self.num_segments}) it would re-weight older segments: that undoes "
                    "POIS and counts SAIS's ratio twice. Set it to False; for that ratio itself use "
                    "`importance_mode='sais'`."
                )
        if self.dmmpts is not None and self.importance_sampling_level == "sequence":
            raise ValueError(
                "`dmmpts` masks tokens, but with `importance_sampling_level='sequence'` every token of a response moves "
                "the one ratio that they share, so the mask would have no clear effect. Use "
                "`importance_sampling_level='token'`, or set `dmmpts=None`."
            )

    def _check_overlong(self) -> None:
        if self.mask_truncated_completions:
            raise ValueError(
                f"`mask_truncated_completions=True` says again what `overlong` ({self.overlong!r}) decides. Remove it; "
                "to leave truncated rollouts out of the loss, set `overlong='mask'`."
            )
        if self.overlong_cache_length is None:
            if self.overlong == "soft":
                self.overlong_cache_length = max(1, self.max_completion_length // 5)
            return
        if self.overlong != "soft" or self.overlong_cache_length > self.max_completion_length:
            raise ValueError(
                f"`overlong_cache_length` ({self.overlong_cache_length}) must lie in (0, `max_completion_length` = "
                f"{self.max_completion_length}] and belongs to `overlong='soft'` (here {self.overlong!r}): the "
                "punishment grows over that many tokens before the limit. Leave it out for a fifth of the limit."
            )
