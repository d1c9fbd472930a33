"""Shared fixtures: a tiny Qwen3 with a character tokenizer, made here; nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from datasets import Dataset
from hypothesis import settings
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

settings.register_profile("trl_ulorl", deadline=None)  # a machine that is busy for seconds is no fault
settings.load_profile("trl_ulorl")

CHARACTERS = "0123456789+-= \\{}boxed"
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(*, eos: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(SPECIAL + sorted(set(CHARACTERS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>" if eos else None, padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(*, seed: int = 0, positions: int = 256) -> Qwen3ForCausalLM:
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(set(CHARACTERS)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def make_dataset(rows: int = 32) -> Dataset:
    prompts = [f"{index % 10}+{index // 10}=" for index in range(rows)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": prompt}] for prompt in prompts],
            "answer": [str(index % 10 + index // 10) for index in range(rows)],
        }
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model()


@pytest.fixture
def dataset() -> Dataset:
    return make_dataset()


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    """Tiny tensors gain nothing from threads, and two busy OpenMP processes on two cores crawl."""
    torch.set_num_threads(1)
