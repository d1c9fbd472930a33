"""Train a judge that says whether two short answers are the same, for the generative stage of the verifier.

Without arguments a small model is made and trained on a CPU, in minutes:

    python examples/train_verifier.py

On a GPU, a model from the Hub:

    accelerate launch examples/train_verifier.py --model Qwen/Qwen3-0.6B --output outputs/verifier \
        --steps 500 --learning-rate 1e-5 --batch-size 32

The pairs are made up by `verifier_pairs.py`: two spellings of one value, or of two values that mostly differ by little.

The result is a plain model; use it with

    GenerativeVerifier(TransformersModel("outputs/verifier"), instructions="")

and with the default instructions if it came from the Hub.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import SFTConfig, SFTTrainer
from verifier_pairs import Example, draw_examples

from trl_ulorl import VerifierReward
from trl_ulorl.rewards import verify_answers
from trl_ulorl.rewards.judge import INSTRUCTIONS, VERDICTS, GenerativeVerifier, judge_messages
from trl_ulorl.rewards.judge_models import TransformersModel

WORDS = {verdict: word for word, verdict in VERDICTS.items()}
NUM_PAIRS = 250_000  # at most, to train on; longer training goes through them several times

OPENING, SEPARATOR, CLOSING = '{"A": "', '", "B": "', '"}'  # around the answers, as `judge_messages` writes them


def small_model(examples: list[Example]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Make an untrained model of 0.8M parameters, and a tokenizer of words and single digits.

    The verdicts and what stands around the answers are a token each.
    """
    special = ["<pad>", "<end>", OPENING, SEPARATOR, CLOSING, *VERDICTS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for example in examples[:20_000] for text in example[:2]), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    return model, fast


def as_token_rows(examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows for the small model: token ids, and at each place the token that the model is to give next.

    A verdict alone says little about why. So the model is also told where a pair becomes what it is: in an equal pair
    it writes the second answer, and in a different one it has to say so from the first token on that no spelling of the
    first answer has in this place.
    """
    (equivalent,), (different,) = (tokenizer(WORDS[verdict])["input_ids"] for verdict in (True, False))

    def ids(text: str) -> list[int]:
        return tokenizer(json.dumps(text, ensure_ascii=False)[1:-1])["input_ids"]

    opening, separator, closing = (tokenizer(text)["input_ids"] for text in (OPENING, SEPARATOR, CLOSING))
    rows = []
    for first, second, equal, _, spellings in examples:
        head, tail = opening + ids(first) + separator, ids(second) + closing
        if equal:
            labels = [*tail, equivalent]
        else:
            known = [ids(spelling) + closing for spelling in spellings]
            labels = [
                -100 if any(each[:place] == tail[:place] for each in known) else different
                for place in range(len(tail) + 1)
            ]
        end = [tokenizer.eos_token_id]
        rows.append(
            {
                "input_ids": [*head, *tail, equivalent if equal else different, *end],
                "labels": [*[-100] * len(head), *labels, *end],
            }
        )
    return Dataset.from_list(rows)


def as_conversations(examples: list[Example]) -> Dataset:
    """Rows for a model that can read instructions: the verdict alone is learnt."""
    return Dataset.from_list(
        [
            {
                "prompt": judge_messages(example.first, example.second),
                "completion": [{"role": "assistant", "content": WORDS[example.equal]}],
                "chat_template_kwargs": {"enable_thinking": False},
            }
            for example in examples
        ]
    )


def share_of(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def figures(verdicts: list[bool | None], examples: list[Example]) -> dict[str, float]:
    """Shares of all pairs: right, without a verdict (which is not right), wrongly equal; and of the decided ones: right."""
    pairs = list(zip(verdicts, [example.equal for example in examples], strict=True))
    decided = [verdict is equal for verdict, equal in pairs if verdict is not None]
    accuracy = share_of([verdict is equal for verdict, equal in pairs])
    right = share_of(decided) if decided else 0.0
    return {
        "pairs": len(pairs),
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(pairs)),
        "undecided_frac": share_of([verdict is None for verdict, _ in pairs]),
        "false_positive_frac": share_of([verdict is True and not equal for verdict, equal in pairs]),
        "decided_accuracy": right,
        "decided_standard_error": math.sqrt(right * (1 - right) / max(len(decided), 1)),
    }


def measure(judge: GenerativeVerifier, examples: list[Example]) -> dict[str, dict[str, float]]:
    """Figures over all pairs and by family."""
    verdicts = judge.judge([example[:2] for example in examples])
    groups = {"all": list(range(len(examples)))}
    for place, example in enumerate(examples):
        groups.setdefault(example.family, []).append(place)
    return {
        name: figures([verdicts[place] for place in places], [examples[place] for place in places])
        for name, places in groups.items()
    }


def as_generative_stage(judge: GenerativeVerifier, examples: list[Example]) -> dict[str, dict[str, dict[str, float]]]:
    """Rewards for pairs that rules leave open, without and with the judge behind them, by family."""
    outputs = [rf"It is \boxed{{\text{{{example.first}}}}}." for example in examples]
    references = [example.second for example in examples]
    by_rules = verify_answers(list(zip(outputs, references, strict=True)), lenient=False)
    is_open = [verdict.is_open for verdict in by_rules]
    groups = {"all": [place for place, each in enumerate(is_open) if each]}
    for place in groups["all"]:
        groups.setdefault(examples[place].family, []).append(place)
    rewards = {
        name: VerifierReward(behind)(completions=outputs, answer=references)
        for name, behind in (("rules", None), ("judge", judge))
    }
    return {
        group: {
            name: figures(
                [None if given[place] is None else bool(given[place]) for place in places],
                [examples[place] for place in places],
            )
            for name, given in rewards.items()
        }
        for group, places in groups.items()
        if places
    }


HEADER = f"{'':18} pairs         right  no verdict  wrongly equal  right of decided"


def report(moment: str, measured: dict[str, dict[str, float]]) -> None:
    """Print figures by family, shares with their standard errors."""
    for name, each in measured.items():
        print(
            f"{moment:8}{name:10}{each['pairs']:6.0f}{each['accuracy']:8.1%} ±{each['standard_error']:5.1%}"
            f"{each['undecided_frac']:11.1%}{each['false_positive_frac']:15.1%}"
            f"{each['decided_accuracy']:12.1%} ±{each['decided_standard_error']:5.1%}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a judge of short answers for the verifier's generative stage.")
    parser.add_argument("--model", default=None, help="a Hub name or folder; by default a small model is made")
    parser.add_argument("--output", type=Path, default=Path("outputs/verifier"), help="folder for model and summary")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per step and device")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate; 1e-5 for a Hub model")
    parser.add_argument("--eval-pairs", type=int, default=1000, help="held-out pairs")
    parser.add_argument("--seed", type=int, default=0, help="seed of pairs and training")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    num_pairs = min(NUM_PAIRS, arguments.steps * arguments.batch_size)
    examples = draw_examples(num_pairs, seed=arguments.seed, held_out=False)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    else:
        model, tokenizer = small_model(examples)
    instructions = INSTRUCTIONS if arguments.model else ""
    has_accelerator = torch.accelerator.is_available()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(arguments.output),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="warmup_stable_decay",  # the second half of the steps leads down to nothing
            lr_scheduler_kwargs={"num_decay_steps": arguments.steps // 2, "decay_type": "linear"},
            warmup_steps=max(arguments.steps // 50, 1),
            adam_beta2=0.98,
            weight_decay=0.01,
            seed=arguments.seed,
            use_cpu=not has_accelerator,
            bf16=has_accelerator,
            gradient_checkpointing=False,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=as_conversations(examples) if arguments.model else as_token_rows(examples, tokenizer),
    )
    held_out = draw_examples(arguments.eval_pairs, seed=0, held_out=True)

    def judge_of(model: object) -> GenerativeVerifier:
        return GenerativeVerifier(
            TransformersModel(model, tokenizer, batch_size=128),
            instructions=instructions,
            max_pairs_per_step=len(held_out),
        )

    before = measure(judge_of(model), held_out)
    start = time.perf_counter()
    trainer.train()
    train_seconds = time.perf_counter() - start
    trainer.save_model()
    if not trainer.accelerator.is_main_process:
        return
    after = measure(judge_of(arguments.output), held_out)
    staged = as_generative_stage(judge_of(arguments.output), held_out)
    summary = {"train_seconds": round(train_seconds, 1), "instructions": bool(instructions)}
    summary |= {"before": before["all"], "after": after["all"], "families": after, "open_to_rules": staged}
    (arguments.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"Held-out pairs, judged in both orders and against a control answer; ± one standard error\n{HEADER}")
    report("before", {"all": before["all"]})
    report("after", after)
    print(f"\nRewards of those pairs that rules leave open, by rules alone and with the judge behind them\n{HEADER}")
    for name in ("rules", "judge"):
        report(name, {group: each[name] for group, each in staged.items()})
    print(f"Saved to {arguments.output}: the model and summary.json")


if __name__ == "__main__":
    main()
