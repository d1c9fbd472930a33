"""The colocated engine on a real vLLM: fresh weights, no stale cache, and every token accounted for."""

import inspect

import numpy as np
import pytest
import torch
from vllm_helpers import TOLERANCE, gaps_after_updates, largest_gap, make_requests, make_trainer, needs_vllm

from trl_ulorl.rollout.engine import DecodeRequest

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("run"))


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


# ------------------------------------------------------------------------------------------------ weights and cache


def test_sampled_logps_are_the_trainers_after_every_update(trainer):
    gaps = gaps_after_updates(trainer)
    assert len(gaps) == 5
    assert max(gaps) < TOLERANCE, gaps


def test_weights_that_were_not_loaded_are_noticed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: None)
    gaps = gaps_after_updates(trainer)
    assert min(gaps) > TOLERANCE, gaps


def test_keys_and_values_of_older_weights_are_noticed(trainer, monkeypatch):
    monkeypatch.setattr(trainer.vllm_generation.llm, "reset_prefix_cache", lambda: True)
    gaps = gaps_after_updates(trainer)
    assert max(gaps) > TOLERANCE, gaps


def test_prefixes_are_reused_within_a_version_only(trainer, engine, monkeypatch):
    trainer.vllm_generation.sync_weights()
    requests = make_requests(trainer, max_new_tokens=1)

    def count():
        cached, prefilled = engine.num_cached_tokens, engine.num_prefilled_tokens
        assert len(list(engine.decode(requests))) == len(requests)
        cached, prefilled = engine.num_cached_tokens - cached, engine.num_prefilled_tokens - prefilled
        assert cached + prefilled == sum(request.token_ids.size for request in requests)
        return cached

    count()
    assert count() > 0
    monkeypatch.setattr(trainer, "_last_loaded_step", -1)
    assert count() == 0


def test_weights_are_loaded_once_a_version_and_also_without_requests(trainer, engine, monkeypatch):
    loads = []
    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda: loads.append(trainer.state.global_step))
    monkeypatch.setattr(trainer, "_last_loaded_step", -1)
    assert list(engine.decode([])) == []
    list(engine.decode(make_requests(trainer, 2)))
    with engine.stream():
        pass
    assert loads == [trainer.state.global_step]


def test_an_update_while_sequences_decode_is_refused(trainer, engine):
    with engine.stream() as stream:
        stream.submit(0, make_requests(trainer, 1)[0])
        stream.step()
        with pytest.raises(RuntimeError, match=r"kept keys and values of the old weights.*Leave the engine's `stream"):
            trainer.vllm_generation.sync_weights()


# ------------------------------------------------------------------------------------------------------- decoding


def test_each_sequence_keeps_its_budget_and_ends_with_its_stop(trainer, engine):
    requests = [DecodeRequest(r.token_ids, 1 + 4 * index) for index, r in enumerate(make_requests(trainer))]
    segments = sorted(engine.decode(requests), key=lambda segment: segment.request_index)
    assert [segment.request_index for segment in segments] == list(range(len(requests)))
    for request, segment in zip(requests, segments, strict=True):
        is_eos = np.isin(segment.token_ids, trainer.eos_token_ids)
        assert segment.token_ids.dtype == np.int32
        assert segment.per_token_logps.dtype == np.float32
        assert segment.per_token_logps.shape == segment.token_ids.shape
        assert not is_eos[:-1].any()
        assert segment.is_stopped == is_eos[-1]
        assert len(segment.token_ids) == request.max_new_tokens or segment.is_stopped
    assert {segment.is_stopped for segment in segments} == {True, False}
    assert largest_gap(trainer, requests, segments) < TOLERANCE


def test_segments_continue_as_if_never_cut(trainer, engine, greedy):
    requests = make_requests(trainer)
    whole = completions(engine.decode(requests))
    assert len({len(ids) for ids in whole.values()}) > 3
    done = {index: [] for index in range(len(requests))}
    unfinished = set(done)
    while unfinished:
        indices = sorted(unfinished)
        rest = [further(requests[index], done[index]) for index in indices]
        segments = engine.decode([DecodeRequest(r.token_ids, min(r.max_new_tokens, 11)) for r in rest])
        for segment in segments:
            index = indices[segment.request_index]
            done[index] += segment.token_ids.tolist()
            if segment.is_stopped or len(done[index]) == requests[index].max_new_tokens:
                unfinished.discard(index)
    assert done == whole


@pytest.mark.parametrize("seed", range(3))
def test_an_interruption_loses_no_token(trainer, engine, greedy, seed):
    """Sequences come and go, and all are stopped and taken up again at random points."""
    rng = np.random.default_rng(seed)
    requests = make_requests(trainer)
    whole = completions(engine.decode(requests))
    done = {index: [] for index in range(len(requests))}
    waiting = list(done)
    with engine.stream() as stream:
        while waiting:
            running = waiting[: int(rng.integers(1, len(waiting) + 1))]
            waiting = waiting[len(running) :]
            for index in running:
                stream.submit(index, further(requests[index], done[index]))
            ended = set()
            for _ in range(int(rng.integers(1, 20))):
                if len(ended) == len(running):
                    break
                for segment in stream.step():
                    ended.add(segment.request_index)
                    done[segment.request_index] += segment.token_ids.tolist()
            for segment in stream.interrupt():
                assert segment.request_index not in ended
                done[segment.request_index] += segment.token_ids.tolist()
            waiting += [index for index in running if index not in ended]
        assert stream.num_steps >= max(map(len, whole.values()))
    assert done == whole


def test_what_is_interrupted_has_its_logps(trainer, engine):
    requests = make_requests(trainer)
    with engine.stream() as stream:
        for index, request in enumerate(requests):
            stream.submit(index, request)
        ended = [segment for _ in range(7) for segment in stream.step()]
        stream.submit(len(requests), requests[0])  # which gets no token
        segments = ended + stream.interrupt()
        assert stream.num_running == 0
        assert stream.interrupt() == []
    assert len(segments) == len(requests)
    assert max(len(segment.token_ids) for segment in segments) == 7
    assert largest_gap(trainer, requests, segments) < TOLERANCE


def test_a_stream_left_in_an_error_leaves_vllm_clean(trainer, engine, greedy):
    requests = make_requests(trainer)
    whole = completions(engine.decode(requests))
    with pytest.raises(KeyError), engine.stream() as stream:
        stream.submit(0, requests[0])
        stream.step()
        raise KeyError
    half_read = engine.decode(requests)
    next(half_read)
    half_read.close()
    assert not trainer.vllm_generation.llm.llm_engine.has_unfinished_requests()
    assert trainer.vllm_generation.llm.reset_prefix_cache()
    assert completions(engine.decode(requests)) == whole


def test_a_request_that_does_not_fit_is_refused_before_anything_is_decoded(trainer, engine):
    short, long = make_requests(trainer, 2)
    requests = [short, DecodeRequest(long.token_ids, 512 - long.token_ids.size + 1)]
    with pytest.raises(ValueError, match=r"beyond the 512 tokens .* Raise `vllm_max_model_length`"):
        next(engine.decode(requests))
    with engine.stream() as stream, pytest.raises(ValueError, match="beyond the 512 tokens"):
        stream.submit(0, requests[1])
    assert not trainer.vllm_generation.llm.llm_engine.has_unfinished_requests()


def test_logps_that_are_no_numbers_are_refused(trainer, engine, monkeypatch):
    with torch.no_grad():
        parameter = trainer.model.model.norm.weight
        kept = parameter.clone()
        parameter.fill_(float("nan"))
    monkeypatch.setattr(trainer, "_last_loaded_step", -1)
    try:
        with pytest.raises(RuntimeError, match=r"0 finite log-probabilities\. NaN means that the forward pass broke"):
            list(engine.decode(make_requests(trainer, 1)))
    finally:
        with torch.no_grad():
            parameter.copy_(kept)
        trainer._last_loaded_step = -1


# ------------------------------------------------------------------------------------------------------ the trainer


def test_what_is_leaned_on_in_vllm_is_there(trainer):
    """Beside what the other tests run through: names and orders of arguments, and vLLM's books of its requests."""
    llm = trainer.vllm_generation.llm
    engine, runner = llm.llm_engine, llm.llm_engine.model_executor.driver_worker.model_runner
    assert list(inspect.signature(engine.add_request).parameters)[:3] == ["request_id", "prompt", "params"]
    assert "request_ids" in inspect.signature(engine.abort_request).parameters
    assert list(inspect.signature(engine.step).parameters) == []
    assert "weights_iterator" in inspect.signature(runner.reload_weights).parameters
    assert callable(llm.reset_prefix_cache) and callable(engine.engine_core.shutdown)
    with trainer.rollout_engine.stream() as stream:
        stream.submit(0, make_requests(trainer, 1)[0])
        (state,) = engine.output_processor.request_states.values()
        assert state.queue is None
    assert not engine.output_processor.request_states


def test_vllm_is_started_for_the_rollouts_in_flight_in_the_policys_precision(trainer):
    config = trainer.vllm_generation.llm.llm_engine.vllm_config
    assert config.model_config.dtype == torch.float32
    # Four batches of 32 in flight, where TRL would make room for one.
    assert config.scheduler_config.max_num_seqs == trainer.args.sequences_per_engine == 4 * 32
    assert config.cache_config.enable_prefix_caching


def test_trls_own_evaluation_runs_on_the_same_engine(trainer):
    metrics = trainer.evaluate()
    assert 0 <= metrics["eval_reward"] <= 1
    assert metrics["eval_completions/mean_length"] > 1
