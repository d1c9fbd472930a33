"""The cleaning rules that ask models, with models that follow a script, and with a real one on the package's engine."""

import json
import re

import pytest
from test_cleaning import contents, read_lines, write_lines

from trl_ulorl.data import chunks, cleaning, model_rules
from trl_ulorl.data.arithmetic import arithmetic_dataset, embedded_model_path
from trl_ulorl.data.cleaning import CleaningSettings, clean
from trl_ulorl.data.model_rules import (
    INSTRUCTION,
    ModelSettings,
    SamplingSettings,
    agreed_answer,
    answering_prompt,
    is_right,
    parse_rewriting,
)
from trl_ulorl.data.models import EngineModel

# Question, reference, and what the scripted models say: the base model in four tries, two reference models.
TOO_EASY = [
    ("Find $2+2$.", "4", ["4", "4", "4", "4"], "dropped"),
    ("Find $2+3$.", "5", ["5", "5", "5.0", r"\frac{10}{2}"], "dropped"),
    ("Find $0.25+0.25$.", r"\frac{1}{2}", ["0.5", "1/2", r"\frac12", "0.50"], "dropped"),
    ("Name the prime below 3.", "2", ["2", "2", "2", "2"], "dropped"),
    ("Find $7 \\cdot 8$.", "56", ["56", "54", "56", "56"], "kept"),
    ("Find $9 \\cdot 8$.", "72", ["72", "72", "72", None], "kept"),  # cut off
    ("Find $17 \\cdot 19$.", "323", ["1", "2", "3", "4"], "kept"),
    ("Find $10!/8!$.", "90", ["no idea", "90", "90", "90"], "kept"),  # no answer is a wrong one
    ("Find the colour of the sky.", "deep blue", ["azure", "azure", "azure", "azure"], "kept"),  # undecided
    ("Find $3^5$.", "243", [None, None, None, None], "kept"),
]
WRONG = [
    ("Find $1+10$.", "12", ["11", "11"], "dropped"),
    ("Find $1+20$.", "20", ["21", "21.0"], "dropped"),
    ("Find $1/3+1/3$.", r"\frac{1}{3}", [r"\frac{2}{3}", "4/6"], "dropped"),
    ("Find the root of $x+4$.", "4", ["-4", "-4"], "dropped"),
    ("Find $1+30$.", "31", ["31", "31"], "kept"),
    ("Find $1+40$.", "31", ["41", "42"], "kept"),  # they don't agree
    ("Find $1+50$.", "52", ["51", None], "kept"),  # one was cut off
    ("Find $1+60$.", "62", ["61", "no idea"], "kept"),
    ("Find $1+70$.", "71", ["72", "71"], "kept"),
    ("Find the sky's colour.", "deep blue", ["azure", "azure"], "kept"),  # undecided
]


class Scripted:
    """Says for each question what the script has for it, one after another."""

    calls = 0

    def __init__(self, said):
        self._said = said

    def complete(self, prompts, *, seed):
        type(self).calls += 1
        left = {question: iter(texts) for question, texts in self._said.items()}
        answers = []
        for messages in prompts:
            question = next(q for q in left if q in messages[-1]["content"])
            text = next(left[question])
            boxed = text is not None and text != "no idea" and not re.search("question|null", text)
            answers.append(rf"<think>hm</think> So \boxed{{{text}}}." if boxed else text)
        return answers


def use_models(monkeypatch, models):
    monkeypatch.setattr(model_rules, "EngineModel", Scripted)
    monkeypatch.setattr(cleaning.models, "read_tokenizer_and_config", lambda name: None)
    real = model_rules.apply_models
    monkeypatch.setattr(cleaning, "apply_models", lambda *a: real(*a, load=lambda name, _: models[name]))
    monkeypatch.setattr(Scripted, "close", lambda self: None, raising=False)


def cleaned(tmp_path, rows, settings, name="out"):
    source = tmp_path / "rows.jsonl"
    if not source.exists():  # a file that was written anew is another one
        write_lines(source, [{"problem": row[0], "answer": row[1]} for row in rows])
    source = str(source)
    clean(
        CleaningSettings(source, models=settings, skip=("true_false",) if settings.rewrite_model is None else ()),
        tmp_path / name,
    )
    return {entry["row"]: entry for entry in read_lines(tmp_path / name / "audit.jsonl")}


def test_too_easy(tmp_path, monkeypatch):
    use_models(monkeypatch, {"base": Scripted({row[0]: row[2] for row in TOO_EASY})})
    audit = cleaned(tmp_path, TOO_EASY, ModelSettings(model="base", samples=4))
    assert [audit[number]["action"] for number in range(len(TOO_EASY))] == [row[3] for row in TOO_EASY]
    assert audit[0]["rule"] == "too_easy" and audit[0]["reason"] == "base is right in 4 of 4 tries"
    assert len(read_lines(tmp_path / "out" / "kept.jsonl")) == sum(row[3] == "kept" for row in TOO_EASY)


def test_wrong_references(tmp_path, monkeypatch):
    models = {f"strong{place}": Scripted({row[0]: [row[2][place]] for row in WRONG}) for place in (0, 1)}
    use_models(monkeypatch, models)
    audit = cleaned(tmp_path, WRONG, ModelSettings(reference_models=("strong0", "strong1")))
    assert [audit[number]["action"] for number in range(len(WRONG))] == [row[3] for row in WRONG]
    assert audit[0]["rule"] == "wrong_reference" and "agree on '11'" in audit[0]["reason"]


def test_rewriting(tmp_path, monkeypatch):
    rows = [
        ("Is 91 a prime number?", "No", ['{"question": "Find the least prime factor of 91.", "answer": 7}'], "changed"),
        ("Prove that $1+2=3$ in two ways.", "proof", ['<think>x</think>\n```json\n{"question": "Find $1+2$.", "answer": "3"}\n```'], "changed"),
        ("Is 92 a prime number?", "No", ["null"], "dropped"),
        ("Is 93 a prime number?", "No", ['{"question": "Is 93 composite?", "answer": "Yes"}'], "dropped"),
        ("Is 94 a prime number?", "No", [None], "dropped"),
        ("Is 95 a prime number?", "No", ['{"question": "Find it.", "answer": '], "dropped"),
        ("Which of the following is prime? (A) 4 (B) 5", "B", ['{"question": "Find the prime between 4 and 6.", "answer": "5"}'], "changed"),
        ("Find $3+4$.", "7", [], "kept"),
    ]  # fmt: skip
    use_models(monkeypatch, {"writer": Scripted({row[0]: row[2] for row in rows})})
    audit = cleaned(tmp_path, rows, ModelSettings(rewrite_model="writer"))
    assert [audit[number]["action"] for number in range(len(rows))] == [row[3] for row in rows]
    assert audit[0]["after"] == {"question": "Find the least prime factor of 91.", "answer": "7"}
    assert "falls to true_false" in audit[3]["reason"]
    kept = read_lines(tmp_path / "out" / "kept.jsonl")
    assert [row["answer"] for row in kept] == ["7", "3", "5", "7"]
    assert kept[2]["prompt"] == [{"role": "user", "content": "Find the prime between 4 and 6."}]


def test_all_three_after_one_another_and_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(model_rules, "_BATCH_ROWS", 3)
    rows = [*TOO_EASY, *WRONG]
    models = {"base": Scripted({row[0]: row[2] if row in TOO_EASY else ["?"] * 4 for row in rows})}
    for place in (0, 1):
        models[f"strong{place}"] = Scripted({row[0]: [row[2][place]] if row in WRONG else [row[1]] for row in rows})
    use_models(monkeypatch, models)
    settings = ModelSettings(model="base", samples=4, reference_models=("strong0", "strong1"))
    Scripted.calls = 0
    audit = cleaned(tmp_path, rows, settings)
    assert [audit[number]["action"] for number in range(len(rows))] == [row[3] for row in rows]

    asked, Scripted.calls = Scripted.calls, 0
    real = Scripted.complete

    def interrupted(self, prompts, *, seed):
        if Scripted.calls == 5:
            raise KeyboardInterrupt
        return real(self, prompts, seed=seed)

    monkeypatch.setattr(Scripted, "complete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cleaned(tmp_path, rows, settings, "again")
    monkeypatch.setattr(Scripted, "complete", real)
    cleaned(tmp_path, rows, settings, "again")
    assert Scripted.calls == asked  # nothing was asked twice
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize(
    ("texts", "reference", "agreed"),
    [
        ([r"\boxed{4}", r"\boxed{4}"], "5", "4"),
        ([r"\boxed{4}", r"\boxed{4}", r"\boxed{4.0}"], "5", "4"),
        ([r"\boxed{4}", r"\boxed{4}", r"\boxed{5}"], "5", None),
        ([r"\boxed{4}"], "5", None),
        ([r"\boxed{5}", r"\boxed{5}"], "5", None),
        (["4", "4"], "5", None),  # nothing marks an answer
    ],
)
def test_agreement(texts, reference, agreed):
    assert agreed_answer(texts, reference) == agreed


def test_the_request_to_box_is_made_once():
    plain = {"prompt": [{"role": "user", "content": "Find $x$."}]}
    assert answering_prompt(plain, INSTRUCTION)[-1]["content"] == f"Find $x$.\n\n{INSTRUCTION}"
    assert plain["prompt"][0]["content"] == "Find $x$."
    for said in (r"Find $x$ and write \boxed{}.", "Find $x$. End with Answer: $Answer."):
        messages = [{"role": "user", "content": said}]
        assert answering_prompt({"prompt": messages}, INSTRUCTION) == messages


def test_a_try_that_is_cut_off_is_wrong_and_an_undecided_one_is_none():
    assert is_right(None, "4") is False
    assert is_right(r"\boxed{4}", "4") is True
    assert is_right(r"\boxed{azure}", "deep blue") is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "null",
        "{}",
        '{"question": "a"}',
        '{"question": "", "answer": "1"}',
        '{"question": "a", "answer": null}',
        "[1]",
    ],
)
def test_no_rewriting(text):
    assert parse_rewriting(text) is None


def embedded_rows(num_rows):
    return [(row["prompt"][0]["content"], row["answer"]) for row in arithmetic_dataset(num_rows, seed=0, split="test")]


@pytest.mark.slow
def test_the_embedded_model_drops_what_it_can_do(tmp_path, monkeypatch):
    """One in three references is made wrong; those the model can't get right, so they are never too easy."""
    monkeypatch.setattr(model_rules, "_BATCH_ROWS", 8)
    sampling = SamplingSettings(top_p=1.0, top_k=0, max_tokens=96)
    settings = ModelSettings(model=embedded_model_path(), samples=2, instruction="", sampling=sampling)
    rows = embedded_rows(24)
    rows = [(question, str(int(answer) + 100 * (number % 3 == 0))) for number, (question, answer) in enumerate(rows)]
    audit = cleaned(tmp_path, rows, settings)
    dropped = {number for number, entry in audit.items() if entry["action"] == "dropped"}
    assert {audit[number]["rule"] for number in dropped} == {"too_easy"}
    assert dropped and not any(number % 3 == 0 for number in dropped)
    cleaned(tmp_path, rows, settings, "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.slow
def test_a_seed_gives_the_same_answers_and_another_one_others():
    model = EngineModel(embedded_model_path(), SamplingSettings(top_p=1.0, top_k=0, max_tokens=48, batch_size=4))
    prompts = [[{"role": "user", "content": question}] for question, _ in embedded_rows(12)]
    first, again, other = (model.complete(prompts, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert any(re.search(r"\\boxed\{-?\d+\}", text or "") for text in first)


def test_lines_of_models_are_json(tmp_path):
    """A name is enough for the settings to be written down."""
    settings = CleaningSettings("x", models=ModelSettings(model="m"))
    assert "too_easy" in settings.rules() and "wrong_reference" not in settings.rules()
    assert json.loads(cleaning._identity(CleaningSettings(str(tmp_path), streaming=True), None))["format"] == 1
    assert chunks.CHUNK_ROWS == 5_000
