"""The served engine on a real vLLM server: the same tokens, fresh weights, and failures that lose nothing."""

import time

import numpy as np
import pytest
from conftest import make_model
from server_helpers import MAX_MODEL_LEN, connect, running_server
from test_colocated_ranks import run_two_ranks
from vllm_helpers import TOLERANCE, gaps_after_updates, largest_gap, make_requests, make_trainer, needs_vllm

from trl_ulorl.rollout import vllm_client
from trl_ulorl.rollout.engine import DecodeRequest

pytestmark = needs_vllm
EOS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def make_served_trainer(server, folder, **overrides):
    return make_trainer(
        folder, vllm_mode="server", vllm_server_base_url=server.base_url, vllm_server_timeout=60, **overrides
    )


@pytest.fixture(scope="module")
def trainer(server, tmp_path_factory):
    return make_served_trainer(server, tmp_path_factory.mktemp("run"), max_steps=3)


@pytest.fixture
def engine(trainer):
    return trainer.rollout_engine


@pytest.fixture
def greedy(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "temperature", 0.0)


def completions(segments):
    return {segment.request_index: segment.token_ids.tolist() for segment in segments}


def further(request, done):
    """Return the request that continues `request` after the tokens `done`."""
    ids = np.concatenate([request.token_ids, np.asarray(done, dtype=np.int32)])
    return DecodeRequest(ids, request.max_new_tokens - len(done))


# ------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.usefixtures("greedy")
def test_greedy_segments_equal_one_shot(trainer, engine):
    requests = make_requests(trainer)
    whole = completions(engine.decode(requests))
    done = {index: [] for index in range(len(requests))}
    for _ in range(4):
        open_ = [i for i, ids in done.items() if len(ids) < 64 and ids[-1:] != [trainer.eos_token_ids[0]]]
        parts = [further(requests[i], done[i]) for i in open_]
        for part in engine.decode([DecodeRequest(p.token_ids, min(16, p.max_new_tokens)) for p in parts]):
            done[open_[part.request_index]] += part.token_ids.tolist()
    assert done == whole


@pytest.mark.usefixtures("greedy")
def test_greedy_decoding_interrupted_anywhere_equals_one_shot(trainer, engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_token_ids", frozenset())  # so that every sequence can be interrupted
    requests = make_requests(trainer, max_new_tokens=150)
    whole = completions(engine.decode(requests))
    rng = np.random.default_rng(0)
    done = {index: [] for index in range(len(requests))}
    num_interrupted = 0
    while open_ := [i for i, ids in done.items() if len(ids) < 150]:
        with engine.stream() as stream:
            for index in open_:
                stream.submit(index, further(requests[index], done[index]))
            segments = []
            for _ in range(int(rng.integers(1, 6))):
                if len(segments) < len(open_):
                    segments += stream.step()
            interrupted = stream.interrupt()
        num_interrupted += len(interrupted)
        for segment in segments + interrupted:
            assert segment.token_ids.size == segment.per_token_logps.size > 0
            done[segment.request_index] += segment.token_ids.tolist()
    assert num_interrupted > 0
    assert done == whole


def test_an_interruption_brings_what_the_server_kept_for_its_next_message(trainer, engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_token_ids", frozenset())
    monkeypatch.setattr(vllm_client, "_STREAM_INTERVAL", 10_000)  # after the first token the server sends nothing
    with engine.stream() as stream:
        for index, request in enumerate(make_requests(trainer, max_new_tokens=200)):
            stream.submit(index, request)
        stream.step()
        time.sleep(0.2)
        assert max(segment.token_ids.size for segment in stream.interrupt()) > 1


def test_budgets_and_stops_are_kept_and_logps_are_the_models(trainer, engine):
    requests = [
        DecodeRequest(request.token_ids, budget)
        for request, budget in zip(make_requests(trainer), [1, 2, 5, 17, 33, 64, 120, 200] * 2, strict=True)
    ]
    segments = list(engine.decode(requests))
    assert sorted(segment.request_index for segment in segments) == list(range(len(requests)))
    for segment in segments:
        budget = requests[segment.request_index].max_new_tokens
        assert segment.token_ids.dtype == np.int32 and segment.per_token_logps.dtype == np.float32
        assert segment.token_ids.size == segment.per_token_logps.size
        is_eos = np.isin(segment.token_ids, trainer.eos_token_ids)
        assert segment.is_stopped == is_eos[-1]
        assert not is_eos[:-1].any()
        assert segment.token_ids.size == budget or (segment.is_stopped and segment.token_ids.size < budget)
    assert any(segment.is_stopped for segment in segments)
    assert largest_gap(trainer, requests, segments) < TOLERANCE


def test_more_sequences_than_the_server_runs_at_once_all_end(trainer, engine):
    requests = make_requests(trainer) * 20  # the server runs 64 side by side
    segments = list(engine.decode([DecodeRequest(request.token_ids[-30:], 8) for request in requests]))
    assert len({segment.request_index for segment in segments}) == len(requests) == 320


def test_steps_count_the_tokens_of_the_fastest_sequence(trainer, engine, monkeypatch):
    monkeypatch.setattr(engine, "_eos_token_ids", frozenset())
    request = make_requests(trainer, count=1)[0]
    with engine.stream() as stream:
        for key, budget in ((0, 40), (1, 20)):
            stream.submit(key, DecodeRequest(request.token_ids, budget))
        num_ended = 0
        while num_ended < 2:
            num_ended += len(stream.step())
        assert stream.num_steps == 40
        stream.submit(2, DecodeRequest(request.token_ids, 10))
        while not stream.step():
            pass
        assert stream.num_steps == 50


def test_a_request_beyond_the_servers_length_is_refused(trainer, engine):
    with engine.stream() as stream, pytest.raises(ValueError, match="--max-model-len"):
        stream.submit(0, DecodeRequest(np.zeros(MAX_MODEL_LEN, dtype=np.int32), 1))


# -------------------------------------------------------------------------------------------------------------- weights


def test_sampled_logps_are_the_trainers_after_every_update(trainer):
    gaps = gaps_after_updates(trainer)
    assert len(gaps) == 3
    assert max(gaps) < TOLERANCE, gaps
    assert trainer.ledger()["groups"]["trained"] == 12
    folders = list(trainer.vllm_generation._weights_root.iterdir())
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [
        ["config.json", "model.safetensors"]
    ]


def test_weights_that_were_not_loaded_are_noticed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    gaps = gaps_after_updates(trainer)
    assert max(gaps) > TOLERANCE, gaps


def test_keys_and_values_of_older_weights_are_noticed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "_drop_prefix_cache", lambda: None)
    gaps = gaps_after_updates(trainer)
    assert max(gaps) > TOLERANCE, gaps


# -------------------------------------------------------------------------------------------------------------- trainer


def test_the_continuous_schedule_trains_and_evaluates(server, tmp_path):
    trainer = make_served_trainer(server, tmp_path, max_steps=3, rollout_schedule="continuous")
    gaps = gaps_after_updates(trainer)
    assert max(gaps) < TOLERANCE, gaps
    groups = trainer.ledger()["groups"]
    assert groups["trained"] == 12
    assert np.isfinite(trainer.evaluate()["eval_reward"])


def test_two_ranks_stream_their_own_rollouts(server, tmp_path):
    first, second = run_two_ranks(
        tmp_path,
        vllm_mode="server",
        vllm_server_base_url=server.base_url,
        rollout_schedule="continuous",
        per_device_train_batch_size=16,
    )
    assert first["parameters"] == second["parameters"]
    assert first["ledger"] == second["ledger"]
    assert first["ledger"]["groups"]["trained"] == 2 * 4
    assert max(first["gaps"] + second["gaps"]) < TOLERANCE


def test_another_model_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match=r"a vocabulary of 103, but .* Restart the server with the policy's model"):
        connect(server.base_url, tmp_path, model=make_model())


def test_a_server_for_shorter_sequences_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match=r"leaves no room for a prompt .*--max-model-len"):
        connect(server.base_url, tmp_path, max_completion_length=MAX_MODEL_LEN)
    with pytest.raises(ValueError, match=r"The prompt in row .*--max-model-len"):
        make_served_trainer(server, tmp_path, max_completion_length=MAX_MODEL_LEN - 4)


def test_a_server_that_dies_in_mid_round_loses_no_rollout(tmp_path, monkeypatch):
    with running_server(tmp_path) as server:
        trainer = make_served_trainer(server, tmp_path, max_steps=3, max_completion_length=256, num_segments=2)
        trainer.rollout_engine._eos_token_ids = frozenset()  # every rollout has two segments
        step = vllm_client.ServedStream.step
        num_calls = 0

        def dying_step(stream):
            nonlocal num_calls
            num_calls += 1
            if num_calls == 4:
                server.kill()
            return step(stream)

        monkeypatch.setattr(vllm_client.ServedStream, "step", dying_step)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"does not answer.*resume the run from its last checkpoint"):
            trainer.train()
        assert time.monotonic() - started < 60
    ledger = trainer.ledger()
    assert ledger["groups"]["admitted"] == ledger["groups"]["unfinished"] > 0
    assert ledger["tokens"]["generated"] == ledger["tokens"]["held"] > 0
