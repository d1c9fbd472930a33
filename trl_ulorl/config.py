"""The configuration: `UloRLConfig` and `DMMPTsConfig`; config_checks.py has the checks across fields."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from . import config_checks


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
                    f"`{name}` ({getattr(self, name)!r}) must be a number. YAML reads one without a point, "
                    "such as 2e-1, as text: write it as 0.2."
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
    which is what POIS leaves out on purpose (section 3.1.2). `ddp_timeout` is a day instead of half an hour: ranks wait for
    the longest segment, which may take longer. TRL's own defaults for the loss ("dapo"), `beta` (0), the
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

    ddp_timeout: int = field(
        default=86_400,
        metadata={"help": "Seconds that ranks wait for each other: one may decode for hours while the others wait."},
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
            "help": "Rollouts that decode together on a device. None: its batch share, or with vLLM all in flight."
        },
    )
    rollout_schedule: str = field(
        default="segment",
        metadata={"help": "'segment' is Algorithm 1. 'continuous' refills each slot as it frees; it needs vLLM."},
    )
    rollout_slots: int | None = field(
        default=None,
        metadata={
            "help": "Rollouts that decode at any time under 'continuous', all ranks together. None: two batches."
        },
    )
    max_inflight_groups: int | None = field(
        default=None,
        metadata={
            "help": "Most groups held, unfinished and ready together. None: num_segments batches, or what the slots need."
        },
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

    # Training
    dynamic_micro_batches: bool = field(
        default=False,
        metadata={
            "help": "Let short rows share a micro-batch, as many as take no more memory than the longest: fewer passes."
        },
    )

    # Checkpoints
    resume_rollout: str = field(
        default="strict",
        metadata={
            "help": "Rollouts that a checkpoint can't give back: 'strict' refuses it, 'discard' sets them aside."
        },
    )
    graceful_stop: bool = field(
        default=True,
        metadata={"help": "On SIGTERM or Ctrl-C finish the engine call, save a checkpoint and exit."},
    )

    # Records
    log_rollouts: bool = field(
        default=True,
        metadata={
            "help": "Write one line per finished group to `rollouts.jsonl`, and `_samples.json`, in the output folder."
        },
    )

    def __post_init__(self) -> None:
        self.dmmpts = _parse_dmmpts(self._parse_json_dmmpts())  # type: ignore[assignment]
        config_checks.check_counts(self)
        try:
            super().__post_init__()
        except ValueError as error:
            config_checks.explain_batch_size(self, error)
            raise
        config_checks.check_numbers(self)
        config_checks.check_optimizer(self)
        config_checks.check_choices(self)
        if self.use_vllm:
            config_checks.check_vllm(self)
        config_checks.check_segments(self)
        config_checks.check_inflight(self)
        config_checks.check_drain(self)
        config_checks.check_sampling(self)
        config_checks.check_importance(self)
        config_checks.check_overlong(self)
        config_checks.check_micro_batches(self)
        config_checks.check_checkpoints(self)

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
    def ranks_per_engine(self) -> int:
        """Processes that share a rollout engine: those of a tensor-parallel group of colocated vLLM."""
        return self.vllm_tensor_parallel_size if self.use_vllm and self.vllm_mode == "colocate" else 1

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

    @property
    def sequences_per_engine(self) -> int:
        """Sequences that a colocated vLLM engine decodes side by side: all rollouts in flight, and TRL's evaluation."""
        if self.decode_batch_size is not None:
            return self.decode_batch_size * self.ranks_per_engine
        assert self.max_inflight_groups is not None
        num_engines: int = self.world_size // self.ranks_per_engine
        if self.rollout_slots is not None:
            rollouts = math.ceil(self.rollout_slots / num_engines)
        else:
            rollouts = math.ceil(self.max_inflight_groups / num_engines) * self.num_generations
        return max(rollouts, self.generation_batch_size // num_engines)
