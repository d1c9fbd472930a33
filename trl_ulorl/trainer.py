"""`UloRLTrainer`: TRL's `GRPOTrainer` with rollouts that go on over several steps.

Every parent method is wrapped, none is copied. The seams, each guarded by a contract test:

- `_generate_and_score_completions`: collect a batch of complete groups, then let the parent score and pad it;
- `_tokenize_prompts`, `_generate_single_turn`: hand over the ids that the groups hold instead of generating;
- `_calculate_rewards` and the wrapped reward functions: replay what was scored when the rollouts ended;
- the returned batch: add sampling log-probs and ages, and SAIS's denominator;
- `_prepare_inputs`: deal rows by length within an update and cut each micro-batch to its longest row;
- `_get_per_token_logps_and_entropies` while `_compute_loss` runs: mask mastered tokens by a zero advantage; while a
  batch is scored: leave out the padding;
- `training_step`: note where an update ends, and book the batch once its last one is done;
- `train`: stop and save when a signal asks for it; what checkpoints concern is in `resumable`.
"""

from __future__ import annotations

import logging
import math
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import get_callable_name, get_config_model_id

from . import microbatches, model_card
from .checks import (
    check_device,
    check_gathering,
    check_joining,
    check_model_limit,
    check_reward_funcs,
    check_tokenizer,
    check_training_set,
    check_unsupported,
    check_vllm,
    is_reward_model,
)
from .config import DMMPTsConfig, UloRLConfig
from .diagnostics import Alarms, UpdateSums, masked_advantages
from .records import ROLLOUTS, RolloutLog
from .replay import ReplayedReward, replay_logs
from .resumable import ResumableTrainer
from .rollout.collector import CollectorSettings, ExperienceCollector, RolloutStopped
from .rollout.continuous import ContinuousCollector
from .rollout.engine import SegmentEngine
from .rollout.packing import sampling_matrices
from .rollout.pool import Outcome, Rollout, RolloutGroup
from .rollout.prompts import PromptStream
from .rollout.schedule import ContinuousSchedule, SegmentSchedule
from .rollout.scoring import RewardScorer, RewardSource
from .rollout.segmented import SegmentCollector
from .rollout.state import Ranks
from .rollout.transformers import TransformersEngine, step_hook_disabled, unsharded
from .rollout.vllm import ColocatedEngine, SegmentVLLM, replaced_vllm_generation
from .rollout.vllm_client import ServedEngine
from .rollout.vllm_server import ServedVLLM
from .rows import EmptyRows, PromptRows
from .run_record import RunRecord, installed_versions, public_settings
from .samples import SAMPLES, SampleLog
from .stop import StopCallback, StopRequest

logger = logging.getLogger(__name__)

_TOTALS = ("verifier/failed", "rollout/epoch")  # besides the ledger's


@dataclass(slots=True)
class _HandOver:
    """This rank's rollouts of the batch that the parent is scoring, in the parent's order."""

    groups: list[RolloutGroup]
    rollouts: list[Rollout]


@dataclass(slots=True)
class _LossTap:
    """The batch whose loss is being computed, and whether its forward pass was seen."""

    inputs: dict[str, Any]
    has_fired: bool = False


def _vllm_factory(args: UloRLConfig) -> Callable[..., VLLMGeneration]:
    """Return what takes the place of TRL's `VLLMGeneration`."""
    if args.vllm_mode == "server":
        return partial(ServedVLLM, output_dir=cast(str, args.output_dir))
    return partial(SegmentVLLM, num_sequences=args.sequences_per_engine, seed=args.seed)


class UloRLTrainer(ResumableTrainer):
    """Train on ultra-long outputs with segment rollout, POIS or SAIS, DMMPTs and {0, 1} rewards.

    Takes the arguments of TRL's `GRPOTrainer`. It changes where training completions come from: groups of rollouts that
    are decoded by a segment a step and trained on when complete
    ([UloRL](https://huggingface.co/papers/2507.19766), Algorithm 1). Evaluation generates as the parent does.

    Args:
        model: A model, or the name or path of one.
        reward_funcs: Reward functions in TRL's form. With `overlong="wrong"` the first, or
            `correctness_func`, must measure correctness.
        args: The configuration.
        train_dataset: A map-style data set with a `prompt` column.
        eval_dataset: As in `GRPOTrainer`.
        processing_class: The tokenizer; default: the model's.
        reward_processing_classes: As in `GRPOTrainer`.
        callbacks: As in `GRPOTrainer`.
        optimizers: As in `GRPOTrainer`.
        quantization_config: As in `GRPOTrainer`.
        peft_config: As in `GRPOTrainer`.
        tools: Refused: a tool call would be cut by a segment.
        rollout_func: Refused: it generates whole completions.
        environment_factory: Refused, like `tools`.

    Raises:
        TypeError: If `args` is not a `UloRLConfig`.
        ValueError: If data, model, tokenizer and configuration do not fit together.
    """

    _tag_names = ["trl", "ulorl", "grpo"]  # noqa: RUF012 - TRL's own form
    _name = "UloRL"
    _paper = {  # noqa: RUF012
        "title": "UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language Models' "
        "Reasoning Abilities",
        "id": "2507.19766",
        "citation": "@article{du2025ulorl,\n"
        "    title        = {{UloRL: An Ultra-Long Output Reinforcement Learning Approach for Advancing Large Language "
        "Models' Reasoning Abilities}},\n"
        "    author       = {Du, Dong and Liu, Shulin and Yang, Tao and Chen, Shaohua and Li, Yang},\n"
        "    year         = 2025,\n"
        "    eprint       = {arXiv:2507.19766},\n"
        "}\n",
    }

    if TYPE_CHECKING:  # wider in the parent than they are here
        max_completion_length: int
        num_generations: int
        train_dataset: Dataset
        processing_class: PreTrainedTokenizerBase
        reward_processing_classes: list[Any]
        current_gradient_accumulation_steps: int
        pad_to_multiple_of: int | None
        vllm_generation: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: UloRLConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = UloRLConfig(output_dir=f"{name.split('/')[-1]}-UloRL")
        reward_list = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        reward_list = [func for func in reward_list if func is not None]
        check_unsupported(args, processing_class, tools, rollout_func, environment_factory)
        check_device(args.device)
        if args.use_vllm:
            check_vllm(model)
        if processing_class is not None:
            check_tokenizer(processing_class)
        correctness_index = check_reward_funcs(reward_list, args)
        check_training_set(train_dataset, reward_list, args)
        self._handover: _HandOver | None = None
        self._tap: _LossTap | None = None
        this = weakref.ref(self)  # the scorer's thread must not keep a trainer that is no longer used
        self._scorer = RewardScorer(
            [RewardSource(get_callable_name(f), f) for f in reward_list if not is_reward_model(f)],
            get_trainer_state=lambda: getattr(this(), "state", None),
            truncated_is_wrong=correctness_index if args.overlong == "wrong" else None,
        )
        # Not at exit: the daemon thread then ends with the process, and must not wake up while that is taken down.
        weakref.finalize(self, self._scorer.close).atexit = False
        with replaced_vllm_generation(_vllm_factory(args)):
            super().__init__(
                model,
                self._replayed(reward_list),
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
            )
        check_tokenizer(self._tokenizer)
        self._stop = StopRequest()
        if args.graceful_stop:
            self.add_callback(StopCallback(self._stop, self._most_of))
        self._ranks = Ranks(
            (lambda payload: gather_object([payload]))
            if self.accelerator.num_processes > 1
            else lambda payload: [payload],
            self.accelerator.process_index,
            self.accelerator.num_processes,
            args.ranks_per_engine,
        )
        self._saved_step, self._sampler_state = -1, {}
        self._share_device()
        check_gathering(
            args,
            num_ranks=self.accelerator.num_processes,
            zero_stage=self._dist.zero_stage,
            fsdp_version=self._dist.fsdp_version,
        )
        engine = self._build_engine()
        self._rows = PromptRows(
            self.train_dataset,
            self._tokenizer,
            self._tokenized,
            max_completion_length=args.max_completion_length,
            model_limit=check_model_limit(
                self.model,
                args,
                self.train_dataset,
                self._tokenized,
                engine.max_model_length if isinstance(engine, (ColocatedEngine, ServedEngine)) else None,
            ),
        )
        folder, is_logging = Path(cast(str, args.output_dir)), args.log_rollouts and self.accelerator.is_main_process
        self._log_file = RolloutLog(folder / ROLLOUTS, is_enabled=is_logging)
        self._samples = SampleLog(
            folder / SAMPLES,
            is_enabled=is_logging,
            decode=self._tokenizer.decode,
            read_row=self._rows.__getitem__,
            correctness_index=correctness_index,
        )
        self.add_callback(RunRecord(folder, self._description, self.ledger))
        if args.overlong == "soft":
            self._add_soft_punishment()
        elif args.overlong == "mask":
            self.mask_truncated_completions = True
        self._collector = self._build_collector(correctness_index, engine)
        self._correctness_index = correctness_index
        self._has_begun = False
        self._window_start, self._dealt = 0, None
        self._deals_rows = microbatches.is_additive(
            self.loss_type,
            has_entropy_bonus=self._entropy_bonus_enabled,
            has_auxiliary_loss=self.aux_loss_enabled,
            top_entropy_quantile=self.top_entropy_quantile,
        )
        check_joining(args, is_additive=self._deals_rows, is_sharded=self.is_deepspeed_enabled or self.is_fsdp_enabled)
        self._dmmpts = cast(DMMPTsConfig | None, args.dmmpts)  # what it is once the configuration is checked
        self._update_sums = UpdateSums(
            self._dmmpts,
            num_ages=min(args.num_segments, 16) + 1,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )
        self._update_metrics: dict[str, float] = {}
        self._alarms = Alarms(
            watch_importance=args.importance_alarm,
            max_group_age=2 * args.num_segments * args.updates_per_batch,
        )

    # --------------------------------------------------------------------------------------------------- construction

    def _replayed(self, reward_funcs: list[Any]) -> list[Any]:
        """Put a replaying stand-in in the place of every reward function; reward models stay."""
        indices = iter(range(len(reward_funcs)))
        return [
            func
            if is_reward_model(func)
            else ReplayedReward(
                RewardSource(get_callable_name(func), func), next(indices), self._rollouts_handed_over, self._scorer
            )
            for func in reward_funcs
        ]

    def _tokenized(self, prompts: list[Any]) -> list[list[int]]:
        return cast(list[list[int]], super()._tokenize_prompts(prompts)[0])

    def _rollouts_handed_over(self) -> list[Rollout] | None:
        return self._handover.rollouts if self._handover is not None else None

    def _add_soft_punishment(self) -> None:
        """Append DAPO's soft overlong punishment as one more reward of weight 1."""
        assert self.args.overlong_cache_length is not None
        punishment = get_soft_overlong_punishment(self.args.max_completion_length, self.args.overlong_cache_length)
        source = RewardSource(get_callable_name(punishment), punishment)
        index = self._scorer.add(source)
        self.reward_funcs.append(ReplayedReward(source, index, self._rollouts_handed_over, self._scorer))
        self.reward_func_names.append(source.name)
        self.reward_processing_classes.append(None)
        self.reward_weights = torch.cat([self.reward_weights, torch.ones(1)])

    def _build_collector(self, correctness_index: int | None, engine: SegmentEngine) -> ExperienceCollector:
        args = self.args
        is_model = [is_reward_model(func) for func in self.reward_funcs]
        weights = [w for w, skip in zip(self.reward_weights.tolist(), is_model, strict=True) if not skip]
        parts: dict[str, Any] = {
            "engine": engine,
            "prompts": PromptStream(
                len(self.train_dataset),
                seed=args.seed if args.data_seed is None else args.data_seed,
                shuffle=bool(args.shuffle_dataset),
            ),
            "scorer": self._scorer,
            "settings": CollectorSettings(
                num_generations=self.num_generations,
                max_completion_length=args.max_completion_length,
                num_segments=args.num_segments,
                dynamic_sampling=args.dynamic_sampling,
                reward_weights=tuple(weights),
                scored_at_batch_time=any(is_model),
                correctness_index=correctness_index,
                truncated_is_wrong=args.overlong == "wrong",
                truncated_is_masked=args.overlong == "mask",
                normalizes_per_function=args.multi_objective_aggregation == "normalize_then_sum",
            ),
            "tokenize": self._rows.prompts,
            "render": self._rows.render,
            "exchange": self._ranks.exchange,
            "rank": self._ranks.rank,
            "num_ranks": self._ranks.num_ranks,
            "ranks_per_engine": self._ranks.ranks_per_engine,
            "on_close": self._record_group,
            # Where gradients of earlier batches wait for the end of an update, they would be lost.
            "should_stop": lambda: bool(self._stop.signal_number) and self._step == self._window_start,
        }
        assert args.segment_length is not None and args.max_inflight_groups is not None
        bounds: dict[str, Any] = {
            "groups_per_batch": args.groups_per_batch,
            "max_inflight_groups": args.max_inflight_groups,
            "max_staleness": args.max_staleness,
            "versions_per_batch": args.updates_per_batch,
        }
        if args.rollout_schedule == "continuous":
            assert args.rollout_slots is not None
            return ContinuousCollector(schedule=ContinuousSchedule(**bounds, num_slots=args.rollout_slots), **parts)
        schedule = SegmentSchedule(**bounds, segment_length=args.segment_length, is_on_policy=args.num_segments == 1)
        return SegmentCollector(schedule=schedule, **parts)

    def _build_engine(self) -> SegmentEngine:
        if self.args.use_vllm:
            engine = ServedEngine if self.args.vllm_mode == "server" else ColocatedEngine
            return engine(self.vllm_generation, sync_weights=self._sync_weights, eos_token_ids=self.eos_token_ids)
        return TransformersEngine(
            generation_model=self._generation_model,
            generation_config=self.generation_config,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self._tokenizer.pad_token_id,
            max_batch_size=self.args.decode_batch_size
            or self.args.per_device_train_batch_size * self.args.steps_per_generation,
        )

    def _sync_weights(self) -> None:
        """Give vLLM the policy's weights, unless it has them: the parent's own note of that covers its evaluation too."""
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    @contextmanager
    def _generation_model(self) -> Iterator[PreTrainedModel]:
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=cast(dict[str, Any] | None, self.args.gradient_checkpointing_kwargs),
            ) as model,
            torch.no_grad(),
            self._decoding_alone(),
        ):
            yield model

    def _share_device(self) -> None:
        """Make this rank's device the current one of the reward functions' thread: each thread has its own, at first 0."""
        device = self.accelerator.device

        async def set_device() -> None:
            torch.accelerator.set_device_index(device)

        if device.type != "cpu" and device.index is not None:
            self._scorer.run(set_device())

    def _decoding_alone(self) -> AbstractContextManager[None]:
        """Let each rank run as many forward passes as it needs, after TRL has gathered ZeRO-3's weights."""
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            return unsharded(self.model_wrapped, reshards_after_forward=plugin.reshard_after_forward)
        if self._dist.is_zero3 and self.model_wrapped is not self.model:  # else DeepSpeed has set no hook yet
            return step_hook_disabled(self.model_wrapped)
        return nullcontext()

    # ----------------------------------------------------------------------------------------------- the parent's seams

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the parent's dataloader over rows without content: it counts the steps, and the rollout reads prompts."""
        dataset, self.train_dataset = self.train_dataset, EmptyRows(len(self.train_dataset))
        try:
            return cast(DataLoader[Any], super().get_train_dataloader())
        finally:
            self.train_dataset = dataset

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        version = self.state.global_step
        self._restore_sampler()
        batch = self._collector.collect(version, self._num_batches_left())
        rows = [(group, rollout) for group in batch for rollout in group.rollouts]
        share = len(rows) // self.accelerator.num_processes
        rows = rows[share * self.accelerator.process_index :][:share]
        self._handover = _HandOver([group for group, _ in rows], [rollout for _, rollout in rows])
        try:
            output = super()._generate_and_score_completions([self._rows[group.row_index] for group, _ in rows])
        finally:
            self._handover = None
        started = time.perf_counter()
        self._add_sampling_data(output, [rollout for _, rollout in rows], version)
        self._collector.report.bookkeeping_seconds += time.perf_counter() - started
        self._log_metrics(version)
        return output

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        if self._handover is None:
            return cast(tuple[list[list[int]], Any, dict[str, Any]], super()._tokenize_prompts(prompts))
        return [group.prompt_ids.tolist() for group in self._handover.groups], None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any] | None]:
        if self._handover is None:
            return cast(tuple[list[Any], list[Any] | None], super()._generate_single_turn(*args, **kwargs))
        # Arrays, as the parent pads 128 completions of 16k ids in 1.5 ms from them and in 236 ms from lists; parsers
        # of structured responses take lists only.
        rollouts = self._handover.rollouts
        ids = [rollout.completion_ids.astype(np.int64) for rollout in rollouts]
        # The parent takes log-probs of samples for vLLM's correction only; elsewhere they are added to its batch.
        is_corrected = self.args.use_vllm and self.args.vllm_importance_sampling_correction
        logps = [rollout.sampling_per_token_logps for rollout in rollouts] if is_corrected else None
        return [x.tolist() for x in ids] if self._rows.has_response_format else ids, logps

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._handover is not None:
            replay_logs(self._handover.rollouts, self._log_completion_extra, self._log_metric)
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        if self._handover is not None:  # a reward model must not make up for what a function could not say
            left_out = [rollout.has_failed_reward for group in self._collector.training for rollout in group.rollouts]
            rewards[torch.tensor(left_out, device=rewards.device)] = torch.nan
        return rewards

    def _add_sampling_data(self, output: dict[str, Any], rollouts: list[Rollout], version: int) -> None:
        """Add what each token was sampled with, and with SAIS make it the denominator (Eq. 8).

        POIS leaves the parent's denominator: none, which is a ratio of exactly 1, or with several updates per batch the
        policy at the start of the step.
        """
        logps, ages = sampling_matrices(rollouts, output["completion_ids"].shape[1], version)
        device = output["completion_ids"].device
        output["sampling_per_token_logps"] = torch.from_numpy(logps).to(device)
        output["token_ages"] = torch.from_numpy(ages).to(device)
        if self.args.importance_mode == "sais":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = cast(dict[str, Any], super()._prepare_inputs(generation_batch))
        if not self.model.training:
            return inputs
        # Anew for each micro-batch, from a buffer that stays as TRL made it: a further pass over it may see other
        # windows, and a checkpoint needs to hold nothing else.
        if self._deals_rows:
            slots = microbatches.window_slots(
                self._step,
                window_start=self._window_start,
                window_length=self.current_gradient_accumulation_steps,
                num_slots=self.args.steps_per_generation,
            )
            index = self._step % self.args.steps_per_generation - slots.start
            batches = [self._buffered_inputs[slot] for slot in slots]
            window = self._step - index
            if self._dealt is None or self._dealt[0] != window:
                dealt = microbatches.dealt_window(
                    batches,
                    gather=self.accelerator.gather if self.args.dynamic_micro_batches else None,
                    rank=self.accelerator.process_index,
                    pad_to_multiple_of=self.pad_to_multiple_of,
                )
                self._dealt = (window, dealt)
            inputs = microbatches.deal(batches, index, self._dealt[1][index])
            if not self._dealt[1][index]:
                return inputs
        return microbatches.cut(inputs, pad_to_multiple_of=self.pad_to_multiple_of)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            return cast(Tensor, super()._compute_loss(model, inputs))
        if not len(inputs["completion_mask"]):  # its rows have joined others of the window
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        # A copy: the parent keeps `inputs` for later iterations, whose advantages must stay the original ones.
        self._tap = _LossTap(dict(inputs))
        try:
            loss: Tensor = super()._compute_loss(model, self._tap.inputs)
            if not self._tap.has_fired:
                raise RuntimeError(
                    "TRL computed a loss without `_get_per_token_logps_and_entropies`, so no token was masked and no "
                    "importance ratio measured. Install a TRL release that trl-ulorl supports (`trl>=1.16,<1.17`)."
                )
        finally:
            self._tap = None
        if self.accelerator.sync_gradients:
            sums = self.accelerator.reduce(self._update_sums.take(), reduction="sum")
            self._update_metrics = self._update_sums.metrics(sums)
            self._append_metrics(self._update_metrics)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:
        forward = super()._get_per_token_logps_and_entropies
        if self._handover is not None:  # the denominator or the reference of a whole batch
            scores = microbatches.scored_without_padding(
                lambda ids, mask, num_columns: forward(model, ids, mask, num_columns, **kwargs)[0],
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size or len(input_ids),
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            return scores, None, None
        outputs = forward(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        if self._tap is not None:
            self._tap.has_fired = True
            per_token_logps, entropies = outputs[0].detach(), outputs[1].detach()
            inputs, token_mask = self._tap.inputs, None
            advantages = inputs["advantages"]
            if self._dmmpts is not None:
                # The parent reads the advantages after this call.
                inputs["advantages"], token_mask = masked_advantages(
                    advantages, per_token_logps, entropies, inputs["completion_mask"], self._dmmpts
                )
            uncut = self._buffered_inputs[0]
            padding = microbatches.padding_counts(
                inputs, uncut["prompt_ids"].size(1) + uncut["completion_ids"].size(1)
            )
            self._update_sums.add(
                {**inputs, "advantages": advantages}, per_token_logps, entropies, token_mask, padding
            )
        return cast(tuple[Tensor, Tensor | None, Any], outputs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the parent's step; after the last one on a batch, book the batch as trained."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._window_start = self._step
        if self._step % self.args.micro_steps_per_batch == 0:
            self._collector.finish_batch(self.state.global_step)
            self._samples.save()
            self._collector.ledger_balance()
        return loss

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the parent does; a further call starts a new rollout, or takes up that of a checkpoint.

        Args:
            resume_from_checkpoint: A checkpoint's folder, or True for the newest whole one in `output_dir`.
            *args: As in the parent.
            **kwargs: As in the parent.

        Raises:
            ValueError: If the checkpoint is not whole or does not fit this run.
            SystemExit: Once a run that SIGTERM stopped is saved; `KeyboardInterrupt` after Ctrl-C.
        """
        if self._has_begun:  # steps count from 0 again, so groups of the last run would have no age
            self._collector = self._build_collector(self._correctness_index, self._collector.engine)
            self._update_sums.reset()
            self._log_file.restart()
            self._samples.restart()
            self._step, self._window_start, self._buffered_inputs, self._dealt = 0, 0, None, None
            self._saved_step, self._sampler_state = -1, {}
        self._has_begun = True
        self._last_loaded_step = -1  # another run may reach the step of the last sync with other weights
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        elif resume_from_checkpoint:
            self._check_committed(resume_from_checkpoint)
        else:
            self._warn_of_checkpoints()
        output, save_total_limit = None, self.args.save_total_limit
        with self._stop.listening(is_enabled=self.args.graceful_stop):
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            except RolloutStopped:
                self._save_stopped_step()
            finally:
                self.args.save_total_limit = save_total_limit  # `StopCallback` lifts it
        if self._stop.is_granted:
            self._exit()
        if self._stop.signal_number:  # it came after the last update: nothing is left to stop
            signal.raise_signal(self._stop.signal_number)
        return output

    def end(self) -> None:
        """Finish the trackers, a colocated vLLM and the process group, at the very end of a script, on every rank.

        The ranks wait for each other: a launcher takes the first one that fails, in its exit too, as a reason to stop those
        that still write. Newer releases of transformers have this method too, without vLLM.
        """
        if self.args.use_vllm and self.args.vllm_mode == "colocate":
            self.vllm_generation.shutdown()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    # ---------------------------------------------------------------------------------------------- state of the rollout

    def _num_batches_left(self) -> int | None:
        """With `drain`, count the batches that are still to be trained on, this one included."""
        if not self.args.drain:
            return None
        accumulation = self.args.gradient_accumulation_steps
        if self.state.max_steps % self.args.updates_per_batch:
            raise ValueError(
                f"`drain` can't be met: the run has {self.state.max_steps} steps and ends inside a batch, which feeds "
                f"{self.args.updates_per_batch} updates. Set `max_steps` to a multiple of it."
            )
        micro_steps = (self.state.max_steps - self.state.global_step) * accumulation - self._step % accumulation
        return math.ceil(micro_steps / self.args.micro_steps_per_batch)

    @property
    def is_stopping(self) -> bool:
        """Whether a signal ends the run at the end of this optimizer step."""
        return self._stop.is_granted

    @property
    def rollout_engine(self) -> SegmentEngine:
        """The engine that decodes segments with the current policy."""
        return self._collector.engine

    def ledger(self) -> dict[str, dict[str, int]]:
        """Return where every admitted group and every generated token of the run went, over all ranks.

        Returns:
            `{"groups": {...}, "tokens": {...}}`; in each the first number is the sum of the others.
        """
        return self._collector.ledger_balance()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the parent's model card, and what the run was and came to."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            model_card.add_run(
                Path(cast(str, self.args.output_dir)) / "README.md",
                self.args,
                steps=self.state.global_step,
                history=self.state.log_history,
                ledger=self.ledger(),
            )

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # other weights at the same step

    # --------------------------------------------------------------------------------------------------------- records

    def _record_group(self, group: RolloutGroup, outcome: Outcome, version: int) -> None:
        self._log_file.write(group, outcome, version)
        self._samples.offer(group, outcome, version)

    def _description(self) -> dict[str, Any]:
        """What `run.json` says of the run."""
        args, names = self.args, self.reward_func_names
        is_model = [is_reward_model(func) for func in self.reward_funcs]
        functions = [name for name, skip in zip(names, is_model, strict=True) if not skip]
        index = self._correctness_index
        return {
            "model": get_config_model_id(self.model.config),
            "rows": len(self.train_dataset),
            "reward_functions": functions,  # those that `rollouts.jsonl` has the rewards of
            "reward_models": [name for name, skip in zip(names, is_model, strict=True) if skip],
            "correctness": None if index is None else functions[index],
            "num_processes": self.accelerator.num_processes,
            "max_steps": self.state.max_steps,
            "batches_per_step": args.gradient_accumulation_steps / args.micro_steps_per_batch,
            "updates_per_batch": args.updates_per_batch,
            "versions": installed_versions(),
            "settings": public_settings(args.to_dict()),
        }

    def _append_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _log_metrics(self, version: int) -> None:
        metrics = self._collector.metrics(version)
        for name, value in metrics.items():
            if name.startswith("ledger/") or name in _TOTALS:  # the last one counts, not the mean over logged steps
                self._metrics["train"][name] = [value]
            elif name == "rollout/age_max":  # the largest since the last log
                self._metrics["train"][name] = [max([value, *self._metrics["train"][name]])]
            else:
                self._metrics["train"][name].append(value)
        self._alarms.check({**self._update_metrics, **metrics})
