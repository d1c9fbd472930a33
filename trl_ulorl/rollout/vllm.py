"""The engine on vLLM in the trainer's own process, on the devices that train.

TRL builds vLLM and hands it the policy's weights; here are only the settings that segments need beside TRL's own, and a
driver that takes up and gives back sequences at any token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from .engine import DecodedSegment, DecodeRequest

_MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def replaced_vllm_generation(factory: Callable[..., VLLMGeneration]) -> Iterator[None]:
    """Let a `GRPOTrainer` that is built meanwhile make its vLLM back end with `factory`.

    Args:
        factory: Takes the arguments of TRL's `VLLMGeneration`, for instance `SegmentVLLM` itself.

    Example:
        ```python
        with replaced_vllm_generation(SegmentVLLM):  # stock GRPO on vLLM's CPU build
            trainer = GRPOTrainer(model, reward_funcs, GRPOConfig(use_vllm=True, use_cpu=True))
        ```
    """
    kept = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = factory  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = kept  # type: ignore[misc]


class SegmentVLLM(VLLMGeneration):
    """TRL's colocated vLLM with room for all rollouts in flight, the policy's precision and positions, and CPU support.

    Args:
        *args: As in TRL's `VLLMGeneration`.
        num_sequences: Sequences that decode side by side in this engine. None: TRL's figure, one generation batch.
        seed: Added to TRL's, which is the same for every run and makes runs of different seeds sample alike.
        **kwargs: As in TRL's `VLLMGeneration`.
    """

    def __init__(self, *args: Any, num_sequences: int | None = None, seed: int = 0, **kwargs: Any) -> None:
        self._num_sequences = num_sequences  # set first: the parent's constructor starts vLLM
        self._seed = seed
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self._num_sequences is not None:
            self.max_num_seqs = self._num_sequences
        kept = vllm_generation.LLM
        vllm_generation.LLM = lambda **settings: kept(**self._adapted(settings))
        try:
            super()._init_vllm()
        finally:
            vllm_generation.LLM = kept

    def _adapted(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the parent's settings of vLLM with what segments change in them and add to them."""
        return {
            **settings,
            "max_num_batched_tokens": max(settings["max_num_batched_tokens"], self.max_num_seqs),
            "seed": settings["seed"] + self._seed,
            # vLLM's own choice turns float32 weights into bfloat16, and log-probs are then off by 0.25 on a float32
            # policy. Under mixed precision the trainer's matrix products are in the lower precision too, whatever
            # the master weights are kept in: that is the nearest, and half the memory.
            "dtype": _MIXED_PRECISION.get(self.accelerator.mixed_precision, self.model.dtype),
            "generation_config": "vllm",  # sampling as in the arguments only, without the model's own defaults
            "hf_overrides": _position_overrides(self.model.config),
        }

    def sync_weights(self) -> None:
        """Load the policy's weights into vLLM, as the parent does, and drop every key and value of the old ones.

        Raises:
            RuntimeError: If sequences still decode, whose keys and values would be kept.
        """
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            self._reload_on_cpu()
        else:
            super().sync_weights()
        if not self.llm.reset_prefix_cache():  # the parent does not look at the answer
            raise RuntimeError(
                "vLLM kept keys and values of the old weights, because sequences were decoding during a weight update. "
                "Leave the engine's `stream()` before the policy is updated or evaluated."
            )

    def _reload_on_cpu(self) -> None:
        """Load weights into layers that keep them in packed form only, which the parent can't write into."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        for module in runner.get_model().modules():
            # A head tied to the embedding has no weights of its own in the iterator, so that vLLM leaves its packed copy
            # of the embedding as it was: log-probs would be off by more with every update.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """End vLLM, and the process group with it: one that ended before vLLM would be missed at exit."""
        self.llm.llm_engine.engine_core.shutdown()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have vLLM ready to decode: ranks that share an engine in step, its memory mapped, the policy's weights in it."""
        self._align_generators()
        if self.tensor_parallel_size > 1 and self.accelerator.device.type == "cuda" and is_peft_model(self.model):
            # As in the parent's `generate`: NCCL may hang otherwise, https://github.com/huggingface/trl/issues/3671
            torch.distributed.barrier(device_ids=[self.accelerator.local_process_index])
        if not self.enable_sleep_mode:
            yield
            return
        if self._llm_weights_sleeping:
            self.sync_weights()
        self.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Generate as the parent does, for its evaluation."""
        self._align_generators()
        return super().generate(*args, **kwargs)

    def _align_generators(self) -> None:
        """Seed what vLLM draws samples from: alike on the ranks that share an engine, and by torch's state, which is saved.

        Each of them draws for itself, from the process's generators: torch's on a CPU, on a GPU NumPy's for the seeds of
        requests. After dropout on batches of unequal size, or a reward function that draws numbers, they would draw
        different tokens, and go on with a sequence that is none of theirs.
        """
        seed = [int(torch.randint(2**31, ()))]
        if self.tensor_parallel_size > 1:
            torch.distributed.broadcast_object_list(seed, group=self.tp_group, group_src=0)
            torch.manual_seed(seed[0])
        np.random.seed(seed[0])


def _position_overrides(policy_config: Any) -> Callable[[Any], Any]:
    """Return what gives vLLM's model configuration the policy's positions, which need not be the checkpoint's."""
    policy = policy_config.get_text_config().to_dict()
    positions = {name: policy[name] for name in ("max_position_embeddings", "rope_parameters") if name in policy}

    def override(config: Any) -> Any:
        config.get_text_config().update(positions)
        return config

    return override


class ColocatedEngine:
    """Decodes with a colocated vLLM, stepwise.

    Log-probabilities are vLLM's processed ones: at the sampling temperature, and with `top_p`, `top_k` or `min_p` over
    what these leave of the vocabulary. Ranks of a tensor-parallel group must make the same calls with the same requests.

    Attributes:
        num_prefilled_tokens: Tokens of prompts and prefixes that were computed so far.
        num_cached_tokens: Tokens of prompts and prefixes that vLLM still had from the same policy.

    Args:
        generation: The back end that TRL's trainer holds; its sampling settings are used.
        sync_weights: Loads the policy's weights if they have changed; a collective operation.
        eos_token_ids: Ids that end a completion.
    """

    def __init__(
        self, generation: SegmentVLLM, *, sync_weights: Callable[[], None], eos_token_ids: Sequence[int]
    ) -> None:
        self._generation = generation
        self._sync_weights = sync_weights
        self._eos_token_ids = tuple(eos_token_ids)
        self.num_prefilled_tokens = 0
        self.num_cached_tokens = 0

    @property
    def max_model_length(self) -> int:
        """Most tokens of a sequence, prompt and completion together."""
        return int(self._generation.llm.llm_engine.model_config.max_model_len)

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request by sampling; each result comes in the step in which it ends."""
        for request in requests:
            self._check_length(request)
        with self.stream() as stream:
            for index, request in enumerate(requests):
                stream.submit(index, request)
            while stream.num_running:
                yield from stream.step()

    @contextmanager
    def stream(self) -> Iterator[VLLMStream]:
        """Open a stream under the current weights; leaving it stops what still decodes."""
        self._sync_weights()
        with self._generation.awake():
            stream = VLLMStream(self)
            try:
                yield stream
            finally:
                stream.close()

    def _check_length(self, request: DecodeRequest) -> None:
        if request.token_ids.size + request.max_new_tokens > self.max_model_length:
            raise ValueError(
                f"A request of {request.token_ids.size} tokens and {request.max_new_tokens} new ones goes beyond the "
                f"{self.max_model_length} tokens that vLLM was started for. Raise `vllm_max_model_length`, or leave it "
                "out for the model's own limit."
            )

    def _sampling_params(self, max_new_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        generation = self._generation
        return SamplingParams(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p or 0.0,
            repetition_penalty=generation.repetition_penalty,
            max_tokens=max_new_tokens,
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            stop_token_ids=list(self._eos_token_ids),
            ignore_eos=True,  # those above are the only ones
            detokenize=False,
            # A report of every token would take a tenth of the time on a tiny model.
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # made for one request
        )


class VLLMStream:
    """Sequences that decode side by side in a colocated vLLM: see `DecodeStream`.

    Args:
        engine: Whose settings it uses and whose counts it adds to.

    Attributes:
        num_steps: Decode steps taken so far.
    """

    def __init__(self, engine: ColocatedEngine) -> None:
        self.num_steps = 0
        self._engine = engine
        self._llm_engine = engine._generation.llm.llm_engine
        self._keys: dict[str, int] = {}  # of the sequences that have not ended, by vLLM's name
        self._serials = itertools.count()

    @property
    def num_running(self) -> int:
        """Sequences that have not ended."""
        return len(self._keys)

    def submit(self, key: int, request: DecodeRequest) -> None:
        """Start to decode a sequence; its results carry `key` as their `request_index`."""
        self._engine._check_length(request)
        from vllm.inputs import tokens_input

        name = str(next(self._serials))
        prompt = tokens_input(request.token_ids.tolist())  # else vLLM's renderer goes through it once more
        self._llm_engine.add_request(name, prompt, self._engine._sampling_params(request.max_new_tokens))
        self._keys[name] = key

    def step(self) -> list[DecodedSegment]:
        """Decode on for one step, and return the sequences that have ended or used up their budget."""
        self.num_steps += 1
        return [self._segment(output) for output in self._llm_engine.step()]

    def interrupt(self) -> list[DecodedSegment]:
        """Stop every sequence and return what each has so far; one that has no new token yet is left out."""
        segments = [self._segment(output) for output in self._stop() if output.outputs[0].token_ids]
        self._keys.clear()
        return segments

    def close(self) -> None:
        """Stop every sequence, and let vLLM finish the step that it may have begun ahead."""
        self._stop()
        self._keys.clear()
        self._llm_engine.step()

    def _stop(self) -> list[Any]:
        """Have vLLM give up every sequence, and return its report on each.

        It has a last report for requests that are served from a queue, and else throws away what it has.
        """
        inbox = _Inbox()
        for state in self._llm_engine.output_processor.request_states.values():
            state.queue = inbox
        for name in self._keys:
            # One by one: vLLM would go through a set, whose order differs between the ranks of a tensor-parallel group,
            # and with it what their caches drop first.
            self._llm_engine.abort_request([name])
        return inbox.outputs

    def _segment(self, output: Any) -> DecodedSegment:
        key = self._keys.pop(output.request_id)
        self._engine.num_cached_tokens += output.num_cached_tokens
        self._engine.num_prefilled_tokens += len(output.prompt_token_ids) - output.num_cached_tokens
        (completion,) = output.outputs
        if completion.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(
                f"vLLM gave a sequence up after {len(completion.token_ids)} tokens ({completion.finish_reason}): see its "
                "log above for the reason, and resume from the last checkpoint."
            )
        token_ids = np.array(completion.token_ids, dtype=np.int32)
        per_token_logps = np.array(completion.logprobs.logprobs, dtype=np.float32)
        if token_ids.size != per_token_logps.size or not np.isfinite(per_token_logps).all():
            raise RuntimeError(
                f"vLLM returned {token_ids.size} tokens with {np.isfinite(per_token_logps).sum()} finite log-probabilities. "
                "NaN means that the forward pass broke down: check the weights and the precision of the model. Missing "
                "ones mean that this vLLM release is not supported: see the extra `vllm` in pyproject.toml."
            )
        is_stopped = int(token_ids[-1]) in self._engine._eos_token_ids
        return DecodedSegment(key, token_ids, per_token_logps, is_stopped)


class _Inbox:
    """What vLLM takes for a queue of reports."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self.outputs.append(output)
