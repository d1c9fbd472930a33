"""The generative stage on a real model of transformers: batches, padding, endings, and verdicts that it was taught."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from judge_server import MODEL, JudgeServer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.rewards import verify_answers
from trl_ulorl.rewards.judge import MAX_VERDICT_TOKENS, VERDICTS, GenerativeVerifier, judge_messages
from trl_ulorl.rewards.judge_models import EndpointModel, TransformersModel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAIRS = [("7", "seven"), ("27cm", "0.27m"), ("x" * 60, "1/2"), ("", "y"), (r"\frac{1}{2}", "one half"), ("3", "3.0")]
PROMPTS = [judge_messages(*pair, instructions="") for pair in PAIRS]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def random_model():
    """Random weights, wide enough that different prompts get different answers."""
    set_seed(3)
    config = AutoConfig.from_pretrained(embedded_model_path())
    config.initializer_range = 0.5
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def taught_model(tokenizer):
    """A small model that has learnt two pairs by heart, in both orders, and that long numbers are equal to neither."""
    set_seed(0)
    config = AutoConfig.from_pretrained(embedded_model_path())
    config.update({"hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    equal = [("1/2", "one half"), ("27cm", "0.27m")]
    different = [(answer, str(10**11 + 429490177 * n)) for n, pair in enumerate(equal * 2) for answer in pair]
    different += [("1/2", "one third"), ("27cm", "27m")]
    examples = [(*pair, "EQUIVALENT") for pair in equal * 3] + [(*pair, "DIFFERENT") for pair in different]
    examples += [(second, first, verdict) for first, second, verdict in examples]
    rows, labels = [], []
    for first, second, verdict in examples:
        prompt = tokenizer.apply_chat_template(
            judge_messages(first, second, instructions=""), tokenize=False, add_generation_prompt=True
        )
        prompt_ids, answer_ids = tokenizer(prompt)["input_ids"], tokenizer(verdict + tokenizer.eos_token)["input_ids"]
        rows.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    target = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1.0))
    for _ in range(80):
        loss = model(input_ids=input_ids, labels=target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


# ---------------------------------------------------------------------------------------------------- how it decodes


def test_answers_do_not_depend_on_the_batch(random_model, tokenizer):
    one_by_one = [TransformersModel(random_model, tokenizer).complete([prompt])[0] for prompt in PROMPTS]
    assert len(set(one_by_one)) == len(PROMPTS)  # so that a mixed-up order shows
    for batch_size in (2, 4, 64):
        assert TransformersModel(random_model, tokenizer, batch_size=batch_size).complete(PROMPTS) == one_by_one
    assert TransformersModel(random_model, tokenizer).complete(PROMPTS[::-1]) == one_by_one[::-1]


def test_answers_are_those_of_a_plain_greedy_loop(random_model, tokenizer):
    prompt = tokenizer.apply_chat_template(PROMPTS[0], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    width = ids.shape[1]
    with torch.no_grad():
        for _ in range(MAX_VERDICT_TOKENS):
            ids = torch.cat([ids, random_model(ids).logits[:, -1:].argmax(-1)], dim=1)
    answer = ids[0, width:].tolist()
    assert tokenizer.eos_token_id not in answer
    assert TransformersModel(random_model, tokenizer).complete(PROMPTS[:1]) == [tokenizer.decode(answer)]


def test_the_models_own_generation_settings_are_not_used(random_model, tokenizer):
    plain = TransformersModel(random_model, tokenizer).complete(PROMPTS)
    kept = random_model.generation_config.to_dict()
    try:
        random_model.generation_config.update(
            do_sample=True,
            temperature=9.0,
            repetition_penalty=9.0,
            no_repeat_ngram_size=1,
            max_new_tokens=1,
            num_beams=3,
        )
        assert TransformersModel(random_model, tokenizer).complete(PROMPTS) == plain
    finally:
        random_model.generation_config.update(**kept)


def test_random_weights_give_no_verdict(random_model, tokenizer):
    judge = GenerativeVerifier(TransformersModel(random_model, tokenizer), instructions="")
    assert [each.reason for each in judge.judgements(PAIRS)] == ["unreadable"] * 3 + ["rejected"] + ["unreadable"] * 2


def test_no_prompts_are_no_answers(random_model, tokenizer):
    assert TransformersModel(random_model, tokenizer).complete([]) == []


# ------------------------------------------------------------------------------------------------------- what it says


def test_verdicts_that_a_model_was_taught(taught_model, tokenizer):
    model = TransformersModel(taught_model, tokenizer)
    assert set(model.complete(PROMPTS)) <= set(VERDICTS)  # it ends after its one word, also in a batch
    judge = GenerativeVerifier(model, instructions="")
    pairs = [("1/2", "one half"), ("one half", "1/2"), ("27cm", "0.27m"), ("27cm", "27m"), ("1/2", "one third")]
    assert judge.judge(pairs) == [True, True, True, False, False]
    judge.check()


def test_a_folder_is_loaded_with_its_tokenizer(taught_model, tokenizer, tmp_path):
    taught_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    GenerativeVerifier(TransformersModel(tmp_path, device="cpu"), instructions="").check()


def test_behind_an_endpoint_it_says_the_same(taught_model, tokenizer):
    """A server that answers with the model, as a client sees it."""
    model = TransformersModel(taught_model, tokenizer)
    with JudgeServer(lambda messages: model.complete([messages])[0]) as server:
        remote = EndpointModel(server.base_url, MODEL, concurrency=1)
        assert remote.complete(PROMPTS) == model.complete(PROMPTS)
        GenerativeVerifier(remote, instructions="").check()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_it_can_not_work_with_is_refused(random_model, tokenizer, monkeypatch):
    with pytest.raises(ValueError, match=r"no chat template.*set its `chat_template`"):
        TransformersModel(random_model)
    with pytest.raises(ValueError, match=r"`batch_size` \(0\) must be at least 1"):
        TransformersModel(random_model, tokenizer, batch_size=0)
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="Make the judge before the training arguments"):
        TransformersModel(embedded_model_path())


def test_the_module_costs_nothing_until_a_model_is_made():
    code = "import sys, trl_ulorl.rewards.judge_models; print(*{'torch', 'transformers', 'openai', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


# -------------------------------------------------------------------------------------------------------- the example


@pytest.mark.parametrize("options", [[], ["--model", embedded_model_path()]], ids=["embedded", "named"])
def test_the_example_trains_saves_and_says_how_well(tmp_path, options):
    command = [sys.executable, str(ROOT / "examples" / "train_verifier.py"), "--output", str(tmp_path / "verifier")]
    command += ["--steps", "2", "--batch-size", "4", "--eval-pairs", "8", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "before" in done.stdout and "one standard error" in done.stdout
    summary = json.loads((tmp_path / "verifier" / "summary.json").read_text())
    assert summary["instructions"] is bool(options)
    for moment in ("before", "after"):
        assert 0 <= summary[moment]["accuracy"] <= 1 - summary[moment]["undecided_frac"] <= 1
    assert "those pairs that rules leave open" in done.stdout
    assert TransformersModel(tmp_path / "verifier", device="cpu").complete(PROMPTS[:1])[0] is not None


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(ROOT / "examples"))
    specification = importlib.util.spec_from_file_location("train_verifier", ROOT / "examples" / "train_verifier.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    sys.path.remove(str(ROOT / "examples"))
    return module


def test_the_example_draws_pairs_that_are_what_it_says(example):
    """Equal by construction and different by construction, checked by the rules where these are certain."""
    trained_on = example.draw_examples(3000, seed=1, held_out=False)
    held_out = example.draw_examples(300, seed=0, held_out=True)
    assert sum(each.equal for each in held_out) == 150
    assert len({frozenset(each[:2]) for each in held_out}) == 300
    assert not {frozenset(each[:2]) for each in trained_on} & {frozenset(each[:2]) for each in held_out}
    seen = {text for each in trained_on if each.family == "number" for text in each[:2]}
    assert seen and not seen & {each.first for each in held_out if each.family == "number" and each.equal}
    pairs = [(rf"\boxed{{{each.first}}}", each.second) for each in trained_on]
    certain = 0
    for each, verdict in zip(trained_on, verify_answers(pairs), strict=True):
        if verdict.stage in ("numeric", "units"):
            certain += 1
            assert verdict.equivalent is each.equal, each
    assert certain > 500
    assert {each.family for each in trained_on} == {
        *["count", "ordinal", "number", "quantity", "terms", "clock", "date", "trend"]
    }


def test_the_example_teaches_where_a_pair_becomes_different(example):
    pairs = [
        example.Example("7:30", "half past seven", True, "clock", ("7:30", "half past seven")),
        example.Example("7:30", "half past nine", False, "clock", ("7:30", "half past seven")),
    ]
    model, tokenizer = example.small_model(example.draw_examples(2000, seed=0, held_out=False))
    equal, different = example.as_token_rows(pairs, tokenizer)

    def texts(ids):
        return [None if token == -100 else tokenizer.decode([token]) for token in ids]

    tail = ["half", " past", " seven", '"}', "EQUIVALENT", "<end>"]
    assert texts(equal["input_ids"])[-6:] == texts(equal["labels"])[-6:] == tail
    assert texts(different["input_ids"])[-6:] == ["half", " past", " nine", '"}', "DIFFERENT", "<end>"]
    assert texts(different["labels"])[-6:] == [None, None, None, "DIFFERENT", "DIFFERENT", "<end>"]
    assert set(texts(different["labels"])[:-6]) == set(texts(equal["labels"])[:-6]) == {None}
    prompt = tokenizer.apply_chat_template(judge_messages("7:30", "half past nine", ""), tokenize=False)
    assert tokenizer(prompt)["input_ids"] == different["input_ids"][:-2]  # what the judge asks is what was trained
    assert model.config.vocab_size == len(tokenizer)
