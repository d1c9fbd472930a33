"""The trainer on real steps: importance modes, DMMPTs, rewards, selection, the end of a run."""

import asyncio
import gc
import inspect
import json
import threading
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import make_dataset, make_model, make_tokenizer
from datasets import Dataset
from helpers import EOS, PreparedEngine, arguments, length_reward, make_trainer, parameters
from reference import ulorl_loss
from transformers import Qwen3ForSequenceClassification
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from trl_ulorl import UloRLTrainer, VerifierReward
from trl_ulorl.objective import dmmpts_mask
from trl_ulorl.rollout.engine import DecodeRequest

pytestmark = pytest.mark.slow


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def record_batches(trainer):
    """Keep every batch that goes into the loss, with the loss and the log-probs of its forward pass."""
    seen = []
    compute_loss, forward = trainer._compute_loss, trainer._get_per_token_logps_and_entropies

    def recording_forward(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        if trainer._tap is not None:
            seen.append({"logps": outputs[0].detach(), "entropies": outputs[1].detach()})
        return outputs

    def recording_loss(model, inputs):
        loss = compute_loss(model, inputs)
        seen[-1].update(inputs=dict(inputs), loss=loss.detach())
        return loss

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = recording_forward, recording_loss
    return seen


# ------------------------------------------------------------------------------------------------- contract with TRL


def test_wrapped_methods_have_the_signatures_that_the_seams_rely_on():
    expected = {
        "_generate_and_score_completions": ["self", "inputs"],
        "_tokenize_prompts": ["self", "prompts"],
        "_generate_single_turn": [
            "self",
            "prompt_ids",
            "images",
            "multimodal_fields",
            "num_generations",
            "has_tool_images",
        ],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_prepare_inputs": ["self", "generation_batch"],
        "_compute_loss": ["self", "model", "inputs"],
        "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    }
    for name, parameter_names in expected.items():
        assert list(inspect.signature(getattr(GRPOTrainer, name)).parameters) == parameter_names, name
    first = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)[:6]
    assert first == ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    ours, theirs = (list(inspect.signature(cls.__init__).parameters) for cls in (UloRLTrainer, GRPOTrainer))
    assert set(ours) == set(theirs)


@pytest.mark.parametrize("overrides", [{}, {"remove_unused_columns": True}, {"num_iterations": 2}])
def test_the_dataloader_drives_as_many_steps_as_the_parents_and_reads_no_row(tmp_path, overrides):
    trainer = make_trainer(tmp_path, **overrides)
    dataset = trainer.train_dataset
    loader, parents = trainer.get_train_dataloader(), GRPOTrainer.get_train_dataloader(trainer)
    assert trainer.train_dataset is dataset
    assert [len(batch) for batch in loader] == [len(batch) for batch in parents]
    assert all(row == {} for batch in loader for row in batch)


def test_a_loss_that_bypasses_the_tap_is_an_error(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, engine=PreparedEngine(16))
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: torch.zeros((), requires_grad=True))
    with pytest.raises(RuntimeError, match="Install a TRL release that trl-ulorl supports"):
        trainer.train()


@pytest.mark.parametrize("is_conversational", [True, False])
def test_reward_functions_see_the_completions_that_the_parent_decodes(tmp_path, is_conversational):
    early, late = [], []

    def reward(completions, **kwargs):
        early.extend(map(str, completions))
        return length_reward(completions)

    rows = make_dataset()
    if not is_conversational:
        rows = Dataset.from_dict({"prompt": [p[0]["content"] for p in rows["prompt"]], "answer": rows["answer"]})
    trainer = make_trainer(tmp_path, reward, engine=PreparedEngine(16), dataset=rows, overlong="mask")
    calculate = trainer._calculate_rewards

    def recording(inputs, prompts, completions, completion_ids_list):
        late.extend(map(str, completions))
        return calculate(inputs, prompts, completions, completion_ids_list)

    trainer._calculate_rewards = recording
    trainer.train()
    assert late and not Counter(late) - Counter(early)


# ------------------------------------------------------------------------------------------------- importance modes


def test_pois_leaves_the_ratio_at_exactly_one(tmp_path):
    trainer = make_trainer(tmp_path, engine=PreparedEngine(16), num_segments=4, max_steps=3)
    seen = record_batches(trainer)
    trainer.train()
    assert all("old_per_token_logps" not in batch["inputs"] for batch in seen)
    assert history(trainer, "clip_ratio/region_mean") == [0, 0, 0]
    assert max(history(trainer, "rollout/age_max")) > 0


@pytest.mark.parametrize("mode", ["pois", "sais"])
def test_the_trainers_loss_is_equation_10(tmp_path, mode):
    trainer = make_trainer(
        tmp_path,
        engine=PreparedEngine(16, logp=-2.9),
        num_segments=4,
        max_steps=4,
        importance_mode=mode,
        dmmpts={"tau": 0.05, "sigma": 3.05},
    )
    seen = record_batches(trainer)
    trainer.train()
    num_masked = num_stale = 0
    for batch in seen:
        inputs = batch["inputs"]
        mask = dmmpts_mask(
            batch["logps"], batch["entropies"], inputs["advantages"], inputs["completion_mask"], tau=0.05, sigma=3.05
        )
        old = inputs["old_per_token_logps"] if mode == "sais" else batch["logps"]
        expected = ulorl_loss(batch["logps"], old, inputs["advantages"], inputs["completion_mask"], mask, epsilon=0.2)
        torch.testing.assert_close(batch["loss"], expected)
        num_masked += int(mask.sum())
        num_stale += int((inputs["token_ages"] > 0).sum())
        if mode == "sais":
            real = inputs["completion_mask"].bool()
            torch.testing.assert_close(old[real], torch.full_like(old[real], -2.9))
    assert num_masked > 0 and num_stale > 0


def test_advantages_by_hand(tmp_path):
    """Eq. 4 with TRL's sample deviation: one right answer of four has mean 1/4 and deviation 1/2."""

    def one_right(completion_ids, **kwargs):
        return [float(len(ids) in (10, 9)) for ids in completion_ids]  # lengths are 6, 6, 3, 10 and 4, 11, 11, 9

    trainer = make_trainer(tmp_path, one_right, engine=PreparedEngine(10), num_segments=1, max_steps=1, dmmpts=None)
    seen = record_batches(trainer)
    trainer.train()
    advantages = sorted(seen[0]["inputs"]["advantages"].tolist())
    right, wrong = 0.75 / (0.5 + 1e-4), -0.25 / (0.5 + 1e-4)
    assert advantages == pytest.approx([wrong] * 6 + [right] * 2)


def test_several_updates_start_from_the_original_advantages(tmp_path):
    trainer = make_trainer(
        tmp_path, engine=PreparedEngine(16), num_iterations=2, max_steps=4, dmmpts={"tau": 0.05, "sigma": 9.0}
    )
    seen = record_batches(trainer)
    trainer.train()
    first, second = seen[0]["inputs"], seen[1]["inputs"]
    assert first["advantages"].shape == (8,)
    torch.testing.assert_close(first["advantages"], second["advantages"], rtol=0, atol=0)
    # The denominator is the policy at the start of the step: ratio 1 in the first update, not in the second.
    torch.testing.assert_close(first["old_per_token_logps"], seen[0]["logps"])
    real = second["completion_mask"].bool()
    assert not torch.allclose(second["old_per_token_logps"][real], seen[1]["logps"][real])


def test_one_segment_is_truly_on_policy(tmp_path):
    trainer = make_trainer(tmp_path, num_segments=1, max_steps=3)
    trainer.train()
    assert history(trainer, "rollout/age_max") == [0, 0, 0]
    assert history(trainer, "importance/on_policy_frac") == [1, 1, 1]
    assert history(trainer, "rollout/unfinished_groups") == [0, 0, 0]
    assert history(trainer, "rollout/ready_groups") == [0, 0, 0]


def test_where_the_entropy_is_enough_training_is_identical_to_training_without_dmmpts(tmp_path):
    trained = []
    for dmmpts in (None, {"tau": 0.01, "sigma": 1e-6}):
        trainer = make_trainer(tmp_path, engine=PreparedEngine(16), num_segments=4, dmmpts=dmmpts, max_steps=3)
        trainer.train()
        trained.append(parameters(trainer))
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], rtol=0, atol=0, msg=name)


# ------------------------------------------------------------------------------------------------------------ engine


def greedy_engine(tmp_path, **overrides):
    trainer = make_trainer(tmp_path, generation_kwargs={"do_sample": False}, **overrides)
    return trainer, trainer._build_engine()


def continue_by(engine, prompts, budgets):
    sequences = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    logps, ended = [[] for _ in prompts], [False] * len(prompts)
    for budget in budgets:
        rows = [row for row in range(len(prompts)) if not ended[row]]
        for decoded in engine.decode([DecodeRequest(sequences[row], budget) for row in rows]):
            row = rows[decoded.request_index]
            assert 1 <= len(decoded.token_ids) <= budget
            sequences[row] = np.concatenate([sequences[row], decoded.token_ids])
            logps[row].extend(decoded.per_token_logps.tolist())
            ended[row] = decoded.is_stopped
    return sequences, logps, ended


PROMPTS = [[4, 5, 6], [7, 8], [9, 10, 11, 12, 13], [14], [15, 4], [5, 5, 5], [6, 7, 8, 9], [10, 4, 11]]


def test_greedy_decoding_in_segments_equals_decoding_in_one_piece(tmp_path):
    _, engine = greedy_engine(tmp_path, per_device_train_batch_size=8)
    whole, whole_logps, _ = continue_by(engine, PROMPTS, [24])
    for budgets in ([12, 12], [6] * 4, [5, 1, 11, 7], [1] * 24):
        cut, cut_logps, _ = continue_by(engine, PROMPTS, budgets)
        for one, other in zip(whole, cut, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(whole_logps, cut_logps, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


def test_recorded_logps_are_those_of_a_forward_pass_at_the_temperature(tmp_path):
    trainer = make_trainer(tmp_path)
    engine = trainer._build_engine()
    sequences, logps, _ = continue_by(engine, PROMPTS, [10])
    for prompt, sequence, recorded in zip(PROMPTS, sequences, logps, strict=True):
        ids = torch.from_numpy(sequence).long().unsqueeze(0)
        with torch.no_grad():
            logits = trainer.model(ids).logits[0] / 0.85
        expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        np.testing.assert_allclose(recorded, expected.numpy(), atol=2e-5)


def test_each_row_keeps_to_its_own_budget(tmp_path):
    _, engine = greedy_engine(tmp_path)
    budgets = [1, 7, 3, 2, 9, 4, 5, 6]
    requests = [DecodeRequest(np.array(p, dtype=np.int32), b) for p, b in zip(PROMPTS, budgets, strict=True)]
    lengths = {decoded.request_index: decoded for decoded in engine.decode(requests)}
    for index, budget in enumerate(budgets):
        decoded = lengths[index]
        assert len(decoded.token_ids) == budget or (decoded.is_stopped and decoded.token_ids[-1] == EOS)
    assert list(engine.decode([])) == []


# ----------------------------------------------------------------------------------------------------------- rewards


def test_rewards_are_scored_once_and_replayed_with_their_logs(tmp_path):
    calls = Counter()

    def first(completions, completion_ids, answer, log_extra, log_metric, trainer_state, **kwargs):
        assert len(answer) == len(completions) and trainer_state is not None
        calls.update(map(tuple, completion_ids))
        log_extra("length", [len(ids) for ids in completion_ids])
        log_metric("calls", 1.0)
        return length_reward(completions)

    async def second(completion_ids, **kwargs):
        await asyncio.sleep(0.001)
        return [len(ids) / 100 for ids in completion_ids]

    trainer = make_trainer(
        tmp_path,
        [first, second],
        engine=PreparedEngine(16),
        num_segments=4,
        reward_weights=[1.0, 0.5],
        max_completion_length=20,  # longer than any completion, so that both functions see all
        max_steps=3,
    )
    seen = record_batches(trainer)
    trainer.train()
    assert trainer.reward_func_names == ["first", "second"]
    finished = [r for group in trainer._collector.unfinished.groups for r in group.rollouts if r.is_finished]
    closed = trainer.ledger()["groups"]
    assert sum(calls.values()) == 4 * (closed["trained"] + closed["filtered"] + closed["ready"]) + len(finished)
    lengths = seen[-1]["inputs"]["completion_mask"].sum(1).tolist()
    logs = trainer._logs
    assert sorted(logs["extra"]["length"]) == sorted(lengths)
    assert logs["rewards"]["second"] == pytest.approx([length / 100 for length in logs["extra"]["length"]])
    totals = [a + 0.5 * b for a, b in zip(logs["rewards"]["first"], logs["rewards"]["second"], strict=True)]
    assert history(trainer, "reward")[-1] == pytest.approx(np.mean(totals))
    assert history(trainer, "calls") == [1.0] * 3


def test_a_failing_reward_costs_its_rollout_only(tmp_path):
    def fragile(completions, **kwargs):
        if any(len(c[0]["content"]) == 5 for c in completions):
            raise ValueError("five")
        return length_reward(completions)

    trainer = make_trainer(tmp_path, fragile, engine=PreparedEngine(16), num_segments=2, max_steps=3)
    trainer.train()
    assert history(trainer, "verifier/failed")[-1] > 0
    assert max(history(trainer, "verifier/undecided_frac")) > 0
    assert trainer.ledger()["groups"]["trained"] == 6


def test_a_verifier_that_has_never_worked_ends_the_run(tmp_path):
    def broken(completions, solution, **kwargs):
        raise KeyError("solution")

    dataset = make_dataset().add_column("solution", ["1"] * 32)
    trainer = make_trainer(tmp_path, broken, engine=PreparedEngine(16), dataset=dataset, num_segments=2, max_steps=9)
    with pytest.raises(RuntimeError, match="`broken` has failed on the first 64 rollouts"):
        trainer.train()
    assert trainer.state.global_step < 5


def test_a_verifier_that_fails_from_then_on_fills_the_batch_and_goes_on(tmp_path, caplog):
    calls = []

    def broken(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 1:
            return [0.0] * len(completions)
        raise RuntimeError("no service")

    trainer = make_trainer(tmp_path, broken, engine=PreparedEngine(16), num_segments=2, max_steps=1)
    trainer.train()
    assert history(trainer, "rollout/filled_groups") == [2]
    assert "Check `accuracy` and `verifier/failed`" in caplog.text
    assert trainer.ledger()["groups"]["trained"] == 2


def test_truncated_rollouts_are_wrong_without_a_verifier_call(tmp_path):
    lengths = []

    def always_right(completion_ids, **kwargs):
        lengths.extend(map(len, completion_ids))
        return [1.0] * len(completion_ids)

    trainer = make_trainer(tmp_path, always_right, engine=PreparedEngine(16), num_segments=2, max_steps=2)
    trainer.train()
    assert lengths and max(lengths) <= 16
    truncated = np.array(history(trainer, "rollout/truncated_frac"))
    assert truncated.min() > 0
    np.testing.assert_allclose(history(trainer, "accuracy"), 1 - truncated)


def test_soft_overlong_adds_dapos_punishment(tmp_path):
    trainer = make_trainer(tmp_path, engine=PreparedEngine(16), overlong="soft", overlong_cache_length=8, max_steps=1)
    trainer.train()
    assert trainer.reward_func_names == ["length_reward", "soft_overlong_punishment_reward"]
    expected = get_soft_overlong_punishment(16, 8)
    for record in map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()):
        for rollout in record["rollouts"]:
            length = sum(length for _, length in rollout["segments"])
            assert rollout["rewards"][1] == pytest.approx(expected(completion_ids=[[0] * length])[0])


def test_evaluation_generates_as_the_parent_does(tmp_path):
    trainer = make_trainer(tmp_path, VerifierReward(), max_steps=1, max_completion_length=6)
    metrics = trainer.evaluate(make_dataset(4))
    assert metrics["eval_rewards/verifier_reward/mean"] == 0
    assert trainer.ledger()["groups"]["admitted"] == 0


# ---------------------------------------------------------------------------------------------- batches, end of a run


def test_staleness_bound_holds_to_the_letter(tmp_path):
    with pytest.warns(UserWarning, match="max_staleness"):
        trainer = make_trainer(
            tmp_path, engine=PreparedEngine(32), max_completion_length=32, num_segments=8, max_staleness=2, max_steps=8
        )
    trainer.train()
    ages = history(trainer, "rollout/age_max")
    assert max(ages) == 2


@pytest.mark.parametrize(
    "overrides",
    [{}, {"gradient_accumulation_steps": 2}, {"steps_per_generation": 2, "max_steps": 6}, {"num_iterations": 3}],
    ids=str,
)
def test_drain_leaves_nothing_untrained(tmp_path, overrides):
    overrides = {"max_steps": 6, **overrides}
    trainer = make_trainer(tmp_path, engine=PreparedEngine(16), num_segments=4, drain=True, **overrides)
    trainer.train()
    groups = trainer.ledger()["groups"]
    assert groups["ready"] == groups["unfinished"] == trainer.ledger()["tokens"]["held"] == 0
    assert groups["admitted"] == groups["trained"] + groups["filtered"] > 0


def test_rollout_log_tells_where_every_closed_group_went(tmp_path):
    trainer = make_trainer(tmp_path, engine=PreparedEngine(16), num_segments=4, max_steps=4)
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    groups, tokens = trainer.ledger()["groups"], trainer.ledger()["tokens"]
    for outcome in ("trained", "filtered", "set_aside"):
        mine = [record for record in records if record["outcome"] == outcome]
        assert len(mine) == groups[outcome]
        lengths = [length for r in mine for rollout in r["rollouts"] for _, length in rollout["segments"]]
        assert sum(lengths) == tokens[outcome]
    assert len({record["group"] for record in records}) == len(records)


def test_training_again_starts_a_new_rollout(tmp_path):
    trainer = make_trainer(tmp_path, num_segments=4, max_steps=3)
    trainer.train()
    assert trainer.ledger()["groups"]["unfinished"] > 0
    trainer.train()
    assert trainer.ledger()["groups"]["trained"] == 6
    assert min(history(trainer, "rollout/age_max")) >= 0


@pytest.mark.parametrize("part", ["engine", "loss"])
def test_training_again_after_a_failure(tmp_path, monkeypatch, part):
    trainer = make_trainer(tmp_path, num_segments=4, max_steps=3, gradient_accumulation_steps=2)
    with monkeypatch.context() as broken:
        if part == "engine":
            broken.setattr(trainer._collector.engine, "decode", lambda requests: iter([None]))
        else:
            broken.setattr(GRPOTrainer, "_compute_loss", lambda *args: 1 / 0)
        with pytest.raises((AttributeError, ZeroDivisionError)):
            trainer.train()
    trainer.train()
    assert trainer.ledger()["groups"]["trained"] == 3 * 4


def test_a_trainer_that_is_no_longer_used_is_freed(tmp_path):
    trainer = make_trainer(tmp_path, num_segments=2, max_steps=1)
    trainer.train()
    thread, this = trainer._scorer._thread, weakref.ref(trainer)
    del trainer
    gc.collect()
    thread.join(timeout=10)
    assert this() is None and not thread.is_alive()


def test_the_models_own_generation_config_does_not_restrict_sampling(tmp_path):
    model = make_model()
    model.generation_config.min_p = 0.9
    model.generation_config.forced_eos_token_id = EOS
    trainer = make_trainer(tmp_path, model=model)
    requests = [DecodeRequest(np.array([4, 5], dtype=np.int32), 2) for _ in range(64)]
    decoded = list(trainer.rollout_engine.decode(requests))
    assert len({int(segment.token_ids[0]) for segment in decoded}) > 5
    assert not all(segment.is_stopped for segment in decoded)
    assert model.generation_config.min_p == 0.9


def test_decode_batch_size_bounds_the_rows_of_a_call(tmp_path):
    trainer = make_trainer(tmp_path, decode_batch_size=3)
    rows, generate = [], trainer.model.generate
    trainer.model.generate = lambda **kwargs: rows.append(len(kwargs["input_ids"])) or generate(**kwargs)
    requests = [DecodeRequest(np.array(prompt, dtype=np.int32), 2) for prompt in PROMPTS]
    assert len(list(trainer.rollout_engine.decode(requests))) == len(PROMPTS)
    assert rows == [3, 3, 2]


def test_logged_values_of_several_functions_and_calls_are_averaged(tmp_path):
    def first(completions, log_metric, log_extra, **kwargs):
        log_metric("m", 1)
        log_metric("m", 3)
        log_extra("odd", [np.float32(0.5)] * len(completions))
        return length_reward(completions)

    def second(completions, log_metric, **kwargs):
        log_metric("m", 5)
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, [first, second], engine=PreparedEngine(12), max_steps=1)
    trainer.train()
    assert history(trainer, "m") == [3.0]
    assert set(map(type, trainer._logs["extra"]["odd"])) == {float}


def make_reward_model():
    config = make_model().config
    config.num_labels = 1
    return Qwen3ForSequenceClassification(config)


@pytest.mark.parametrize("order", ["model", "function, model", "model, function", "model, soft"])
def test_reward_models_score_the_batch_and_functions_say_what_is_correct(tmp_path, order):
    judged = []

    def correct(completions, **kwargs):
        values = [
            None if len(c[0]["content"]) == 5 else r
            for c, r in zip(completions, length_reward(completions), strict=True)
        ]
        judged.extend(values)
        return values

    parts = {"model": make_reward_model(), "function": correct}
    trainer = make_trainer(
        tmp_path,
        [parts[name] for name in order.split(", ") if name in parts],
        engine=PreparedEngine(16),
        reward_processing_classes=[
            make_tokenizer() if name == "model" else None for name in order.split(", ") if name in parts
        ],
        dynamic_sampling=False,
        overlong="soft" if "soft" in order else "mask",
        num_segments=2,
        max_steps=3,
    )
    calculate_rewards, rewards = trainer._calculate_rewards, []
    trainer._calculate_rewards = lambda *args: rewards.append(calculate_rewards(*args)) or rewards[-1]
    trainer.train()
    assert len(rewards) == 3
    assert len(json.loads((tmp_path / "run" / "_samples.json").read_text())["samples"]) == 3
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    num_functions = {len(rollout["rewards"]) for line in lines for rollout in line["rollouts"]}
    assert num_functions == {len(described["reward_functions"])}
    assert len(described["reward_models"]) == 1
    if "function" not in order:
        assert described["correctness"] is None and history(trainer, "accuracy") == []
        return
    assert described["correctness"] == "correct"
    assert 0 < history(trainer, "accuracy")[0] < 1
    assert None in judged
    for of_batch in rewards:
        function, model = (
            of_batch[:, order.split(", ").index("function")],
            of_batch[:, order.split(", ").index("model")],
        )
        assert torch.equal(function.isnan(), model.isnan()), "half a sum is no reward"


def test_groups_that_differ_only_in_masked_rollouts_are_filtered(tmp_path):
    def truncated_is_better(completion_ids, **kwargs):
        return [float(ids[-1] != EOS) for ids in completion_ids]

    trainer = make_trainer(
        tmp_path,
        truncated_is_better,
        engine=PreparedEngine(40),
        overlong="mask",
        max_completion_length=16,
        max_steps=2,
    )
    seen = record_batches(trainer)
    trainer.train()
    filled = history(trainer, "rollout/filled_groups")
    for batch, num_filled in zip(seen, filled, strict=True):
        if not num_filled:
            kept = batch["inputs"]["completion_mask"].any(1)
            assert batch["inputs"]["advantages"][kept].abs().max() > 0


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"])
def test_other_losses_train(tmp_path, loss_type):
    extra = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    trainer = make_trainer(
        tmp_path, engine=PreparedEngine(16), num_segments=2, loss_type=loss_type, dmmpts={"sigma": 9.0}, **extra
    )
    before = parameters(trainer)
    trainer.train()
    assert any(not torch.equal(before[name], value) for name, value in parameters(trainer).items())


def test_lora_trains_its_adapter_only(tmp_path):
    peft = pytest.importorskip("peft")
    args = arguments(tmp_path, num_segments=2, max_steps=2, beta=0.05, off_policy_mask_threshold=1.0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    trainer = UloRLTrainer(
        make_model(), length_reward, args, make_dataset(), processing_class=make_tokenizer(), peft_config=config
    )
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(before[name], value)}
    assert changed and all("lora_" in name for name in changed)


def test_reward_functions_see_the_device_of_their_rank(tmp_path, monkeypatch):
    """A thread's current GPU is 0 until it is set, whatever the main thread's is."""
    trainer, seen = make_trainer(tmp_path), []
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda device: seen.append((threading.current_thread().name, device)),
    )
    trainer._share_device()
    assert not seen, "a CPU has none"
    trainer.accelerator.state.device = torch.device("cuda", 3)
    trainer._share_device()
    assert seen == [("trl_ulorl-rewards", torch.device("cuda", 3))]
