"""A checkpoint holds the rollouts in progress: a resumed run is the run that was never interrupted."""

import errno
import json
import os
import shutil
import signal
import threading

import pytest
import torch
from conftest import make_dataset
from helpers import make_trainer, parameters
from transformers import TrainerCallback

from trl_ulorl.checkpoints import is_committed, newest_whole_checkpoint
from trl_ulorl.rollout import state

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_iterations": 3, "save_steps": 4},
        {"gradient_accumulation_steps": 2, "importance_mode": "sais"},
        # The next update begins inside the batch.
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "save_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "dynamic_micro_batches": True},
    ],
    ids=["window end", "inside a window", "accumulation", "inside a batch", "joined rows"],
)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, overrides):
    settings = {"num_segments": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3, **overrides}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    log = (tmp_path / "run" / "rollouts.jsonl").read_text()
    checkpoint = tmp_path / "run" / f"checkpoint-{settings['save_steps']}"
    saved = json.loads((checkpoint / "rollout" / "ledger.json").read_text())
    assert saved["groups"]["unfinished"] > 0

    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, value in parameters(whole).items():
        torch.testing.assert_close(value, parameters(resumed)[name], rtol=0, atol=0, msg=name)
    assert resumed.ledger() == whole.ledger()
    assert (tmp_path / "run" / "rollouts.jsonl").read_text() == log


def test_resume_without_a_rollout_log(tmp_path):
    settings = {"num_segments": 4, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "log_rollouts": False}
    make_trainer(tmp_path, **settings).train()
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.state.global_step == 3
    assert not (tmp_path / "run" / "rollouts.jsonl").exists()


def step_settings(**overrides):
    return {"num_segments": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 1, **overrides}


def assert_same_run(resumed, whole):
    for name, value in parameters(whole).items():
        torch.testing.assert_close(value, parameters(resumed)[name], rtol=0, atol=0, msg=name)
    assert resumed.ledger() == whole.ledger()


def test_a_checkpoint_without_rollouts_is_refused(tmp_path):
    settings = step_settings(max_steps=2)
    make_trainer(tmp_path, save_only_model=True, **settings).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ValueError, match=r"saved with `save_only_model=True`.*resume_rollout='discard'"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match=r"has no whole checkpoint.*checkpoint-2 has no `rollout/`.*checkpoint-1 has"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


def test_a_damaged_state_is_refused_or_set_aside(tmp_path):
    whole = make_trainer(tmp_path, **step_settings())
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    ledger = json.loads((checkpoint / "rollout" / "ledger.json").read_text())
    path = checkpoint / "rollout" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"rank0\.safetensors is damaged.*bytes.*`resume_rollout='discard'`"):
        make_trainer(tmp_path, **step_settings()).train(resume_from_checkpoint=str(checkpoint))
    resumed = make_trainer(tmp_path, resume_rollout="discard", **step_settings())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.ledger()["groups"]["set_aside"] == ledger["groups"]["unfinished"] > 0
    assert resumed.state.global_step == 4


def test_true_resumes_from_the_newest_whole_checkpoint(tmp_path, caplog):
    whole = make_trainer(tmp_path, **step_settings())
    whole.train()
    run = tmp_path / "run"
    mark = run / "checkpoint-4" / "trainer_state.json"
    mark.write_bytes(mark.read_bytes()[:200])  # killed while it was written
    path = run / "checkpoint-3" / "rollout" / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    resumed = make_trainer(tmp_path, **step_settings())
    with caplog.at_level("WARNING", "trl_ulorl"):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-4 has no whole `trainer_state.json`: it was not saved to its end" in caplog.text
    assert "shared.safetensors is damaged" in caplog.text and "checksum" in caplog.text
    assert f"Resuming from {run / 'checkpoint-2'}" in caplog.text
    assert_same_run(resumed, whole)
    with pytest.raises(ValueError, match="was not saved to its end"):
        (run / "checkpoint-4" / "trainer_state.json").unlink()
        make_trainer(tmp_path, **step_settings()).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_rotation_counts_whole_checkpoints(tmp_path):
    run = tmp_path / "run"
    half = run / "checkpoint-9"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    make_trainer(tmp_path, save_total_limit=2, **step_settings()).train()
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    whole = make_trainer(tmp_path, **step_settings())
    whole.train()
    shutil.rmtree(tmp_path / "run")
    write = state.write_arrays

    def full(path, content):
        if "checkpoint-3" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(state, "write_arrays", full)
        with pytest.raises(
            OSError, match=r"checkpoint-3 \(OSError: .*No space left on device.*earlier ones are as they were"
        ):
            make_trainer(tmp_path, save_total_limit=1, **step_settings()).train()
    assert not (tmp_path / "run" / "checkpoint-3" / "rollout").exists()
    resumed = make_trainer(tmp_path, **step_settings())
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)


def test_a_checkpoint_of_the_same_step_is_not_whole_while_it_is_written_anew(tmp_path, monkeypatch):
    make_trainer(tmp_path, **step_settings(max_steps=2)).train()
    resumed = make_trainer(tmp_path, **step_settings(max_steps=2))
    monkeypatch.setattr(state, "write_arrays", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert not is_committed(tmp_path / "run" / "checkpoint-2")
    assert newest_whole_checkpoint(tmp_path / "run", discards=False).endswith("checkpoint-1")


def test_other_prompts_in_the_same_number_are_refused(tmp_path):
    make_trainer(tmp_path, **step_settings(max_steps=1)).train()
    data = make_dataset().select(range(31, -1, -1))
    with pytest.raises(ValueError, match=r"the prompt in row \d+ of the training set has other tokens"):
        make_trainer(tmp_path, dataset=data, **step_settings()).train(resume_from_checkpoint=True)


# ------------------------------------------------------------------------------------------------------------ stopping


class Stopping:
    """Sends this process a signal in the engine's n-th call."""

    def __init__(self, engine, number, call):
        self.engine, self.number, self.call = engine, number, call

    def decode(self, requests):
        self.call -= 1
        if self.call == 0:
            os.kill(os.getpid(), self.number)
        return self.engine.decode(requests)


@pytest.mark.parametrize(
    ("call", "number", "error"),
    [
        (1, signal.SIGINT, KeyboardInterrupt),
        (2, signal.SIGTERM, SystemExit),
        (6, signal.SIGTERM, SystemExit),
        (9, signal.SIGTERM, SystemExit),
    ],
)
def test_a_signal_saves_at_the_end_of_the_round_and_nothing_changes(tmp_path, caplog, call, number, error):
    settings = {"num_segments": 4, "max_steps": 4, "max_inflight_groups": 3}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    shutil.rmtree(tmp_path / "run")
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    stopped = make_trainer(tmp_path, **settings)
    stopped._collector.engine = Stopping(stopped._collector.engine, number, call)
    with caplog.at_level("WARNING", "trl_ulorl"), pytest.raises(error) as raised:
        stopped.train()
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    if error is SystemExit:
        assert raised.value.code == 128 + number
    assert f"{signal.Signals(number).name} stopped the run at step" in caplog.text
    assert "resume_from_checkpoint=True" in caplog.text
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)


def test_a_stopped_step_replaces_the_rollout_of_its_checkpoint_only(tmp_path):
    whole = make_trainer(tmp_path, **step_settings(max_inflight_groups=3))
    whole.train()
    shutil.rmtree(tmp_path / "run")
    stopped = make_trainer(tmp_path, **step_settings(max_inflight_groups=3))
    saved = []
    save_model = stopped.save_model
    stopped.save_model = lambda *args, **kwargs: (saved.append(stopped.state.global_step), save_model(*args, **kwargs))
    decode = stopped._collector.engine.decode

    def decoding(requests):
        if stopped.state.global_step == 2 and not stopped._stop.signal_number:
            os.kill(os.getpid(), signal.SIGTERM)
        return decode(requests)

    stopped._collector.engine.decode = decoding
    with pytest.raises(SystemExit):
        stopped.train()
    step = stopped.state.global_step
    assert saved == [1, 2] and step == 2
    resumed = make_trainer(tmp_path, **step_settings(max_inflight_groups=3))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
    assert_same_run(resumed, whole)


def test_a_step_that_is_stopped_after_a_resume_replaces_the_rollout_only_too(tmp_path):
    """The checkpoint that was resumed stays whole, whenever the time to save is over."""
    settings = step_settings(max_inflight_groups=3)
    make_trainer(tmp_path, **{**settings, "max_steps": 2}).train()
    folder = tmp_path / "run" / "checkpoint-2"
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    stopped = make_trainer(tmp_path, **settings)
    decode = stopped._collector.engine.decode

    def decoding(requests):
        if not stopped._stop.signal_number:
            os.kill(os.getpid(), signal.SIGTERM)
        return decode(requests)

    stopped._collector.engine.decode = decoding
    with pytest.raises(SystemExit):
        stopped.train(resume_from_checkpoint=str(folder))
    assert stopped.state.global_step == 2
    assert is_committed(folder) and (folder / "model.safetensors").stat().st_mtime_ns == weights
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "kept").rename(tmp_path / "run")
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(folder))
    assert_same_run(resumed, whole)


def test_what_a_stopped_run_saved_outlives_the_limit_of_one_checkpoint(tmp_path):
    """The parent deletes all but the best one at the end of training."""
    trainer = make_trainer(tmp_path, save_total_limit=1, **step_settings())

    class Best(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                state.best_model_checkpoint = str(tmp_path / "run" / "checkpoint-1")
            if state.global_step == 2:
                trainer._stop.signal_number = signal.SIGTERM

    trainer.callback_handler.callbacks.insert(0, Best())  # before the trainer's own looks for the signal
    with pytest.raises(SystemExit):
        trainer.train()
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert trainer.args.save_total_limit == 1


def test_a_signal_between_the_batches_of_an_update_waits_for_its_end(tmp_path):
    """The gradients of the first batch can't be saved."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_segments": 1, "max_steps": 3}
    whole = make_trainer(tmp_path, **settings)
    whole.train()
    shutil.rmtree(tmp_path / "run")
    stopped = make_trainer(tmp_path, **settings)
    original = stopped._collector.collect

    def collect(version, left):
        if stopped._step % 2 and not stopped._stop.signal_number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(version, left)

    stopped._collector.collect = collect
    with pytest.raises(SystemExit):
        stopped.train()
    assert stopped.state.global_step == 1
    resumed = make_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, whole)


@pytest.fixture
def interrupts():
    """Let Ctrl-C through: a shell starts what runs in its background with interrupts ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_ends_at_once(tmp_path):
    class Impatient:
        def decode(self, requests):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            yield from ()

    trainer = make_trainer(tmp_path, engine=Impatient())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    trainer.ledger()  # balances


@pytest.mark.usefixtures("interrupts")
def test_without_graceful_stop_an_interrupt_is_an_interrupt(tmp_path):
    trainer = make_trainer(tmp_path, graceful_stop=False)
    trainer._collector.engine = Stopping(trainer._collector.engine, signal.SIGINT, 1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_training_in_another_thread_sets_no_handlers(tmp_path):
    trainer, errors = make_trainer(tmp_path), []

    def train():
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(120)
    assert not errors and trainer.state.global_step == 2


def test_a_signal_in_the_last_update_is_passed_on(tmp_path):
    trainer = make_trainer(tmp_path)
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append("passed on"))
    try:
        finalize = trainer._finalize_training

        def finalizing(*args):
            os.kill(os.getpid(), signal.SIGTERM)
            return finalize(*args)

        trainer._finalize_training = finalizing
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == ["passed on"]
