"""Tests of the embedded task and of the model that ships with it."""

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ulorl.data.arithmetic import (
    MAX_TERMS,
    arithmetic_dataset,
    embedded_model_path,
    is_held_out,
    worked_solution,
)


def evaluate_chain(problem: str) -> int:
    """Work a chain out from left to right, character by character."""
    total, sign = 0, 1
    for character in problem.removesuffix("="):
        if character in "+-":
            sign = 1 if character == "+" else -1
        else:
            total += sign * int(character)
    return total


def texts(rows) -> list[str]:
    return [prompt[0]["content"] for prompt in rows["prompt"]]


@pytest.fixture(scope="module")
def train_rows():
    return arithmetic_dataset(5000, seed=0, split="train")


@pytest.fixture(scope="module")
def test_rows():
    return arithmetic_dataset(500, seed=0, split="test")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_model_path())


def test_rows_depend_on_the_seed_alone(train_rows):
    assert arithmetic_dataset(5000, seed=0, split="train").to_list() == train_rows.to_list()
    assert arithmetic_dataset(5000, seed=1, split="train").to_list() != train_rows.to_list()


def test_first_rows_are_pinned():
    assert arithmetic_dataset(2, seed=0, split="test").to_list() == [
        {"prompt": [{"role": "user", "content": "1-2="}], "answer": "-1", "num_terms": 2},
        {"prompt": [{"role": "user", "content": "9-9="}], "answer": "0", "num_terms": 2},
    ]


def test_a_larger_draw_continues_a_smaller_one(test_rows):
    assert arithmetic_dataset(100, seed=0, split="test").to_list() == test_rows.to_list()[:100]


def test_splits_share_no_problem_whatever_the_seeds(train_rows, test_rows):
    trained = set(texts(train_rows)) | set(texts(arithmetic_dataset(5000, seed=1, split="train")))
    assert trained.isdisjoint(texts(test_rows))
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, texts(test_rows)))


def test_both_splits_hold_short_problems():
    two_terms = [f"{a}{sign}{b}=" for a in range(1, 10) for b in range(1, 10) for sign in "+-"]
    assert len(two_terms) == 162
    assert sum(map(is_held_out, two_terms)) == 49


def test_test_rows_are_distinct(test_rows):
    assert len(set(texts(test_rows))) == len(test_rows)


def test_answers_are_right(train_rows, test_rows):
    for rows in (train_rows, test_rows):
        for problem, answer, num_terms in zip(texts(rows), rows["answer"], rows["num_terms"], strict=True):
            assert answer == str(evaluate_chain(problem))
            assert num_terms == sum(map(str.isdigit, problem))


def test_lengths_are_heavy_tailed_and_mostly_fit_128_tokens(train_rows):
    num_tokens = np.array([len(worked_solution(problem)) + 1 for problem in texts(train_rows)])  # + the end token
    assert np.percentile(num_tokens, 99) >= 4 * np.median(num_tokens)
    assert np.mean(num_tokens > 128) < 0.02
    assert min(train_rows["num_terms"]) == 2
    assert max(train_rows["num_terms"]) <= MAX_TERMS


def test_worked_solution_has_a_line_per_operation():
    assert worked_solution("3+5-9=") == "3+5=8\n8-9=-1\n\\boxed{-1}"


def test_worked_solution_ends_in_the_answer(test_rows):
    for problem, answer in zip(texts(test_rows), test_rows["answer"], strict=True):
        assert worked_solution(problem).endswith(f"\n\\boxed{{{answer}}}")


def test_a_slip_is_carried_on():
    assert worked_solution("3+5-9+1=", slips={1: 2}) == "3+5=8\n8-9=1\n1+1=2\n\\boxed{2}"


@pytest.mark.parametrize("problem", ["", "3", "3=", "3+5", "3+15=", "0+5=", "3*5=", "-3+5=", "+".join("1" * 25) + "="])
def test_what_is_no_problem_of_the_task_is_refused(problem):
    with pytest.raises(ValueError, match=r"`problem` .* must be a chain of 2 to 24 terms .* Write it like '3\+5-9='"):
        worked_solution(problem)


@pytest.mark.parametrize("slips", [{2: 1}, {-1: 1}])
def test_a_slip_outside_the_working_is_refused(slips):
    with pytest.raises(ValueError, match=r"`slips` .* the indices 0 to 1: .* Leave it out"):
        worked_solution("3+5-9=", slips=slips)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_problems": 0}, r"`num_problems` \(0\) must be at least 1.* Ask for 1 or more"),
        ({"seed": -1}, r"`seed` \(-1\) must not be negative.* Use 0 or more"),
        ({"split": "validation"}, r"`split` \('validation'\) .* has 'train' and 'test'.* Pass one of these"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        arithmetic_dataset(**{"num_problems": 1, "seed": 0, "split": "train", **arguments})


def test_model_is_small_and_ends_outputs(model, tokenizer):
    assert model.num_parameters() <= 1_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_tokenizer_round_trips_each_character(tokenizer):
    text = "3+5=8\n8-9=-1\n\\boxed{-1}" + "".join(map(chr, range(ord(" "), ord("~") + 1))) + "user  assistant system\n"
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text


def test_output_has_a_token_per_character(tokenizer):
    output = worked_solution("3+5-9=")
    assert len(tokenizer(output)["input_ids"]) == len(output)


def test_chat_template_renders(tokenizer, train_rows):
    prompt = [{"role": "user", "content": "3+5-9="}]
    opening = "<|im_start|>user\n3+5-9=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) == opening
    reply = [{"role": "assistant", "content": "\\boxed{-1}"}]
    assert tokenizer.apply_chat_template(prompt + reply, tokenize=False) == opening + "\\boxed{-1}<|im_end|>\n"
    assert len(tokenizer(opening)["input_ids"]) == len("3+5-9=") + 8


def test_model_boxes_answers(model, tokenizer, test_rows):
    """The shipped weights belong to the shipped tokenizer and task: most greedy outputs end in a boxed number."""
    inputs = tokenizer.apply_chat_template(
        test_rows["prompt"][:16], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    sequences = model.generate(**inputs, max_new_tokens=128, do_sample=False)
    outputs = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum("\\boxed{" in output and output.endswith("}") for output in outputs) >= 14
