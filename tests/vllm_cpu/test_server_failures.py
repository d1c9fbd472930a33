"""The served engine against a stand-in for vLLM that fails as it is told to."""

import time

import numpy as np
import pytest
from server_helpers import FakeServer, connect, free_port
from vllm_helpers import needs_vllm

from trl_ulorl.rollout import vllm_client, vllm_server
from trl_ulorl.rollout.engine import DecodeRequest
from trl_ulorl.rollout.vllm_client import ServedEngine

pytestmark = needs_vllm
REQUEST = DecodeRequest(np.arange(4, 14, dtype=np.int32), 30)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(vllm_client, "_RETRY_SECONDS", (0.02, 0.02, 0.02))
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def engine(fake, tmp_path):
    return ServedEngine(connect(fake.base_url, tmp_path), sync_weights=lambda: None, eos_token_ids=[3])


def assert_continues(segment, num_tokens):
    """Check that a segment is what the stand-in sends for consecutive positions after `REQUEST`."""
    positions = np.arange(10, 10 + num_tokens)
    assert segment.token_ids.tolist() == (4 + positions % 7).tolist()
    assert segment.per_token_logps.tolist() == (-positions / 64).tolist()


# --------------------------------------------------------------------------------------------- requests that are broken


@pytest.mark.parametrize(
    "script", [[("break", 7)], [("break", 0), ("status", 503), ("break", 29)], [("break", 30)], [("status", 500)] * 3]
)
def test_a_broken_request_goes_on_from_what_has_arrived(fake, engine, script):
    fake.script.extend(script)
    (segment,) = engine.decode([REQUEST])
    assert_continues(segment, 30)
    assert not segment.is_stopped
    for body in fake.requests:
        assert len(body["prompt"]) + body["max_tokens"] == 40


def test_a_request_that_keeps_breaking_fails_after_handing_out_what_has_arrived(fake, engine):
    fake.script.extend([("break", 3)] + [("break", 0)] * 3)
    segments = engine.decode([REQUEST])
    assert_continues(next(segments), 3)
    with pytest.raises(RuntimeError, match=r"does not answer .* after 3 further tries.*resume the run"):
        next(segments)
    assert len(fake.requests) == 4


def test_others_that_have_ended_are_handed_out_before_a_failure(fake, engine):
    fake.script.append(("status", 400))
    with engine.stream() as stream:
        stream.submit(0, REQUEST)
        while stream._failure is None:
            time.sleep(0.01)
        stream.submit(1, REQUEST)
        with pytest.raises(RuntimeError, match="HTTP 400"):
            while not (ended := stream.step()):
                pass
            assert_continues(ended[0], 30)
            stream.step()


def test_a_server_that_falls_silent_is_asked_again(fake, tmp_path):
    generation = connect(fake.base_url, tmp_path, server_timeout=1)
    engine = ServedEngine(generation, sync_weights=lambda: None, eos_token_ids=[3])
    fake.script.append(("silent", 0))
    (segment,) = engine.decode([REQUEST])
    assert_continues(segment, 30)
    fake.script.extend([("silent", 0)] * 4)
    with pytest.raises(RuntimeError, match="does not answer"):
        list(engine.decode([REQUEST]))


def test_a_server_that_is_gone_fails_soon(fake, engine):
    fake.close()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="does not answer"):
        list(engine.decode([REQUEST]))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("status", 400), "refused a request .*told to"),
        (("length", 5), "25 tokens before its budget .*--generation-config vllm"),
        (("null", 2), "1 tokens with the log-probabilities .*null.* forward pass broke down"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(fake, engine, entry, message):
    fake.script.append(entry)
    with pytest.raises(RuntimeError, match=message):
        list(engine.decode([REQUEST]))
    assert len(fake.requests) == 1


# -------------------------------------------------------------------------------------------------- restarts and weights


def test_a_restarted_server_is_noticed_before_it_decodes(fake, engine):
    fake.instance_id = "2"
    with pytest.raises(RuntimeError, match=r"was restarted .*Resume the run from its last checkpoint"):
        list(engine.decode([REQUEST]))
    assert not fake.requests


def test_a_server_that_restarts_in_mid_round_decodes_nothing_more(fake, engine):
    fake.script.append(("break", 4))
    segments = engine.decode([REQUEST])
    receive = vllm_client.ServedStream._receive

    def receive_and_restart(stream, *args):
        fake.instance_id = "2"
        return receive(stream, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_client.ServedStream, "_receive", receive_and_restart)
        assert_continues(next(segments), 4)
        with pytest.raises(RuntimeError, match="was restarted"):
            next(segments)
    assert len(fake.requests) == 1


def test_a_restarted_server_is_given_the_weights_of_the_next_sync(fake, tmp_path):
    generation = connect(fake.base_url, tmp_path)
    engine = ServedEngine(generation, sync_weights=generation.sync_weights, eos_token_ids=[3])
    fake.instance_id = "2"
    (segment,) = engine.decode([REQUEST])
    assert_continues(segment, 30)


def test_weights_that_the_server_cannot_read(fake, tmp_path):
    generation = connect(fake.base_url, tmp_path)
    fake.can_reload = False
    with pytest.raises(
        RuntimeError, match=r"Cannot find any model weights.*`output_dir` to a folder that both can read"
    ):
        generation.sync_weights()


def test_the_prefix_cache_must_really_be_dropped(fake, tmp_path, monkeypatch):
    generation = connect(fake.base_url, tmp_path)
    fake.resets = [False, False, True]
    generation.sync_weights()
    monkeypatch.setattr(vllm_server, "_RESET_SECONDS", 0.2)
    fake.resets = [False]
    with pytest.raises(RuntimeError, match=r"kept keys and values .*belongs to one run"):
        generation.sync_weights()


# ----------------------------------------------------------------------------------------------------------- the start


def test_an_absent_server(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=r"within `vllm_server_timeout` \(1 s\).*`vllm_server_base_url`"):
        connect(url, tmp_path, server_timeout=1)


def test_a_server_without_development_endpoints(fake, tmp_path):
    fake.has_dev_mode = False
    with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
        connect(fake.base_url, tmp_path)


def test_an_address_with_a_slash_at_its_end(fake, tmp_path):
    assert connect(f"{fake.base_url}/", tmp_path).base_url == fake.base_url


@pytest.mark.parametrize(("mode", "temperature"), [("raw_logprobs", 0.85), ("processed_logits", 1.0)])
def test_log_probs_of_another_distribution(fake, tmp_path, mode, temperature):
    fake.model_config["logprobs_mode"] = mode
    with pytest.raises(ValueError, match="Restart it with `--logprobs-mode processed_logprobs`"):
        connect(fake.base_url, tmp_path, temperature=temperature)


def test_raw_log_probs_are_the_same_at_temperature_one(fake, tmp_path):
    fake.model_config["logprobs_mode"] = "raw_logprobs"
    connect(fake.base_url, tmp_path, temperature=1.0)


@pytest.mark.parametrize("inspection", ["embedding_dim=64, org_vocab_size=103", "embedding_dim=128, org_vocab_size=7"])
def test_a_model_of_another_shape(fake, tmp_path, inspection):
    fake.inspection = inspection
    with pytest.raises(ValueError, match="Restart the server with the policy's model"):
        connect(fake.base_url, tmp_path)


def test_other_rotary_positions(fake, tmp_path):
    fake.inspection += (
        " RotaryEmbedding(head_size=16, rotary_dim=16, max_position_embeddings=512, base=5.0, is_neox_style=True)"
    )
    with pytest.raises(ValueError, match=r"base 5, .*`--hf-overrides` '\{\"rope_parameters\": \{"):
        connect(fake.base_url, tmp_path)


def test_a_server_for_short_sequences(fake, tmp_path):
    fake.model_config["max_model_len"] = 64
    with pytest.raises(ValueError, match="--max-model-len"):
        connect(fake.base_url, tmp_path, max_completion_length=64)
