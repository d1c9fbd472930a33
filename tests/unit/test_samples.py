"""Sample completions: joined they are the text, borders are where segments end, and the file stays small."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_ulorl.records import _rollout_record, read_lines
from trl_ulorl.rollout.pool import Finish, Outcome, RolloutGroup, Segment
from trl_ulorl.run_record import public_settings
from trl_ulorl.samples import MAX_CHARACTERS, MAX_SAMPLES, SHOWN_TOKENS, SampleLog, segment_parts, shortened


def decode(ids):
    """A byte is a token, as in the tokenizers of most models where a character is rare."""
    return bytes(ids).decode("utf-8", errors="replace")


def group_of(group_id, *lengths, rewards=None, version=0, segment=64):
    group = RolloutGroup.start(
        group_id=group_id,
        row_index=group_id,
        prompt_ids=[80],
        max_length=10**6,
        admitted_version=0,
        num_generations=len(lengths),
    )
    for rollout, length, reward in zip(group.rollouts, lengths, rewards or [1.0] * len(lengths), strict=True):
        for start in range(0, length, segment):
            size = min(segment, length - start)
            finish = Finish.EOS if start + size == length else None
            rollout.extend(Segment.from_values([97] * size, [-0.5] * size, version), finish)
        rollout.rewards = np.array([reward], dtype=np.float32)
    return group


def log_in(path, **settings):
    row = {"prompt": [{"role": "user", "content": "2+2="}], "answer": 4}
    settings = {
        "is_enabled": True,
        "decode": decode,
        "read_row": lambda index: row,
        "correctness_index": 0,
        **settings,
    }
    return SampleLog(path / "_samples.json", **settings)


def samples_in(path):
    return json.loads((path / "_samples.json").read_text())["samples"]


@given(st.text(max_size=300), st.lists(st.integers(0, 600), max_size=6))
def test_parts_of_a_short_completion_join_to_its_text(text, cuts):
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
    pieces = [piece for piece in np.split(ids, sorted(min(cut, len(ids)) for cut in cuts)) if piece.size]
    parts = segment_parts(pieces, decode)
    if len(ids) * len(pieces) <= SHOWN_TOKENS:
        assert all(isinstance(part, str) for own in parts for part in own)
        assert "".join(part for own in parts for part in own) == text
    assert len(parts) == len(pieces)


def test_a_character_on_a_border_goes_to_the_later_segment():
    ids = np.frombuffer("aé€b".encode(), dtype=np.uint8).astype(np.int32)  # 1 + 2 + 3 + 1 bytes
    assert segment_parts([ids[:2], ids[2:5], ids[5:]], decode) == [["a"], ["é"], ["€b"]]
    assert segment_parts([ids[:5]], decode) == [["aé�"]]  # what ends in a part of a character


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_tokens_shown_and_left_out_are_all_tokens(lengths):
    parts = segment_parts([np.full(length, 97, dtype=np.int32) for length in lengths], decode)
    counts = [sum(part if isinstance(part, int) else len(part) for part in own) for own in parts]
    assert counts == lengths
    shown = sum(len(part) for own in parts for part in own if isinstance(part, str))
    assert shown <= SHOWN_TOKENS
    for own, length in zip(parts, lengths, strict=True):  # both sides of a border are there
        assert isinstance(own[0], str) and isinstance(own[-1], str) and own[0] and own[-1]
        assert length <= SHOWN_TOKENS / len(lengths) or len(own) == 3


def test_a_sample_is_the_longest_group_of_a_version_and_its_telling_rollouts(tmp_path):
    log = log_in(tmp_path)
    log.offer(group_of(0, 10, 20), Outcome.TRAINED, 5)
    log.offer(group_of(1, 100, 70, 90, 2, rewards=[0.0, 1.0, 1.0, 0.0]), Outcome.TRAINED, 5)
    log.offer(group_of(2, 50, 60), Outcome.TRAINED, 5)
    log.offer(group_of(3, 999), Outcome.FILTERED, 5)
    log.save()
    (sample,) = samples_in(tmp_path)
    assert {name: sample[name] for name in ("group", "row", "left", "question", "prompt", "reference")} == {
        "group": 1,
        "row": 1,
        "left": 5,
        "question": "2+2=",
        "prompt": "P",
        "reference": "4",
    }
    assert [(r["rewards"], [s["tokens"] for s in r["segments"]]) for r in sample["rollouts"]] == [
        ([1.0], [64, 26]),
        ([0.0], [64, 36]),
        ([0.0], [2]),
    ]


def test_a_later_batch_of_the_same_update_may_have_the_longest_group(tmp_path):
    log = log_in(tmp_path)
    for group, tokens in enumerate((10, 30, 20)):
        log.offer(group_of(group, tokens), Outcome.TRAINED, 5)
        log.save()
    assert [(sample["group"], sample["left"]) for sample in samples_in(tmp_path)] == [(1, 5)]


def test_undecided_rollouts_are_neither_right_nor_wrong(tmp_path):
    log = log_in(tmp_path)
    log.offer(group_of(0, 3, 5, rewards=[float("nan"), 1.0]), Outcome.TRAINED, 0)
    log.save()
    assert [r["rewards"] for r in samples_in(tmp_path)[0]["rollouts"]] == [[1.0], [None]]


def test_the_file_stays_small_however_long_the_run_is(tmp_path):
    log = log_in(tmp_path)
    for version in range(300):
        log.offer(
            group_of(version, 8192, 4096, 70_000 if version % 50 == 0 else 64, segment=4096), Outcome.TRAINED, version
        )
        log.save()
    kept = [sample["left"] for sample in samples_in(tmp_path)]
    assert MAX_SAMPLES // 2 <= len(kept) <= MAX_SAMPLES
    assert set(np.diff(kept)) == {8}  # evenly spread over the whole run
    assert kept[0] == 0 and kept[-1] > 300 - 8 - 1
    assert (tmp_path / "_samples.json").stat().st_size < 1_500_000


def test_a_resumed_run_goes_on_with_the_samples_of_before(tmp_path):
    whole = log_in(tmp_path)
    for version in range(100):
        whole.offer(group_of(version, 5), Outcome.TRAINED, version)
        whole.save()
    expected = samples_in(tmp_path)
    first = log_in(tmp_path)
    for version in range(60):
        first.offer(group_of(version, 5), Outcome.TRAINED, version)
        first.save()
    resumed = log_in(tmp_path)
    resumed.go_back_to(50)
    for version in range(50, 100):
        resumed.offer(group_of(version, 5), Outcome.TRAINED, version)
        resumed.save()
    assert samples_in(tmp_path) == expected


def test_a_damaged_file_does_not_stop_a_resume(tmp_path, caplog):
    (tmp_path / "_samples.json").write_text("{")
    log = log_in(tmp_path)
    log.go_back_to(3)
    assert "begin anew" in caplog.text
    log.offer(group_of(0, 5), Outcome.TRAINED, 3)
    log.save()
    assert len(samples_in(tmp_path)) == 1


def test_nothing_is_written_where_it_is_off(tmp_path):
    log = log_in(tmp_path, is_enabled=False)
    log.go_back_to(1)
    log.offer(group_of(0, 5), Outcome.TRAINED, 0)
    log.save()
    assert not list(tmp_path.iterdir())


@given(st.text(max_size=3 * MAX_CHARACTERS))
def test_shortened_texts_keep_both_ends(text):
    short = shortened(text)
    assert len(short) <= MAX_CHARACTERS + 40
    assert short == text or (short[:900] == text[:900] and short[-900:] == text[-900:])


def test_a_rollouts_record_holds_the_stage_that_was_logged():
    (rollout,) = group_of(0, 3).rollouts
    assert "stage" not in _rollout_record(rollout)
    rollout.logs["verifier_stage"] = "exact"
    assert _rollout_record(rollout)["stage"] == "exact"


def test_settings_are_recorded_without_secrets():
    settings = {
        "hub_token": "<HUB_TOKEN>",
        "model_init_kwargs": {"token": "hf_abc", "dtype": None},
        "vllm_server_base_url": "http://me:pass@host:8000/v1",
        "report_to": ["wandb"],
        "learning_rate": 1e-6,
        "max_staleness": None,
        "num_input_tokens_seen": 3,
        "limit": float("inf"),
        "api_key": None,
    }
    assert public_settings(settings) == {
        "hub_token": "<left out>",
        "model_init_kwargs": {"dtype": None, "token": "<left out>"},
        "vllm_server_base_url": "http://host:8000/v1",
        "report_to": ["wandb"],
        "learning_rate": 1e-6,
        "max_staleness": None,
        "num_input_tokens_seen": 3,
        "limit": "inf",
        "api_key": None,
    }


def test_lines_are_read_up_to_one_that_is_being_written(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n')
    with pytest.raises(ValueError, match="Line 2 of"):
        read_lines(path)
