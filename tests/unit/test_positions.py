"""YaRN's positions: numbers, what reaches trainer, engine and saved configuration, and what is refused."""

import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import make_model, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from trl import ModelConfig

from trl_ulorl.cli import main, training
from trl_ulorl.config import UloRLConfig
from trl_ulorl.evaluation.engines import EvaluationSettings, build_engine, load_config
from trl_ulorl.positions import check_complete, extended_positions
from trl_ulorl.rollout.engine import DecodeRequest

PAPER = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 95_232}  # 93k, section 4.1
TINY = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path):
    """A tiny Qwen3 with the base of Qwen3's frequencies, saved as the Hub has it: `rope_theta` beside the rest."""
    path = tmp_path / "model"
    model = make_model()
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    values = json.loads((path / "config.json").read_text())
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    (path / "config.json").write_text(json.dumps(values))
    return path


def frequencies_by_hand(theta, head_size, factor, original):
    """NTK by parts (arXiv 2309.00071, section 3.2): a dimension that turns over 32 times within the original length is
    kept, one that turns less than once is slowed down by the factor, with a straight line between the two."""
    pairs = range(head_size // 2)

    def dimension(turns):  # the pair that turns so often within the original length
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_size - 1)
    values = []
    for pair in pairs:
        kept = theta ** (-2 * pair / head_size)
        slowed = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        values.append(kept * (1 - slowed) + kept / factor * slowed)
    return values


def test_the_papers_frequencies_by_hand_and_by_transformers():
    config = Qwen3Config(head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    config.update(extended_positions(config, PAPER))
    assert config.max_position_embeddings == 142_848  # 140,000 output tokens and a prompt of 2,848
    embedding = Qwen3RotaryEmbedding(config)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.equal(embedding.inv_freq, expected)
    assert embedding.attention_scaling == attention_factor == pytest.approx(0.1 * math.log(1.5) + 1)
    np.testing.assert_allclose(embedding.inv_freq, frequencies_by_hand(1e6, 128, 1.5, 95_232), rtol=1e-5)
    assert embedding.inv_freq[0] == 1 and embedding.inv_freq[-1] == pytest.approx(1e6 ** (-126 / 128) / 1.5)


def test_json_and_mapping_are_the_same():
    config = Qwen3Config(rope_parameters={"rope_theta": 1e6})
    expected = {"rope_parameters": {**PAPER, "rope_theta": 1e6}, "max_position_embeddings": 142_848}
    assert extended_positions(config, PAPER) == extended_positions(config, json.dumps(PAPER)) == expected
    assert extended_positions(config, {**PAPER, "rope_theta": 5e6})["rope_parameters"]["rope_theta"] == 5e6


def test_other_frequencies_than_trained_with_are_warned_of(caplog):
    trained = extended_positions(Qwen3Config(rope_parameters={"rope_theta": 1e6}), TINY)
    extended_positions(Qwen3Config(**trained), TINY)
    assert not caplog.records
    extended_positions(Qwen3Config(**trained), PAPER)
    assert "leave `rope_parameters` out" in caplog.text


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("yarn:1.5", "not valid JSON"),
        ("[]", "must be a mapping"),
        ({**PAPER, "rope_type": "dynamic"}, "`model_init_kwargs` takes other types"),
        ({"rope_type": "yarn", "factor": 2.0}, r"lacks \['original_max_position_embeddings'\]"),
        ({**PAPER, "max_position_embeddings": 5}, "unknown keys"),
        ({**PAPER, "factor": 1}, "above 1"),
        ({**PAPER, "factor": True}, "above 1"),
        ({**PAPER, "factor": "1.5"}, "above 1"),
        ({**PAPER, "original_max_position_embeddings": 0.5}, "whole number"),
    ],
)
def test_what_is_no_yarn_is_refused(given, remedy):
    with pytest.raises(ValueError, match=remedy):
        extended_positions(Qwen3Config(), given)


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(ValueError, match=r"'gpt2'.*Leave them out"):
        extended_positions(AutoConfig.for_model("gpt2"), PAPER)


# --- training ---------------------------------------------------------------------------------------------------------


def init_kwargs(folder, tmp_path, *arguments):
    required = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path), "--bf16", "false"]
    script, args, model_args = training.parse([*required, *arguments])
    return training.model_init_kwargs(args, model_args, script.rope_parameters)


@pytest.mark.parametrize("way", ["option", "file"])
def test_training_loads_the_model_with_them(way, folder, tmp_path):
    arguments = ["--rope_parameters", json.dumps(TINY)]
    if way == "file":
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"rope_parameters": TINY}))
        arguments = ["--config", str(path)]
    kwargs = init_kwargs(folder, tmp_path, *arguments)
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    assert model.config.max_position_embeddings == 256
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq, frequencies_by_hand(1e6, 16, 4.0, 64), rtol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert saved.rope_parameters == model.config.rope_parameters == {**TINY, "rope_theta": 1e6}
    assert saved.max_position_embeddings == 256


def test_two_statements_are_refused(folder, tmp_path):
    twice = ["--rope_parameters", json.dumps(TINY), "--model_init_kwargs", '{"max_position_embeddings": 512}']
    with pytest.raises(ValueError, match="Leave one of them out"):
        init_kwargs(folder, tmp_path, *twice)


def test_rope_parameters_without_their_base_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="Add the model's `rope_theta`"):
        init_kwargs(folder, tmp_path, "--model_init_kwargs", json.dumps({"rope_parameters": TINY}))
    check_complete({"rope_parameters": {**TINY, "rope_theta": 1e6}})
    assert training.model_init_kwargs(UloRLConfig(str(tmp_path), use_cpu=True, bf16=False), ModelConfig()) is not None


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_samples_at_yarns_frequencies(folder):
    settings = EvaluationSettings(str(folder), 1, top_p=1.0, top_k=0, rope_parameters=json.dumps(TINY))
    config, tokenizer = load_config(settings), AutoTokenizer.from_pretrained(folder)
    assert config.max_position_embeddings == 256
    engine, end = build_engine(settings, config, tokenizer, Accelerator(cpu=True), max_model_length=256, num_kept=0)
    prompt = np.arange(4, 20, dtype=np.int32)
    (decoded,) = engine.decode([DecodeRequest(prompt, 200)])
    end()
    ids = torch.from_numpy(np.concatenate([prompt, decoded.token_ids]).astype(np.int64))[None]
    gaps = {}
    for name, kwargs in {"yarn": extended_positions(AutoConfig.from_pretrained(folder), TINY), "own": {}}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
        with torch.no_grad():
            logps = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / 0.85, dim=-1)
        own = logps.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        gaps[name] = np.abs(own - decoded.per_token_logps).max()
    assert gaps["yarn"] < 1e-4 < gaps["own"], gaps


def test_the_eval_command_takes_them(folder, tmp_path, capsys):
    problems = tmp_path / "mine.jsonl"
    problems.write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + "\n")
    output = tmp_path / "run.json"
    command = ["eval", "--model", str(folder), "--dataset", str(problems), "--output", str(output), "--k", "2"]
    assert main([*command, "--rope_parameters", json.dumps(TINY), "--max_completion_length", "5"]) == 0
    assert json.loads(json.loads(output.read_text())["settings"]["rope_parameters"]) == TINY
    assert main([*command, "--rope-parameters", "1.5"]) == 2
    assert "`rope_type` is 'yarn'" in capsys.readouterr().err
