"""Data, models, tokenizers and rewards that don't fit: each is refused while the trainer is built, with the way out."""

import pytest
from conftest import make_dataset, make_model, make_tokenizer
from datasets import Dataset, Features, List, Value
from torch import nn
from transformers import ProcessorMixin
from trl import GRPOConfig

from trl_ulorl import UloRLConfig, UloRLTrainer, VerifierReward
from trl_ulorl.checks import check_gathering, check_joining

pytestmark = pytest.mark.slow

FIELDS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 8,  # two groups of four
    "num_generations": 4,
    "max_completion_length": 16,
    "num_segments": 2,
    "gradient_checkpointing": False,
    "max_steps": 1,
    "save_strategy": "no",
}


def even_length(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 2 == 0) for completion in completions]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Build a trainer; a test fails if anything is decoded or trained on while it does."""

    def is_too_late(*args, **kwargs):
        raise AssertionError("decoding or training began before the input was refused")

    monkeypatch.setattr(UloRLTrainer, "train", is_too_late)
    monkeypatch.setattr(UloRLTrainer, "_generate_and_score_completions", is_too_late)

    def build(*, config=UloRLConfig, fields=None, **arguments):
        arguments = {
            "model": make_model(),
            "reward_funcs": even_length,
            "args": config(**{"output_dir": str(tmp_path), **FIELDS, **(fields or {})}),
            "train_dataset": make_dataset(),
            "processing_class": make_tokenizer(),
            **arguments,
        }
        return UloRLTrainer(**arguments)

    return build


def refused(error, texts, build, **arguments):
    with pytest.raises(error) as caught:
        build(**arguments)
    for text in texts:
        assert text in str(caught.value)


def test_neighbour_of_all_refusals_is_accepted(make):
    """Without it every test below could pass for a reason of its own."""
    trainer = make()
    assert trainer.ledger()["groups"]["admitted"] == 0


# ------------------------------------------------------------------------------------- what segments can't be cut around


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tools", "a tool call and its result could be cut"),
        ("environment_factory", "an environment's turns could be cut"),
        ("rollout_func", "it generates whole completions"),
    ],
)
def test_unsupported_arguments(make, name, reason):
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    texts = [f"`{name}` is not supported", reason, "Use `trl.GRPOTrainer` for it, or train without."]
    refused(ValueError, texts, make, **{name: [add] if name == "tools" else add})


def test_config_of_the_parent(make):
    def config(**fields):
        return GRPOConfig(**{name: value for name, value in fields.items() if name != "num_segments"})

    texts = ["`args` is a `GRPOConfig`", "Replace the class: it takes all fields of `GRPOConfig`."]
    refused(TypeError, texts, make, config=config)


def test_config_as_a_mapping(make):
    refused(TypeError, ["`args` is a `dict`", "Replace the class"], make, args={"num_segments": 2})


def test_processor(make):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    texts = ["`processing_class` is a `Processor`", "images", "Pass the tokenizer of a text model."]
    refused(TypeError, texts, make, processing_class=Processor())


# ------------------------------------------------------------------------------------------------------------------ data


def test_iterable_dataset(make):
    texts = ["`IterableDataset`", "Pass a map-style `Dataset`", "`Dataset.from_list(list(iterable.take(n)))`"]
    refused(TypeError, texts, make, train_dataset=make_dataset().to_iterable_dataset())


@pytest.mark.parametrize(
    ("data", "kind"), [(None, "NoneType"), ([{"prompt": "1+1="}] * 8, "list"), ({"prompt": ["1+1="] * 8}, "dict")]
)
def test_no_dataset(make, data, kind):
    texts = [f"`train_dataset` is a `{kind}`", "a `datasets.Dataset` with a `prompt` column is needed"]
    refused(TypeError, texts, make, train_dataset=data)


def test_dataset_without_prompts(make):
    texts = ["the columns ['question', 'answer'] but no `prompt`", "`train_dataset.rename_column`"]
    refused(ValueError, texts, make, train_dataset=make_dataset().rename_column("prompt", "question"))


@pytest.mark.parametrize("column", ["image", "images"])
def test_dataset_with_images(make, column):
    texts = [f"`train_dataset` has a column `{column}`", "`train_dataset.remove_columns`"]
    refused(ValueError, texts, make, train_dataset=make_dataset().add_column(column, ["x.png"] * 32))


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_prompts_than_a_batch(make, rows):
    texts = [
        f"`train_dataset` has {rows} prompts, fewer than one batch (2 = `generation_batch_size` 8 / `num_generations` 4)",
        "Add prompts or make the batch smaller.",
    ]
    refused(ValueError, texts, make, train_dataset=make_dataset().select(range(rows)))


def test_as_many_prompts_as_a_batch(make):
    make(train_dataset=make_dataset().select(range(2)))


# --------------------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("reward_funcs", [None, [], [None]])
def test_no_reward(make, reward_funcs):
    texts = ["`reward_funcs` is empty", "pass at least one, for instance `VerifierReward()`"]
    refused(ValueError, texts, make, reward_funcs=reward_funcs)


def test_verifier_without_references(make):
    texts = [
        "`VerifierReward` compares with a reference answer",
        "only the columns ['prompt', 'target']",
        "Name the column of the references `answer` or `solution`.",
    ]
    data = make_dataset().rename_column("answer", "target")
    for reward_funcs in (VerifierReward(), [even_length, VerifierReward()]):
        refused(ValueError, texts, make, reward_funcs=reward_funcs, train_dataset=data)


@pytest.mark.parametrize("kind", [VerifierReward, type("Reward", (), {"__call__": even_length})])
def test_a_class_where_an_instance_is_needed(make, kind):
    texts = [f"`reward_funcs` holds the class `{kind.__name__}`", f"Pass an instance, such as `{kind.__name__}()`."]
    refused(TypeError, texts, make, reward_funcs=[even_length, kind])


def of_completions_only(completions):
    return [0.0 for _ in completions]


def of_difficulty(completions, difficulty, **kwargs):
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (of_completions_only, "got an unexpected keyword argument 'completion_ids'"),
        (of_difficulty, "missing a required argument: 'difficulty'"),
    ],
)
def test_reward_function_that_no_call_would_fit(make, func, reason):
    texts = [
        f"`{func.__name__}` can't be called with what the data set holds ({reason})",
        "`prompts`",
        "the columns ['answer']",
        "Take `**kwargs`",
    ]
    refused(TypeError, texts, make, reward_funcs=func)


def test_reward_function_of_a_column_that_is_there(make):
    data = make_dataset()
    make(reward_funcs=of_difficulty, train_dataset=data.add_column("difficulty", [1] * len(data)))


def test_references_that_are_none(make):
    data = make_dataset()
    answers = [None if index == 3 else answer for index, answer in enumerate(data["answer"])]
    data = data.remove_columns("answer").add_column("answer", answers)
    texts = ["The reference in row 3 of `train_dataset` is None", "Filter such rows out"]
    refused(ValueError, texts, make, reward_funcs=VerifierReward(), train_dataset=data)


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_verifier_with_references(make, column):
    data = make_dataset()
    make(
        reward_funcs=VerifierReward(),
        train_dataset=data.rename_column("answer", column) if column != "answer" else data,
    )


def test_unknown_correctness_func(make):
    texts = [
        "`correctness_func` ('accuracy') is none of the reward functions ['even_length', 'verifier_reward']",
        "Name one of them, or leave it out for the first.",
    ]
    fields = {"correctness_func": "accuracy"}
    refused(ValueError, texts, make, reward_funcs=[even_length, VerifierReward()], fields=fields)


def test_known_correctness_func(make):
    fields = {"correctness_func": "verifier_reward"}
    assert make(reward_funcs=[even_length, VerifierReward()], fields=fields).args.correctness_func == "verifier_reward"


@pytest.mark.parametrize("reward_model", ["some/reward-model", nn.Linear(2, 1)], ids=["name", "module"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"dynamic_sampling": False}, {"overlong": "mask"}],
    ids=["both", "truncation as wrong", "dynamic sampling"],
)
def test_reward_model(make, reward_model, fields):
    texts = [
        "A reward model scores a batch once it is formed",
        "Set `dynamic_sampling=False` and `overlong='mask'`, or wrap the model in a reward function.",
    ]
    refused(ValueError, texts, make, reward_funcs=[even_length, reward_model], fields=fields)


# --------------------------------------------------------------------------------------------------- tokenizer and model


def test_tokenizer_without_an_end(make):
    texts = ["The tokenizer has no `eos_token`", "Set `tokenizer.eos_token` to the token that ends an answer."]
    refused(ValueError, texts, make, processing_class=make_tokenizer(eos=False))


@pytest.mark.parametrize("positions", [8, 16])
def test_completion_as_long_as_the_model(make, positions):
    texts = [
        "`max_completion_length` (16) leaves no room for a prompt",
        f"within the model's {positions} positions",
        "Lower it, or extend the model with `model_init_kwargs`",
    ]
    refused(ValueError, texts, make, model=make_model(positions=positions))


def long_prompt(length, *, row, messages):
    """32 prompts, of which one has `length` characters."""
    prompts = ["1" * (length if index == row else 3) for index in range(32)]
    if not messages:
        return Dataset.from_dict({"prompt": prompts})
    rows = [[{"role": "user", "content": prompt}] for prompt in prompts]
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict({"prompt": rows}, features=Features({"prompt": List(message)}))


@pytest.mark.parametrize(
    ("length", "messages", "num_tokens"),
    [(20, False, 20), (50, False, 50), (18, True, 20)],  # the template adds <user> and <assistant>
)
@pytest.mark.parametrize("row", [0, 31])
def test_prompt_without_room_for_a_completion(make, length, messages, num_tokens, row):
    texts = [
        f"The prompt in row {row} of `train_dataset` has {num_tokens} tokens",
        "the model has only 20 positions",
        "Filter such prompts out, or extend the model's positions.",
    ]
    data = long_prompt(length, row=row, messages=messages)
    refused(ValueError, texts, make, model=make_model(positions=20), train_dataset=data)


@pytest.mark.parametrize(("length", "messages"), [(19, False), (17, True)])
def test_prompt_with_room_for_one_token(make, length, messages):
    make(model=make_model(positions=20), train_dataset=long_prompt(length, row=3, messages=messages))


@pytest.mark.parametrize(
    ("fields", "backend", "remedy"),
    [
        ({"ds3_gather_for_generation": False}, {"zero_stage": 3, "fsdp_version": None}, "Set it to True"),
        ({}, {"zero_stage": 0, "fsdp_version": 1}, "fsdp_version: 2"),
    ],
    ids=["ZeRO-3 without gathering", "FSDP1"],
)
def test_decoding_with_sharded_weights(tmp_path, fields, backend, remedy):
    args = UloRLConfig(str(tmp_path), use_cpu=True, bf16=False, **fields)
    with pytest.raises(ValueError, match=remedy):
        check_gathering(args, num_ranks=2, **backend)
    check_gathering(args, num_ranks=1, **backend)
    check_gathering(UloRLConfig(str(tmp_path), use_cpu=True, bf16=False), num_ranks=2, zero_stage=3, fsdp_version=2)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"is_additive": False, "is_sharded": False}, "entropy bonus"),
        ({"is_additive": True, "is_sharded": True}, "FSDP"),
    ],
    ids=["loss", "backend"],
)
def test_joining_rows_where_every_micro_batch_is_needed(tmp_path, state, reason):
    args = UloRLConfig(str(tmp_path), use_cpu=True, bf16=False, dynamic_micro_batches=True)
    with pytest.raises(ValueError, match=f"{reason}.*(Leave|leave)"):
        check_joining(args, **state)
    check_joining(UloRLConfig(str(tmp_path), use_cpu=True, bf16=False), is_additive=False, is_sharded=True)


def test_joining_rows_with_an_entropy_bonus_is_refused_before_training(make):
    with pytest.raises(ValueError, match="an entropy bonus"):
        make(fields={"dynamic_micro_batches": True, "entropy_coef": 0.01})
