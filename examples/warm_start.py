r"""Train the embedded model from scratch: the starting point of the CPU demo, which RL can lift within 50 steps.

    python examples/warm_start.py --output warm_start

A policy trained on right workings alone leaves RL nothing but sharpening: greedy decoding is then already about as
good as RL gets. So the first stage teaches right workings, and the second one mixes in answers that are guessed
without any working and workings that slip. The result guesses almost half of the time, mostly wrong, and works the
rest out, mostly right: RL has one decision to learn that pays at once, and slips to unlearn.

Deterministic for a seed on one machine. Took seven minutes on two cores that another process shared.
"""

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trl_ulorl.data.arithmetic import arithmetic_dataset, boxed, worked_solution

MAX_POSITIONS = 512
MAX_NEW_TOKENS = 128
TEMPERATURE = 0.85
BATCH_SIZE = 64
MICRO_BATCH_SIZE = 16
IGNORED = -100  # label of the tokens that the loss leaves out

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""


@dataclass(frozen=True)
class Stage:
    """One stage of supervised training on freshly drawn demonstrations.

    Attributes:
        num_steps: Optimizer steps.
        learning_rate: Peak of the learning rate, which rises over 5 % of the steps and falls linearly to zero.
        guess_frac: Fraction of the demonstrations that box an answer without any working. One guess in three is right,
            the others are off by one.
        slip_frac: Fraction of the operations in a working whose result is off by one or two.
    """

    num_steps: int
    learning_rate: float
    guess_frac: float
    slip_frac: float


STAGES = (
    Stage(num_steps=600, learning_rate=2e-3, guess_frac=0.0, slip_frac=0.0),
    Stage(num_steps=120, learning_rate=1e-3, guess_frac=0.45, slip_frac=0.05),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a character-level tokenizer for printable ASCII with the markers of the ChatML format."""
    pad, unknown, start, end = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: index for index, token in enumerate([pad, unknown, start, end, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    tokenizer.decoder = decoders.Fuse()
    # The role names are one token each: they stand in every prompt.
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ("system", "user", "assistant")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unknown,
        eos_token=end,
        additional_special_tokens=[start],
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int) -> Qwen3ForCausalLM:
    """Build the untrained model: 0.8M parameters with a hidden size of 128."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def render_prompt(tokenizer: PreTrainedTokenizerFast, prompt: list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt, up to where the model begins to write."""
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def demonstration(row: dict[str, Any], stage: Stage, rng: np.random.Generator) -> str:
    """Draw the output that one supervised example shows."""
    if rng.random() < stage.guess_frac:
        return boxed(int(row["answer"]) + int(rng.integers(-1, 2)))
    slipping = np.flatnonzero(rng.random(row["num_terms"] - 1) < stage.slip_frac)
    return worked_solution(row["prompt"][0]["content"], {int(i): int(rng.choice([-2, -1, 1, 2])) for i in slipping})


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, stage: Stage, rng: np.random.Generator
) -> list[tuple[list[int], list[int]]]:
    """Draw a batch of demonstrations as token ids of prompt and output, shortest first."""
    batch = []
    for row in arithmetic_dataset(BATCH_SIZE, seed=int(rng.integers(2**31)), split="train"):
        output = demonstration(row, stage, rng) + tokenizer.eos_token
        output_ids = tokenizer(output, add_special_tokens=False)["input_ids"]
        batch.append((render_prompt(tokenizer, row["prompt"]), output_ids))
    return sorted(batch, key=lambda example: len(example[0]) + len(example[1]))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, rng: np.random.Generator) -> None:
    """Run one stage of supervised training on the output tokens.

    A batch is cut into micro-batches of similar length, which saves padding, and its loss is the mean over its tokens.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = 0.05 * stage.num_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (stage.num_steps - step) / (stage.num_steps - warmup))
    )
    model.train()
    for step in range(stage.num_steps):
        batch = draw_batch(tokenizer, stage, rng)
        num_tokens = sum(len(output) for _, output in batch)
        total_loss = 0.0
        for start in range(0, BATCH_SIZE, MICRO_BATCH_SIZE):
            examples = batch[start : start + MICRO_BATCH_SIZE]
            input_ids = pad([prompt + output for prompt, output in examples], tokenizer.pad_token_id)
            labels = pad([[IGNORED] * len(prompt) + output for prompt, output in examples], IGNORED)
            # Padding is on the right: causal attention keeps it out of sight of every labelled token.
            logits = model(input_ids=input_ids).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_tokens
            loss.backward()
            total_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {total_loss:.3f}", flush=True)


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Pad rows on the right to the longest of them, shape `(B, T)`."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int = 256, k: int = 4
) -> dict[str, float]:
    """Sample `k` outputs for each of the held-out problems and measure what they look like.

    Returns:
        Accuracy in [0, 1], percentiles of the output length in tokens, mean entropy per token in nats, and the
        fraction of tokens that were sampled with a probability of at least 0.99.
    """
    model.eval()
    rows = arithmetic_dataset(num_problems, seed=0, split="test")
    prompts = [render_prompt(tokenizer, prompt) for prompt in rows["prompt"] for _ in range(k)]
    references = [answer for answer in rows["answer"] for _ in range(k)]
    answers: list[str | None] = []
    lengths, entropies, sampled_logps = [], [], []
    for start in range(0, len(prompts), 256):
        batch = tokenizer.pad({"input_ids": prompts[start : start + 256]}, return_tensors="pt")
        generated = model.generate(
            **batch,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        output_ids = generated.sequences[:, batch["input_ids"].shape[1] :]
        is_end = output_ids == tokenizer.eos_token_id
        output_mask = is_end.cumsum(dim=1) - is_end.long() == 0  # True up to and including the first end token
        logps = torch.log_softmax(torch.stack(generated.logits, dim=1) / TEMPERATURE, dim=-1)
        entropies.append(-(logps.exp() * logps).sum(dim=-1)[output_mask])
        sampled_logps.append(logps.gather(-1, output_ids[..., None]).squeeze(-1)[output_mask])
        lengths.append(output_mask.sum(dim=1))
        for text in tokenizer.batch_decode(output_ids, skip_special_tokens=True):
            match = re.search(r"\\boxed\{(-?\d+)\}$", text)
            answers.append(match and match[1])
    length = torch.cat(lengths).double()
    return {
        "accuracy": float(
            np.mean([answer == reference for answer, reference in zip(answers, references, strict=True)])
        ),
        "length_p50": length.quantile(0.5).item(),
        "length_p99": length.quantile(0.99).item(),
        "length_max": length.max().item(),
        "entropy": torch.cat(entropies).mean().item(),
        "mastered_frac": (torch.cat(sampled_logps).exp() >= 0.99).double().mean().item(),
    }


def main() -> None:
    """Train, save and evaluate."""
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch on a CPU.")
    parser.add_argument("--output", type=Path, default=Path("warm_start"), help="folder that the model is written to")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, demonstrations and sampling")
    parser.add_argument(
        "--hidden_size", type=int, default=128, help="a multiple of 8 (default: the embedded model's 128)"
    )
    arguments = parser.parse_args()

    start = time.perf_counter()
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, arguments.hidden_size)
    for stage in STAGES:
        train(model, tokenizer, stage, rng)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    train_seconds = time.perf_counter() - start
    print(json.dumps({"train_seconds": round(train_seconds, 1), **evaluate(model, tokenizer)}, indent=2))


if __name__ == "__main__":
    main()
