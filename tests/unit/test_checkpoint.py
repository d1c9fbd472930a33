"""Rollouts in progress go through a checkpoint unchanged, on any number of ranks, and no file can make them other ones.

The engine is simulated and ranks are threads; what a trainer adds is in tests/integration/test_resume.py.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import time

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_collector import (
    Run,
    configurations,
    fuzz,
    packed,
    run_ranks,
)

from trl_ulorl.checkpoints import newest_step
from trl_ulorl.rollout import state
from trl_ulorl.rollout.checkpoint import load_rollout, save_rollout
from trl_ulorl.rollout.collector import Prompt, RolloutStopped
from trl_ulorl.rollout.restore import StepPosition
from trl_ulorl.rollout.schedule import dealt_owners, expected_remaining
from trl_ulorl.rollout.state import Ranks, StateError, StateFormatError, check_whole

WINDOW = {"num_ranks": 1, "per_device_train_batch_size": 4}
LONG = {"num_segments": 4, "cap": 60, "median_length": 40, "groups_per_batch": 3}


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "trl_ulorl")


def ranks_of(run):
    collector = run.collector
    return Ranks(run.exchange, run.rank, collector._num_ranks, collector._ranks_per_engine)


def window_of(run):
    return {**WINDOW, "num_ranks": run.collector._num_ranks}


def buffered_batches(num_batches=2, rows=4):
    return [
        {
            "prompt_ids": torch.full((rows, 2), i),
            "prompt_mask": torch.ones(rows, 2, dtype=torch.int64),
            "completion_ids": torch.arange(rows * 3).view(rows, 3) + i,
            "completion_mask": torch.ones(rows, 3, dtype=torch.int64),
            "advantages": torch.randn(rows),
            "half": torch.randn(rows, 3).bfloat16(),
            "num_items_in_batch": torch.tensor(12.5),
        }
        for i in range(num_batches)
    ]


def save(run, folder, **position):
    position = StepPosition(run.version, **position)
    save_rollout(run.collector, folder, ranks_of(run), position, window_of(run))


def load(run, folder, *, version, **options):
    return load_rollout(run.collector, folder, ranks_of(run), version=version, window=window_of(run), **options)


def resume(resumed, run, folder):
    """Let a fresh run go on where another was saved."""
    position = load(resumed, folder, version=run.version)
    resumed.version, resumed.closed = run.version, list(run.closed)
    resumed.engine.simulated.num_started = run.engine.simulated.num_started
    resumed.engine.sampled.update({serial: list(records) for serial, records in run.engine.sampled.items()})
    return position


def state_of(collector):
    return json.dumps(collector.state_dict()), packed(collector.unfinished.groups), packed(collector.ready.groups)


# --- the same ranks -------------------------------------------------------------------------------------------------


@settings(fuzz, max_examples=15)
@given(configurations(), st.integers(0, 4), st.booleans())
def test_a_restored_run_goes_on_identically(configuration, num_before, is_training):
    """Between two batches, or between two updates on one."""
    run, resumed = Run(**configuration), Run(**configuration)
    for _ in range(num_before):
        run.step()
    position = {"log_bytes": 17}
    if is_training:
        run.engine.version = run.version
        run.collector.collect(run.version)
        position |= {"step": 3, "buffered": buffered_batches()}
    before = state_of(run.collector)
    with tempfile.TemporaryDirectory() as folder:
        save(run, folder, **position)
        loaded = resume(resumed, run, folder)
    assert (loaded.version, loaded.step, loaded.log_bytes) == (run.version, position.get("step", 0), 17)
    for batch, expected in zip(loaded.buffered, position.get("buffered", []), strict=True):
        assert batch.keys() == expected.keys()
        for name, tensor in batch.items():
            assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
    assert state_of(resumed.collector) == state_of(run.collector) == before
    assert packed(resumed.collector.training) == packed(run.collector.training)
    if is_training:
        run.collector.finish_batch(run.version)
        resumed.collector.finish_batch(run.version)
    for _ in range(3):
        assert packed(resumed.step()) == packed(run.step())
        assert resumed.collector.ledger_balance() == run.collector.ledger_balance()
    assert packed(resumed.collector.unfinished.groups) == packed(run.collector.unfinished.groups)


def test_notes_of_reward_functions_survive(tmp_path):
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    rollout = next(r for group in run.collector.unfinished.groups for r in group.rollouts if r.is_finished)
    rollout.logs, rollout.metrics = {"why": "sum is wrong", "at": None}, {"chars": [3.0, 4]}
    save(run, tmp_path)
    resume(resumed, run, tmp_path)
    assert packed(resumed.collector.unfinished.groups) == packed(run.collector.unfinished.groups)


def test_a_finished_rollout_without_rewards_is_scored_after_the_resume(tmp_path):
    """An error in the engine came before its rewards did, and was caught."""
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    rollout = next(r for group in run.collector.unfinished.groups for r in group.rollouts if r.is_finished)
    rollout.rewards = None
    save(run, tmp_path)
    resume(resumed, run, tmp_path)
    for _ in range(3):
        resumed.step()


# --- what is on disk ------------------------------------------------------------------------------------------------


def test_files_and_bytes_per_token(tmp_path):
    long = {"num_segments": 4, "cap": 8000, "median_length": 6000, "groups_per_batch": 16, "num_generations": 8}
    run = Run(**long)
    for _ in range(2):
        run.step()
    save(run, tmp_path)
    folder = tmp_path / "rollout"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "manifest.json",
        "state.json",
        "ledger.json",
        "groups.safetensors",
        "shared.safetensors",
        "rank0.safetensors",
    }
    balance = json.loads((folder / "ledger.json").read_text())
    assert balance == run.collector.ledger_balance()
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert 8 * balance["tokens"]["held"] <= num_bytes <= 8.1 * balance["tokens"]["held"]
    # What the library itself writes is the same arrays.
    tensors = load_file(folder / "rank0.safetensors")
    save_file(tensors, tmp_path / "again.safetensors")
    assert {k: v.tolist() for k, v in load_file(tmp_path / "again.safetensors").items()} == {
        k: v.tolist() for k, v in tensors.items()
    }
    check_whole(tmp_path)


def test_many_short_parts_are_written_in_order(tmp_path):
    rng = np.random.default_rng(0)
    parts = [
        rng.integers(0, 100, size=size, dtype=np.int32)
        for size in [*rng.integers(1, 40_000, size=300), 700_000, 1 << 18, 5]
    ]
    logps = [part.astype(np.float32) for part in parts]
    wide, empty = torch.arange(5, dtype=torch.float64), [np.empty(0, dtype=np.float32)]
    entry = state.write_arrays(tmp_path / "x", {"a": parts, "b": logps, "wide": wide, "empty": empty})
    data = (tmp_path / "x").read_bytes()
    assert entry == {"bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
    tensors = load_file(tmp_path / "x")
    assert np.array_equal(tensors["a"].numpy(), np.concatenate(parts))
    assert np.array_equal(tensors["b"].numpy(), np.concatenate(logps))
    assert torch.equal(tensors["wide"], wide)
    assert tensors["empty"].shape == (0,) and tensors["empty"].dtype == torch.float32


def test_a_newer_state_of_the_same_step_replaces_the_older(tmp_path):
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    save(run, tmp_path)
    run.version -= 1  # decode on for the same step
    run.step()
    save(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout"]
    resume(resumed, run, tmp_path)
    assert state_of(resumed.collector) == state_of(run.collector)


def test_a_kill_between_the_two_renames_leaves_the_older_state(tmp_path):
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    save(run, tmp_path)
    (tmp_path / "rollout").rename(tmp_path / "rollout.old")
    (tmp_path / "rollout.tmp").mkdir()
    resume(resumed, run, tmp_path)
    assert state_of(resumed.collector) == state_of(run.collector)


@pytest.mark.parametrize("name", ["rank0.safetensors", "shared.safetensors", "state.json", "manifest.json"])
def test_a_full_disk_leaves_the_older_state(tmp_path, monkeypatch, name):
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    save(run, tmp_path)
    before = state_of(run.collector)
    saved = {path.name: path.read_bytes() for path in (tmp_path / "rollout").iterdir()}
    part = "_write_json" if name.endswith("json") else "write_arrays"
    write = getattr(state, part)

    def full(path, content):
        if path.name == name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(state, part, full)
    with pytest.raises(OSError, match=r"No space left on device.*no whole checkpoint.*free space"):
        save(run, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "rollout").iterdir()} == saved
    assert not (tmp_path / "rollout.tmp").exists()
    resume(resumed, run, tmp_path)
    assert state_of(resumed.collector) == before


def test_a_full_disk_on_one_rank_ends_the_save_on_all(tmp_path, monkeypatch):
    write = state.write_arrays

    def full(path, arrays):
        if path.name == "rank1.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, arrays)

    def body(run):
        run.step()
        run.exchange({})
        save(run, tmp_path)
        run.exchange({})
        if run.rank == 0:
            monkeypatch.setattr(state, "write_arrays", full)
        run.exchange({})
        with pytest.raises(OSError, match=r"No space left on device.*rank1\.safetensors") as error:
            save(run, tmp_path)
        return str(error.value)

    own, other = completed(run_ranks(2, body, **LONG))
    assert "It failed on rank 1" in own and str(tmp_path) in other
    assert [path.name for path in tmp_path.iterdir()] == ["rollout"]
    check_whole(tmp_path)


# --- other numbers of ranks -----------------------------------------------------------------------------------------


def saved_by(num_ranks, folder, *, num_steps=2, ranks_per_engine=1, **configuration):
    """Run on several ranks and save; returns the runs and what was sampled."""
    sampled = {}

    def body(run):
        for _ in range(num_steps):
            run.step()
            run.exchange({})
        save(run, folder)
        return run

    results = run_ranks(num_ranks, body, sampled=sampled, ranks_per_engine=ranks_per_engine, **configuration)
    return completed(results), sampled


def completed(results):
    """Raise what a rank has raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def unfinished_of(runs):
    groups = sorted((g for run in runs for g in run.collector.unfinished.groups), key=lambda group: group.group_id)
    return packed({group.group_id: group for group in groups}.values())


@settings(fuzz, max_examples=12)
@given(
    configurations(),
    st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (3, 2)]),
    st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    st.booleans(),
)
def test_any_number_of_ranks_takes_up_what_others_saved(configuration, num_ranks, ranks_per_engine, has_slots):
    if has_slots:
        configuration |= {"num_slots": 4, "num_segments": max(2, configuration["num_segments"])}
    (before, after), (old_share, new_share) = num_ranks, ranks_per_engine
    with tempfile.TemporaryDirectory() as folder:
        runs, sampled = saved_by(before * old_share, folder, ranks_per_engine=old_share, **configuration)
        before_ready, num_unfinished = packed(runs[0].collector.ready.groups), len(runs[0].collector._tickets)
        before_unfinished = [unfinished_of([run]) for run in runs]

        def body(run):
            load(run, folder, version=runs[0].version)
            run.version, run.closed = runs[0].version, list(runs[0].closed)
            run.engine.simulated.num_started = 100_000 * (50 + run.rank // new_share)
            if run.is_first:
                run.check_ledger()
            taken_up = packed(run.collector.ready.groups), unfinished_of([run]), len(run.collector.unfinished)
            run.exchange({})
            for _ in range(3):
                run.step()
                run.exchange({})
            return run, *taken_up

        results = run_ranks(after * new_share, body, ranks_per_engine=new_share, sampled=sampled, **configuration)
    completed(results)
    assert all(ready == before_ready for _, ready, _, _ in results)
    assert sum(count for run, _, _, count in results if run.is_first) == num_unfinished
    balances = [run.collector.ledger_balance() for run, *_ in results]
    assert balances == [balances[0]] * len(balances)
    assert balances[0]["groups"]["trained"] == 5 * configuration["groups_per_batch"]
    if before == after and old_share == new_share:
        assert [unfinished for _, _, unfinished, _ in results] == before_unfinished


def test_no_token_changes_on_the_way_to_other_ranks(tmp_path):
    runs, _ = saved_by(2, tmp_path, **LONG)
    for num_ranks in (1, 2, 4):

        def body(run):
            load(run, tmp_path, version=runs[0].version)
            return run

        resumed = run_ranks(num_ranks, body, **LONG)
        assert unfinished_of(resumed) == unfinished_of(runs)
        owners = [{g.group_id for g in run.collector.unfinished.groups} for run in resumed]
        assert sum(map(len, owners)) == len(set.union(*owners)) > 4
        if num_ranks == 4:
            assert all(owners)
        if num_ranks == 2:  # whoever goes on with as many ranks goes on as it was
            assert owners == [{g.group_id for g in run.collector.unfinished.groups} for run in runs]


@settings(fuzz, max_examples=12)
@given(configurations(), st.sampled_from([(1, 1), (2, 2), (2, 1), (2, 3)]), st.integers(1, 12), st.booleans())
def test_a_stop_asked_of_one_rank_stops_all_and_loses_nothing(configuration, num_ranks, num_asked, has_slots):
    """At the end of a round within a step: what is saved there is what is resumed from."""
    if has_slots:
        configuration |= {"num_slots": 4, "num_segments": max(2, configuration["num_segments"])}
    before, after = num_ranks
    sampled = {}

    with tempfile.TemporaryDirectory() as folder:

        def body(run):
            asked = 0

            def should_stop():
                nonlocal asked
                asked += 1
                return run.rank == before - 1 and asked >= num_asked

            run.collector._should_stop = should_stop
            try:
                while True:
                    run.step()
                    run.exchange({})
            except RolloutStopped:
                run.exchange({})
            run.check_ledger()
            run.exchange({})
            save(run, folder)
            return run

        runs = completed(run_ranks(before, body, sampled=sampled, **configuration))

        def going_on(run):
            load(run, folder, version=runs[0].version)
            run.version, run.closed = runs[0].version, list(runs[0].closed)
            run.engine.simulated.num_started = 100_000 * (50 + run.rank)
            run.engine.sampled = sampled
            run.check_ledger()
            run.exchange({})
            for _ in range(2):
                run.step()
                run.exchange({})
            return run.collector.ledger_balance()

        balances = completed(run_ranks(after, going_on, sampled=sampled, **configuration))
    assert balances == [balances[0]] * after


def test_work_is_dealt_by_what_remains():
    assert [expected_remaining(t, 100, 30.0) for t in (0, 20, 50, 80)] == [30.0, 30.0, 50.0, 20.0]
    # 9 | 7; 5 to the second (12), 4 to the first (13), 3 to the second (15), 1 to the first (14)
    assert dealt_owners([4.0, 9.0, 3.0, 5.0, 7.0, 1.0], 2) == [0, 0, 1, 1, 1, 0]
    assert dealt_owners([], 3) == []


@settings(fuzz)
@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(1, 6))
def test_dealt_work_differs_by_one_group_at_most(work, num_owners):
    owners = dealt_owners(work, num_owners)
    totals = [sum(w for w, o in zip(work, owners, strict=True) if o == owner) for owner in range(num_owners)]
    assert max(totals) - min(totals) <= max(work, default=0) + 1e-6


def test_inside_a_batch_other_ranks_are_refused_and_the_batch_can_be_set_aside(tmp_path):
    run = Run(**LONG)
    run.step()
    run.engine.version = run.version
    batch = run.collector.collect(run.version)
    save(run, tmp_path, step=1, buffered=buffered_batches())

    def body(resumed):
        try:
            load(resumed, tmp_path, version=1)
        except StateError as error:
            return str(error)

    for message in run_ranks(2, body, **LONG):
        assert "num_ranks 1, but this run has num_ranks 2" in message
        assert "inside a batch" in message and "`resume_rollout='discard'`" in message

    def discarding(resumed):
        position = load(resumed, tmp_path, version=1, discards=True)
        return position.step, resumed.collector.ledger.discarded, resumed.collector.ledger_balance()

    (step, discarded, balance), again = run_ranks(2, discarding, **LONG)
    assert (step, discarded, balance) == again
    held = run.collector.ledger_balance()
    assert step == 0 and balance["groups"]["ready"] == balance["groups"]["unfinished"] == 0
    assert balance["groups"]["set_aside"] == held["groups"]["ready"] + held["groups"]["unfinished"] > len(batch)
    assert [each["groups"] for each in discarded] == [balance["groups"]["set_aside"]]


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_generations": 3}, r"`num_generations` 2, but this run has 3.*Resume with the same value"),
        ({"cap": 20}, r"`max_completion_length` 40, but this run has 20.*Resume with the same value"),
        (
            {"num_segments": 1},
            r"saved with several segments, but this run has one segment.*Resume with the same value",
        ),
        ({"reward_weights": (1.0, 1.0)}, r"`number of reward functions` 1, but this run has 2"),
        (
            {"seed": 1},
            r"state\.json: The stream .*with seed=0, but this run has seed=1.*Resume with the same training set",
        ),
    ],
)
def test_a_state_of_other_settings_is_refused(tmp_path, changed, message):
    same = {"num_segments": 4, "cap": 40}
    run = Run(**same)
    run.step()
    save(run, tmp_path)
    with pytest.raises(StateError, match=message) as error:
        load(Run(**{**same, **changed}), tmp_path, version=1)
    assert str(tmp_path) in str(error.value) and "resume_rollout='discard'" in str(error.value)


def test_a_state_of_another_step_is_refused(tmp_path):
    run = Run(**LONG)
    run.step()
    save(run, tmp_path)
    with pytest.raises(StateError, match="belongs to step 1, but the checkpoint is of step 2"):
        load(Run(**LONG), tmp_path, version=2)


def test_other_prompts_are_refused(tmp_path):
    run, other, shorter = Run(**LONG), Run(**LONG), Run(**LONG)
    run.step()
    save(run, tmp_path)
    other.collector._tokenize = lambda rows: [Prompt([8] * (row + 1), 60) for row in rows]
    with pytest.raises(StateError, match=r"other tokens than when.*same training set, tokenizer and chat template"):
        load(other, tmp_path, version=1)
    shorter.collector._tokenize = lambda rows: [Prompt([7] * (row + 1), 30) for row in rows]
    with pytest.raises(StateError, match="now only 30 fit behind its prompt"):
        load(shorter, tmp_path, version=1)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    run = Run(**LONG)
    run.step()
    save(run, tmp_path)
    with pytest.raises(StateError, match=r"`token_ids` has ids from .* but the vocabulary has 100"):
        load(Run(**LONG), tmp_path, version=1, vocab_size=100)


def test_formats(tmp_path):
    run = Run(**LONG)
    run.step()
    save(run, tmp_path)
    manifest = tmp_path / "rollout" / "manifest.json"
    content = json.loads(manifest.read_text())
    for found, remedy in ((3, "or a newer one"), (1, "resume_rollout='discard'"), (None, "resume_rollout='discard'")):
        manifest.write_text(json.dumps({**content, "format": found}))
        with pytest.raises(StateFormatError, match=f"has format {found}, but this version reads format 2.*{remedy}"):
            load(Run(**LONG), tmp_path, version=1)
    manifest.unlink()
    (tmp_path / "rollout" / "rank0.json").write_text("{}")
    with pytest.raises(StateFormatError, match="has format 1"):
        load(Run(**LONG), tmp_path, version=1)


def test_a_folder_without_a_state_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"has no `rollout/` folder.*`save_only_model=True`"):
        load(Run(**LONG), tmp_path, version=1)


def test_links_and_pipes_are_not_followed(tmp_path):
    run = Run(**LONG)
    run.step()
    save(run, tmp_path / "a")
    name = "rank0.safetensors"
    file = tmp_path / "a" / "rollout" / name
    (tmp_path / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateError, match=f"{name} is damaged.*is a link or no regular file"):
        load(Run(**LONG), tmp_path / "a", version=1)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StateError, match="is a link or no regular file"):
        load(Run(**LONG), tmp_path / "a", version=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rollout").symlink_to(tmp_path / "a" / "rollout")
    with pytest.raises(StateError, match="has no `rollout/` folder"):
        load(Run(**LONG), tmp_path / "b", version=1)


# --- going on without -----------------------------------------------------------------------------------------------


def test_what_can_not_be_taken_up_is_booked_as_set_aside(tmp_path):
    """The file of one of two ranks is damaged: its groups are lost, the rest goes on."""
    runs, _ = saved_by(2, tmp_path, **LONG)
    lost = runs[1].collector.unfinished.groups
    file = tmp_path / "rollout" / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StateError, match=r"rank1\.safetensors is damaged"):
        load(Run(**LONG), tmp_path, version=2)
    resumed = Run(**LONG)
    load(resumed, tmp_path, version=2, discards=True)
    assert packed(resumed.collector.unfinished.groups) == packed(runs[0].collector.unfinished.groups)
    assert packed(resumed.collector.ready.groups) == packed(runs[0].collector.ready.groups)
    before, after = runs[0].collector.ledger_balance(), resumed.collector.ledger_balance()
    assert after["groups"]["set_aside"] == before["groups"]["set_aside"] + len(lost)
    num_tokens = sum(group.num_tokens for group in lost)
    assert after["tokens"]["set_aside"] == before["tokens"]["set_aside"] + num_tokens
    (entry,) = resumed.collector.ledger.discarded
    assert (entry["groups"], entry["tokens"]) == (len(lost), num_tokens) and "rank1.safetensors" in entry["reason"]
    resumed.version = 2
    save(resumed, tmp_path / "again")  # and so it stays
    again = Run(**LONG)
    load(again, tmp_path / "again", version=2)
    assert again.collector.ledger.discarded == [entry]


@pytest.mark.parametrize("name", ["state.json", "groups.safetensors"])
def test_without_its_state_a_run_goes_on_from_the_ledger(tmp_path, caplog, name):
    run, resumed = Run(**LONG), Run(**LONG)
    run.step()
    save(run, tmp_path)
    (tmp_path / "rollout" / name).unlink()
    caplog.set_level(logging.WARNING, "trl_ulorl")
    load(resumed, tmp_path, version=1, discards=True)
    before, after = run.collector.ledger_balance(), resumed.collector.ledger_balance()
    for part, held in (("groups", ("ready", "unfinished")), ("tokens", ("held",))):
        assert after[part]["set_aside"] == before[part]["set_aside"] + sum(before[part][term] for term in held)
        assert sum(after[part][term] for term in held) == 0
    assert f"with {before['tokens']['held']} tokens are booked as set aside" in caplog.text
    assert name in caplog.text
    # No prompt comes twice, and none is left out.
    assert resumed.collector.prompts.take(3) == run.collector.prompts.take(3)


def test_without_any_ledger_a_run_says_that_it_starts_anew(tmp_path, caplog):
    run = Run(**LONG)
    caplog.set_level(logging.WARNING, "trl_ulorl")
    load(run, tmp_path, version=5, discards=True)
    assert "what was held is not known" in caplog.text
    assert run.collector.ledger.discarded[0]["groups"] == 0
    run.version = 5
    run.step()


# --- fuzz -----------------------------------------------------------------------------------------------------------

NUM_MUTATIONS = 400
ODD_VALUES = [None, True, -1, 1 << 70, 1.5, float("nan"), "x", "../../../etc/passwd", [], {}, [[[]]], 0, 1]


def reseal(folder):
    """Make the manifest's checksums those of the files: damage that only a look at the content finds."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "xxh3": xxhash.xxh3_128_hexdigest(data)}
        path.write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        pass


def places(value, path=()):
    """List every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def change_json(rng, path):
    content = json.loads(path.read_text())
    *way, last = list(places(content))[1:][rng.integers(len(list(places(content))) - 1)]
    holder = content
    for key in way:
        holder = holder[key]
    if rng.random() < 0.3:
        del holder[last]
    else:
        holder[last] = ODD_VALUES[rng.integers(len(ODD_VALUES))]
    path.write_text(json.dumps(content))


def change_arrays(rng, path):
    tensors = load_file(path)
    if not tensors:
        return
    name = sorted(tensors)[rng.integers(len(tensors))]
    tensor = tensors[name].clone()
    kind = rng.integers(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = tensor.to([torch.int64, torch.bfloat16, torch.bool, torch.float64][rng.integers(4)])
    elif kind == 2:
        tensors[name] = tensor[:-1].contiguous() if tensor.ndim and len(tensor) else tensor.reshape(1, -1)
    elif kind == 3:
        tensors[name + "x"] = tensors.pop(name)
    elif tensor.numel():
        flat = tensor.view(-1)
        odd = [-1, 0, 1, 3, 2**31 - 1, -(2**31)] if tensor.dtype == torch.int32 else [0, 1, 2, 255]
        flat[rng.integers(flat.numel())] = odd[rng.integers(len(odd))]
        tensors[name] = tensor
    else:
        tensors[name] = torch.zeros(3, dtype=tensor.dtype)
    save_file(tensors, path)


def mutate(rng, folder):
    """Damage one file in one of many ways; returns whether the manifest was made to agree."""
    files = sorted(folder.iterdir())
    path, kind = files[rng.integers(len(files))], rng.integers(10)
    data = path.read_bytes()
    if kind == 0:
        place = rng.integers(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.integers(8))]) + data[place + 1 :])
    elif kind == 1:
        path.write_bytes(data[: rng.integers(len(data))])
    elif kind == 2:
        path.unlink()
    elif kind == 3:
        other = files[rng.integers(len(files))]
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
    elif kind == 4:
        (folder / "rank7.safetensors").write_bytes(data)
    elif kind == 5:
        path.unlink()
        path.mkdir()
    elif kind == 6:
        path.write_bytes(rng.bytes(rng.integers(1, 300)))
    elif path.suffix == ".json":
        change_json(rng, path)
    else:
        change_arrays(rng, path)
    is_resealed = bool(rng.random() < 0.7)
    if is_resealed:
        reseal(folder)
    return is_resealed


@pytest.mark.parametrize("is_training", [False, True])
def test_a_damaged_state_is_refused_by_name_or_loaded_intact(tmp_path, is_training):
    configuration = {**LONG, "cap": 30, "median_length": 20}
    if is_training:
        run = Run(**configuration)
        run.step()
        run.engine.version = run.version
        run.collector.collect(run.version)
        save(run, tmp_path / "saved", step=1, buffered=buffered_batches(), sampler={"cpu": torch.get_rng_state()})
        version = run.version
    else:
        runs, _ = saved_by(2, tmp_path / "saved", **configuration)
        version = runs[0].version
    intact = Run(**configuration)
    load(intact, tmp_path / "saved", version=version)
    expected = state_of(intact.collector)
    outcomes = {"refused": 0, "intact": 0, "other": 0}
    for seed in range(NUM_MUTATIONS // 2):
        rng = np.random.default_rng([seed, is_training])
        checkpoint = tmp_path / "damaged"
        shutil.copytree(tmp_path / "saved", checkpoint)
        is_resealed = mutate(rng, checkpoint / "rollout")
        resumed = Run(**configuration)
        started = time.monotonic()
        try:
            load(resumed, checkpoint, version=version)
        except StateError as error:
            assert str(checkpoint) in str(error), f"mutation {seed}"
            outcomes["refused"] += 1
        else:
            is_intact = state_of(resumed.collector) == expected
            outcomes["intact" if is_intact else "other"] += 1
            # Else a value that some run might have saved, under a right checksum.
            assert is_intact or is_resealed, f"mutation {seed}"
            resumed.collector.ledger_balance()
        # And without it a run goes on in any case, with a ledger that balances.
        going_on = Run(**configuration)
        load(going_on, checkpoint, version=version, discards=True)
        going_on.collector.ledger_balance()
        assert time.monotonic() - started < 10, f"mutation {seed}"
        shutil.rmtree(checkpoint)
    assert outcomes["refused"] > 0.6 * NUM_MUTATIONS // 2 and outcomes["intact"] > 0, outcomes


def test_the_highest_step_of_a_folder(tmp_path):
    assert newest_step(tmp_path / "absent") is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "other-99"):
        (tmp_path / name).mkdir()
    assert newest_step(tmp_path) == 10
