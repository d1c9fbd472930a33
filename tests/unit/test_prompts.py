"""The stream of prompts: every row once an epoch, in an order that the seed and the position fix."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ulorl.rollout.prompts import PromptStream

fuzz = settings(derandomize=True, max_examples=60)
counts = st.lists(st.integers(0, 7), max_size=8)


@fuzz
@given(st.integers(1, 9), st.integers(0, 2**32), st.booleans(), counts)
def test_each_epoch_visits_every_row_once(num_rows, seed, shuffle, counts):
    stream = PromptStream(num_rows, seed=seed, shuffle=shuffle)
    rows = []
    for count in counts:
        taken = stream.take(count)
        assert len(taken) == count and all(type(row) is int for row in taken)
        rows += taken
        assert stream.epoch == pytest.approx(len(rows) / num_rows)
    whole = PromptStream(num_rows, seed=seed, shuffle=shuffle).take(len(rows))
    assert rows == whole  # however they were asked for
    for start in range(0, len(rows), num_rows):
        epoch = rows[start : start + num_rows]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(num_rows))
        assert shuffle or epoch == list(range(len(epoch)))


@fuzz
@given(st.integers(1, 9), st.booleans(), st.integers(0, 30), st.integers(0, 30))
def test_state_continues_exactly(num_rows, shuffle, before, after):
    stream = PromptStream(num_rows, seed=3, shuffle=shuffle)
    stream.take(before)
    resumed = PromptStream(num_rows, seed=3, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert resumed.epoch == stream.epoch
    assert resumed.take(after) == stream.take(after)


def test_epochs_and_seeds_have_orders_of_their_own():
    stream = PromptStream(50, seed=1)
    first, second = stream.take(50), stream.take(50)
    assert first != second and first != sorted(first)
    assert PromptStream(50, seed=2).take(50) not in (first, second)
    assert PromptStream(50, seed=1).take(50) == first


@pytest.mark.parametrize("num_rows", [0, -1])
def test_empty_data_set_is_refused(num_rows):
    with pytest.raises(ValueError, match=f"has {num_rows} rows: at least one prompt is needed. Check its filters"):
        PromptStream(num_rows, seed=0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_rows": 6}, "saved with num_rows=5, but this run has num_rows=6"),
        ({"seed": 1}, "saved with seed=0, but this run has seed=1"),
        ({"shuffle": False}, "saved with shuffle=1, but this run has shuffle=0"),
        ({"num_rows": 4, "seed": 9}, "saved with num_rows=5, seed=0, but this run has num_rows=4, seed=9"),
    ],
)
def test_state_of_another_stream_is_refused(other, message):
    saved = PromptStream(5, seed=0)
    saved.take(3)
    stream = PromptStream(**{"num_rows": 5, "seed": 0, "shuffle": True, **other})
    expected = PromptStream(**{"num_rows": 5, "seed": 0, "shuffle": True, **other}).take(4)
    with pytest.raises(
        ValueError, match=f"{message}.*Resume with the same training set, `seed` .* and `shuffle_dataset`"
    ):
        stream.load_state_dict(saved.state_dict())
    assert stream.take(4) == expected  # a refused state changes nothing
