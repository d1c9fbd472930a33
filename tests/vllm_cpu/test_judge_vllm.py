"""A judge on vLLM: the same answers as on transformers, from an engine in this process and from a served one."""

import pytest
from server_helpers import running_server
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_helpers import needs_vllm

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.rewards.judge import GenerativeVerifier, judge_messages
from trl_ulorl.rewards.judge_models import EndpointModel, TransformersModel, VLLMModel

pytestmark = needs_vllm

PAIRS = [("7", "seven"), ("27cm", "0.27m"), ("x" * 60, "1/2"), (r"\frac{1}{2}", "one half"), ("3", "3.0"), ("5", "6")]
PROMPTS = [judge_messages(*pair, instructions="") for pair in PAIRS]
PROBLEMS = [[{"role": "user", "content": problem}] for problem in ("3+5=", "9-4=", "2+2+1=", "8-3-6=", "7+7=")]


@pytest.fixture(scope="module")
def on_transformers():
    path = embedded_model_path()
    return TransformersModel(
        AutoModelForCausalLM.from_pretrained(path, dtype="float32"), AutoTokenizer.from_pretrained(path)
    )


@pytest.fixture(scope="module")
def on_vllm():
    return VLLMModel(embedded_model_path(), dtype="float32", max_model_len=480, max_num_seqs=16, enforce_eager=True)


def test_an_engine_answers_as_transformers_do(on_vllm, on_transformers):
    """The embedded model was trained on sums: it answers these for certain, and after its end token nothing follows."""
    texts = on_transformers.complete(PROBLEMS)
    assert len(set(texts)) > 1
    assert on_vllm.complete(PROBLEMS) == texts


def test_an_engine_that_is_there_is_used(on_vllm):
    other = VLLMModel(on_vllm._llm)
    assert other.complete(PROMPTS) == on_vllm.complete(PROMPTS)
    with pytest.raises(ValueError, match="set them where it is made"):
        VLLMModel(on_vllm._llm, max_model_len=9)


def test_a_model_that_is_no_judge_gives_no_verdict(on_vllm):
    judge = GenerativeVerifier(on_vllm, instructions="")
    assert judge.judge([*PAIRS, ("7", "7"), (":", "7")]) == [None] * len(PAIRS) + [True, False]
    assert judge.counts["unreadable"] == len(PAIRS)


def test_a_served_engine_answers_as_transformers_do(on_transformers, tmp_path):
    with running_server(tmp_path) as server:
        served = EndpointModel(f"{server.base_url}/v1", embedded_model_path())
        assert served.complete(PROBLEMS) == on_transformers.complete(PROBLEMS)
        assert GenerativeVerifier(served, instructions="").judge(PAIRS) == [None] * len(PAIRS)
