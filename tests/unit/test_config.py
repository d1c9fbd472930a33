"""`UloRLConfig` and `DMMPTsConfig`: defaults, the forms that `dmmpts` may take, the parsers, and every refusal.

Tests of a refusal assert what the message says of the value given, of what must hold, and of the way out.
"""

import dataclasses
import json
import math
import warnings

import pytest
from trl import GRPOConfig, TrlParser

from trl_ulorl import DMMPTsConfig, UloRLConfig

ADDED = {
    "decode_batch_size",
    "num_segments",
    "segment_length",
    "rollout_schedule",
    "rollout_slots",
    "max_inflight_groups",
    "max_staleness",
    "drain",
    "importance_mode",
    "dmmpts",
    "importance_alarm",
    "dynamic_sampling",
    "overlong",
    "overlong_cache_length",
    "correctness_func",
    "dynamic_micro_batches",
    "resume_rollout",
    "graceful_stop",
    "log_rollouts",
}
CHANGED = {"temperature", "lr_scheduler_type", "vllm_importance_sampling_correction", "ddp_timeout"}

# Batches of two groups of four, which feed one update; 64 tokens in four segments.
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 64,
    "num_segments": 4,
}


@pytest.fixture
def make(tmp_path):
    def build(**fields):
        return UloRLConfig(**{"output_dir": str(tmp_path), **SMALL, **fields})

    return build


def own_warnings(make, **fields):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(**fields)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


# ------------------------------------------------------------------------------------------------------------- defaults


def test_fields_are_those_of_grpo_and_the_added_ones():
    own = {field.name for field in dataclasses.fields(UloRLConfig)}
    assert own - {field.name for field in dataclasses.fields(GRPOConfig)} == ADDED


def test_defaults(tmp_path):
    config = UloRLConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert {name: getattr(config, name) for name in ADDED | CHANGED} == {
        "temperature": 0.85,
        "lr_scheduler_type": "constant",
        "vllm_importance_sampling_correction": False,
        "ddp_timeout": 86_400,
        "num_segments": 8,
        "segment_length": 64,  # GRPO's default of 512 tokens in eight segments
        "decode_batch_size": None,
        "rollout_schedule": "segment",
        "rollout_slots": None,
        "max_inflight_groups": 8,  # eight batches of one group
        "max_staleness": None,
        "drain": False,
        "importance_mode": "pois",
        "dmmpts": DMMPTsConfig(tau=0.99, sigma=0.2, dynamic=True),
        "importance_alarm": True,
        "dynamic_sampling": True,
        "overlong": "wrong",
        "overlong_cache_length": None,
        "correctness_func": None,
        "dynamic_micro_batches": False,
        "resume_rollout": "strict",
        "graceful_stop": True,
        "log_rollouts": True,
    }


def test_defaults_that_the_paper_shares_with_trl(tmp_path):
    config = UloRLConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert (config.loss_type, config.beta, config.num_generations, config.learning_rate) == ("dapo", 0.0, 8, 1e-6)
    assert (config.top_p, config.top_k, config.min_p, config.num_iterations) == (1.0, 0, None, 1)
    assert not config.mask_truncated_completions


def test_only_the_listed_defaults_differ_from_grpo(tmp_path):
    ours, theirs = (
        {field.name: (field.default, field.default_factory) for field in dataclasses.fields(kind)}
        for kind in (UloRLConfig, GRPOConfig)
    )
    assert {name for name in theirs if ours[name] != theirs[name]} == CHANGED


def test_every_own_field_has_help():
    for field in dataclasses.fields(UloRLConfig):
        if field.name in ADDED | CHANGED:
            assert field.metadata["help"].endswith("."), field.name


# --------------------------------------------------------------------------------------------------------------- dmmpts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, DMMPTsConfig()),
        (DMMPTsConfig(0.9, 0.1, False), DMMPTsConfig(0.9, 0.1, False)),
        ({"tau": 0.95}, DMMPTsConfig(0.95, 0.2, True)),
        ({"tau": 0.95, "sigma": 0.3, "dynamic": False}, DMMPTsConfig(0.95, 0.3, False)),
        ("{}", DMMPTsConfig()),
        ('{"sigma": 0.3}', DMMPTsConfig(0.99, 0.3, True)),
        (None, None),
        ("none", None),
        ("None", None),
        ("null", None),
        ("off", None),
    ],
)
def test_forms_of_dmmpts(make, given, expected):
    assert make(dmmpts=given).dmmpts == expected


def test_dmmpts_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DMMPTsConfig().tau = 0.5


WHAT_DMMPTS_TAKES = ["a `DMMPTsConfig`, a mapping", '{"tau": 0.99, "sigma": 0.2}', "None to switch the masking off"]


@pytest.mark.parametrize(
    ("given", "error", "texts"),
    [
        ({"tua": 0.9}, ValueError, ["unknown keys ['tua']", "it takes `tau`, `sigma` and `dynamic`"]),
        ('{"Sigma": 0.1}', ValueError, ["unknown keys ['Sigma']", "it takes `tau`, `sigma` and `dynamic`"]),
        ("{tau: 0.9}", ValueError, ["`dmmpts` ({tau: 0.9})", "not valid JSON", "double quotes"]),
        ("dynamic", TypeError, ["`dmmpts` ('dynamic')", *WHAT_DMMPTS_TAKES]),
        (0.99, TypeError, ["`dmmpts` (0.99)", *WHAT_DMMPTS_TAKES]),
        (True, TypeError, ["`dmmpts` (True)", *WHAT_DMMPTS_TAKES]),
        (False, TypeError, ["`dmmpts` (False)", *WHAT_DMMPTS_TAKES]),
        ([0.99], TypeError, ["`dmmpts` ([0.99])", *WHAT_DMMPTS_TAKES]),
    ],
)
def test_refused_forms_of_dmmpts(make, given, error, texts):
    with pytest.raises(error) as caught:
        make(dmmpts=given)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize("tau", [0, -0.5, 1.0001, math.nan, math.inf, -math.inf])
def test_tau_out_of_range(make, tau):
    for build in (lambda: DMMPTsConfig(tau=tau), lambda: make(dmmpts={"tau": tau})):
        with pytest.raises(ValueError) as caught:
            build()
        for text in (f"`tau` ({tau})", "must lie in (0, 1]", "The paper uses 0.99."):
            assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("adam_beta1", 1.0),
        ("adam_beta2", -0.1),
        ("adam_epsilon", -1e-8),
    ],
)
def test_what_the_optimizer_would_refuse(make, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` \({value!r}\) must be .*Correct it"):
        make(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("temperature", "0.8"), ("epsilon", "0.2"), ("learning_rate", "fast")])
def test_text_where_a_number_is_needed(make, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` \({value!r}\) must be a number"):
        make(**{name: value})


@pytest.mark.parametrize("weights", [[1.0, math.nan], [math.inf], ["1"]])
def test_reward_weights_that_are_no_numbers(make, weights):
    with pytest.raises(ValueError, match=r"`reward_weights` \(\[.*must hold finite numbers"):
        make(reward_weights=weights)


@pytest.mark.parametrize("value", ["banana", "True"])
def test_unknown_scale_of_rewards(make, value):
    with pytest.raises(ValueError, match=rf"`scale_rewards` \('{value}'\) must be one of 'group', 'batch', 'none'"):
        make(scale_rewards=value)
    assert [make(scale_rewards=each).scale_rewards for each in (True, False)] == ["group", "none"]


@pytest.mark.parametrize("max_steps", [0, -2])
def test_no_steps_are_not_taken_for_no_limit(make, max_steps):
    with pytest.raises(ValueError, match=rf"`max_steps` \({max_steps}\).*`num_train_epochs` \(3.0\).*positive"):
        make(max_steps=max_steps)
    assert make(max_steps=-1).max_steps == -1


@pytest.mark.parametrize("sigma", [0, -0.2, math.nan, math.inf, -math.inf])
def test_sigma_out_of_range(make, sigma):
    for build in (lambda: DMMPTsConfig(sigma=sigma), lambda: make(dmmpts={"sigma": sigma})):
        with pytest.raises(ValueError) as caught:
            build()
        for text in (f"`sigma` ({sigma})", "must be a positive entropy", "`dmmpts=None`", "`dynamic=False`"):
            assert text in str(caught.value)


@pytest.mark.parametrize("text", ["NaN", "Infinity"])
def test_json_has_numbers_that_are_none(make, text):
    with pytest.raises(ValueError, match=r"The paper uses 0\.99"):
        make(dmmpts=f'{{"tau": {text}}}')


@pytest.mark.parametrize("tau", [1, 1e-9, 0.99])
def test_tau_in_range(tau):
    assert DMMPTsConfig(tau=tau).tau == tau


# ------------------------------------------------------------------------------------------- saving, loading and parsing


OTHER_VALUES = {
    "temperature": 0.7,
    "lr_scheduler_type": "cosine",
    "num_segments": 3,
    "segment_length": 30,
    "max_inflight_groups": 5,
    "max_staleness": 6,
    "importance_mode": "sais",
    "dmmpts": DMMPTsConfig(0.9, 0.3, False),
    "importance_alarm": False,
    "dynamic_sampling": False,
    "overlong": "soft",
    "overlong_cache_length": 7,
    "correctness_func": "verifier_reward",
    "dynamic_micro_batches": True,
    "log_rollouts": False,
    "drain": True,
}


@pytest.mark.parametrize("fields", [{}, {"dmmpts": None}, OTHER_VALUES], ids=["defaults", "no dmmpts", "others"])
@pytest.mark.parametrize("form", ["to_dict", "to_json_string"])
def test_round_trip(make, fields, form):
    config = make(**fields)
    values = config.to_dict() if form == "to_dict" else json.loads(config.to_json_string())
    again = make(**{name: values[name] for name in ADDED | CHANGED})
    for name in ADDED | CHANGED:
        assert getattr(again, name) == getattr(config, name), name
        if name in fields:
            assert getattr(again, name) == fields[name], name


def test_to_dict_holds_json_values_and_leaves_the_config_alone(make):
    config = make()
    assert config.to_dict()["dmmpts"] == {"tau": 0.99, "sigma": 0.2, "dynamic": True}
    assert config.dmmpts == DMMPTsConfig()
    assert make(dmmpts=None).to_dict()["dmmpts"] is None


def parse(*arguments):
    (config,) = TrlParser((UloRLConfig,)).parse_args_and_config(list(arguments))
    return config


@pytest.fixture
def command_line(tmp_path):
    fields = {"output_dir": str(tmp_path), **SMALL}
    return [part for name, value in fields.items() for part in (f"--{name}", str(value))]


def test_command_line(command_line):
    config = parse(
        *command_line,
        *("--num_segments", "2", "--segment_length", "40", "--importance_mode", "sais", "--dynamic_sampling", "false"),
        *("--dmmpts", '{"tau": 0.9, "dynamic": false}', "--overlong", "mask"),
        *("--max_staleness", "4", "--drain", "true"),
    )
    assert (config.num_segments, config.segment_length, config.importance_mode) == (2, 40, "sais")
    assert (config.dynamic_sampling, config.overlong, config.max_staleness, config.drain) == (False, "mask", 4, True)
    assert config.dmmpts == DMMPTsConfig(0.9, 0.2, False)


@pytest.mark.parametrize("word", ["none", "null", "off"])
def test_command_line_switches_dmmpts_off(command_line, word):
    assert parse(*command_line, "--dmmpts", word).dmmpts is None


def test_command_line_without_dmmpts_has_the_papers(command_line):
    assert parse(*command_line).dmmpts == DMMPTsConfig(0.99, 0.2, True)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("dmmpts:\n  tau: 0.9\n  sigma: 0.1\n  dynamic: false\n", DMMPTsConfig(0.9, 0.1, False)),
        ("dmmpts:\n  tau: 0.9\n", DMMPTsConfig(0.9, 0.2, True)),
        ("dmmpts: null\n", None),
        ("dmmpts: none\n", None),
        ("dmmpts: '{\"sigma\": 0.3}'\n", DMMPTsConfig(0.99, 0.3, True)),
        ("overlong: wrong\n", DMMPTsConfig()),
    ],
)
def test_yaml_file(command_line, tmp_path, lines, expected):
    path = tmp_path / "run.yaml"
    path.write_text(lines + "num_segments: 2\nmax_staleness: 3\n")
    start = command_line.index("--num_segments")
    del command_line[start : start + 2]
    config = parse("--config", str(path), *command_line)
    assert config.dmmpts == expected
    assert (config.num_segments, config.segment_length, config.max_staleness) == (2, 32, 3)


def test_command_line_overrides_the_yaml_file(command_line, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("dmmpts:\n  tau: 0.9\n")
    assert parse("--config", str(path), *command_line, "--dmmpts", "none").dmmpts is None


# ------------------------------------------------------------------------------------------------------ derived figures


@pytest.mark.parametrize(
    ("length", "segments", "expected"),
    [(64, 4, 16), (65, 4, 17), (64, 1, 64), (3, 8, 1), (131_072, 8, 16_384), (98_304, 8, 12_288)],
)
def test_segment_length_is_rounded_up(make, length, segments, expected):
    assert make(max_completion_length=length, num_segments=segments).segment_length == expected


def test_given_segment_length_stays(make):
    assert make(segment_length=40).segment_length == 40
    assert make(segment_length=16).segment_length == 16  # exactly enough


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "accumulation", "micro_steps", "updates"),
    [(1, 1, 1, 1, 1), (4, 1, 4, 4, 1), (4, 2, 4, 8, 2), (4, 1, 2, 4, 2), (1, 1, 4, 1, 1), (3, 1, 2, 3, 2)],
)
def test_updates_per_batch(make, steps_per_generation, num_iterations, accumulation, micro_steps, updates):
    config = make(
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        gradient_accumulation_steps=accumulation,
    )
    assert config.groups_per_batch == 2 * steps_per_generation
    assert (config.micro_steps_per_batch, config.updates_per_batch) == (micro_steps, updates)


def test_default_inflight_is_num_segments_batches(make):
    assert make().max_inflight_groups == 4 * 2
    assert make(num_segments=1).max_inflight_groups == 2
    assert make(max_inflight_groups=2).max_inflight_groups == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_staleness": 0}, 2),  # one batch of two groups
        ({"max_staleness": 2}, 6),  # three batches
        ({"max_staleness": 99}, 8),  # no more than num_segments batches
        ({"max_staleness": 1, "num_iterations": 2}, 2),  # a batch feeds versions 0 and 1: no room for a second batch
        ({"max_staleness": 2, "num_iterations": 2}, 2),
        ({"max_staleness": 3, "num_iterations": 2}, 4),
        ({"max_staleness": 2, "max_inflight_groups": 6}, 6),
        ({"max_staleness": 2, "max_inflight_groups": 3}, 3),
    ],
)
@pytest.mark.filterwarnings("ignore:`max_staleness`")
def test_inflight_under_max_staleness(make, fields, expected):
    assert make(**fields).max_inflight_groups == expected


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSALS = {
    "batch": (
        {"per_device_train_batch_size": 6},
        [
            "`generation_batch_size` (6)",
            "multiple of `num_generations` (4)",
            "change one of them, or `num_generations`",
        ],
    ),
    "batch, named directly": (
        {"per_device_train_batch_size": 3, "generation_batch_size": 6},
        ["`generation_batch_size` (6)", "`per_device_train_batch_size` (3) x processes (1) x", "change one of them"],
    ),
    "segments too short": (
        {"segment_length": 15},
        [
            "`segment_length` (15) times `num_segments` (4) is below `max_completion_length` (64)",
            "more segments than stated",
            "Raise `num_segments` to at least 5, lower `max_completion_length`, or leave `segment_length` out.",
        ],
    ),
    "no segment length": ({"segment_length": 0}, ["`segment_length` (0)", "at least 1, or left out"]),
    "negative segment length": ({"segment_length": -16}, ["`segment_length` (-16)", "at least 1, or left out"]),
    "no segments": ({"num_segments": 0}, ["`num_segments` (0)", "whole number of at least 1"]),
    "negative segments": ({"num_segments": -2}, ["`num_segments` (-2)", "at least 1"]),
    "no completion": ({"max_completion_length": 0}, ["`max_completion_length` (0)", "at least 1"]),
    "no limit": ({"max_completion_length": None}, ["`max_completion_length` (None)", "at least 1"]),
    "continuous": (
        {"rollout_schedule": "continuous"},
        ["`rollout_schedule='continuous'`", "gives back rollouts at any token", "Set `use_vllm=True`"],
    ),
    "continuous on policy": (
        {"rollout_schedule": "continuous", "use_vllm": True, "num_segments": 1},
        ["`num_segments` (1)", "rollouts of one policy", "Set `num_segments` to 2 or more"],
    ),
    "more slots than rollouts": (
        {"rollout_schedule": "continuous", "use_vllm": True, "rollout_slots": 33, "max_inflight_groups": 8},
        [
            "`rollout_slots` (33)",
            "the rollouts that may be held (32 = `max_inflight_groups` 8",
            "raise `max_inflight_groups`",
        ],
    ),
    "more slots than the staleness leaves room for": (
        {"rollout_schedule": "continuous", "use_vllm": True, "rollout_slots": 20, "max_staleness": 1},
        ["`rollout_slots` (20)", "(16 = `max_inflight_groups` 4", "Change it"],
    ),
    "fewer sequences than slots": (
        {"rollout_schedule": "continuous", "use_vllm": True, "decode_batch_size": 2},
        ["`decode_batch_size` (2)", "fewer than `rollout_slots` (16)", "set `rollout_slots` to 2"],
    ),
    "a server's own limits": (
        {"use_vllm": True, "vllm_mode": "server", "decode_batch_size": 2},
        ["`decode_batch_size` (2)", "no effect on a vLLM server", "`--max-num-seqs`"],
    ),
    "a server's own length": (
        {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 99},
        ["`vllm_max_model_length` (99)", "`--max-model-len`"],
    ),
    "no slots": ({"rollout_slots": 0}, ["`rollout_slots` (0)", "at least 1, or left out"]),
    "slots": (
        {"rollout_slots": 16},
        ["`rollout_slots` (16)", "belongs to `rollout_schedule='continuous'`", "`max_inflight_groups`"],
    ),
    "in flight below a batch": (
        {"max_inflight_groups": 1},
        ["`max_inflight_groups` (1)", "at least one batch of groups (2", "Raise it, or leave it out"],
    ),
    "none in flight": ({"max_inflight_groups": 0}, ["`max_inflight_groups` (0)", "or left out"]),
    "negative staleness": (
        {"max_staleness": -1},
        ["`max_staleness` (-1)", "at least 0, or left out"],
    ),
    "staleness below the updates of a batch": (
        {"max_staleness": 1, "num_iterations": 3},
        [
            "`max_staleness` (1) can't be met",
            "a batch feeds 3 optimizer steps, so the last is 2 versions after the first",
            "Raise it to at least 2, or lower `num_iterations` or `steps_per_generation`.",
        ],
    ),
    "in flight above what staleness allows": (
        {"max_staleness": 2, "max_inflight_groups": 7},
        [
            "`max_inflight_groups` (7) can't be held under `max_staleness` (2)",
            "leaves room for 6 groups",
            "Leave `max_inflight_groups` out, or raise `max_staleness`.",
        ],
    ),
    "drain, updates across batches": (
        {"drain": True, "num_iterations": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
        ["`drain` can't be met", "feeds 3 backward passes", "an update takes 2", "Make one a multiple of the other."],
    ),
    "drain, end inside a batch": (
        {"drain": True, "num_iterations": 2, "max_steps": 5},
        ["`drain` can't be met: `max_steps` (5) ends inside a batch", "Make `max_steps` a multiple of 2."],
    ),
    "greedy": (
        {"temperature": 0.0},
        ["`temperature` (0.0) must be positive", "log-probabilities are taken at it"],
    ),
    "negative temperature": ({"temperature": -1.0}, ["`temperature` (-1.0) must be positive"]),
    "undefined temperature": ({"temperature": math.nan}, ["`temperature` (nan) must be positive"]),
    "a second way to save on a signal": (
        {"enable_jit_checkpoint": True},
        ["`enable_jit_checkpoint=True` saves in the middle of an update", "Leave it off", "`graceful_stop`"],
    ),
    "what to do without rollouts": (
        {"resume_rollout": "drop"},
        ["`resume_rollout` ('drop')", "one of 'strict', 'discard'"],
    ),
    "vLLM's mode": ({"vllm_mode": "served"}, ["`vllm_mode` ('served')", "one of 'colocate', 'server'"]),
    "sampling parameters behind the engine": (
        {"use_vllm": True, "generation_kwargs": {"do_sample": True, "seed": 1}},
        ["`generation_kwargs` holds ['do_sample', 'seed']", "take as `SamplingParams`", "fields of their own"],
    ),
    "structured outputs": (
        {"use_vllm": True, "vllm_structured_outputs_regex": r"\d+"},
        ["`vllm_structured_outputs_regex` ('\\\\d+')", "start again in every segment", "Remove it"],
    ),
    "no room in vLLM": (
        {"use_vllm": True, "vllm_max_model_length": 64},
        [
            "`vllm_max_model_length` (64) leaves no room for a prompt before `max_completion_length` (64)",
            "Set it to the longest prompt plus `max_completion_length`, or leave it out",
        ],
    ),
    "uneven engines": (
        {"use_vllm": True, "vllm_tensor_parallel_size": 2},
        ["`vllm_tensor_parallel_size` (2) does not divide the number of processes (1)", "Change one of the two."],
    ),
    "continuous batching": (
        {"use_transformers_continuous_batching": True},
        ["`use_transformers_continuous_batching=True`", "which segments need", "Leave it off."],
    ),
    "sequence correction": (
        {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"},
        [
            "`vllm_importance_sampling_mode` ('sequence_mask')",
            "sums the log-ratio over a completion",
            "Set `vllm_importance_sampling_correction=False`, or use a token-level mode with `num_segments=1`.",
        ],
    ),
    "sequence correction, one segment": (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "num_segments": 1,
        },
        ["`vllm_importance_sampling_mode` ('sequence_truncate')", "Set `vllm_importance_sampling_correction=False`"],
    ),
    "token correction": (
        {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"},
        ["with `num_segments` (4)", "undoes POIS", "Set it to False", "use `importance_mode='sais'`."],
    ),
    "token correction, SAIS": (
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "importance_mode": "sais",
            "num_segments": 1,
        },
        ["`importance_mode='sais'`", "the ratio would be squared", "Leave the correction off."],
    ),
    "sequence ratio with DMMPTs": (
        {"importance_sampling_level": "sequence"},
        ["`importance_sampling_level='sequence'`", "no clear effect", "or set `dmmpts=None`."],
    ),
    "truncation said twice": (
        {"mask_truncated_completions": True},
        ["`mask_truncated_completions=True`", "`overlong` ('wrong')", "set `overlong='mask'`."],
    ),
    "truncation said twice, alike": (
        {"mask_truncated_completions": True, "overlong": "mask"},
        ["`mask_truncated_completions=True`", "`overlong` ('mask')", "Remove it"],
    ),
    "a mean over rows that join": (
        {"dynamic_micro_batches": True, "loss_type": "grpo"},
        ["`loss_type` ('grpo')", "'dapo', 'cispo', 'vespo'", "leave `dynamic_micro_batches` out"],
    ),
    "cache without soft": (
        {"overlong_cache_length": 8},
        ["`overlong_cache_length` (8)", "belongs to `overlong='soft'` (here 'wrong')", "Leave it out for a fifth"],
    ),
    "no cache": (
        {"overlong": "soft", "overlong_cache_length": 0},
        ["`overlong_cache_length` (0)", "at least 1, or left out"],
    ),
    "cache beyond the limit": (
        {"overlong": "soft", "overlong_cache_length": 65},
        ["`overlong_cache_length` (65)", "(0, `max_completion_length` = 64]", "Leave it out for a fifth"],
    ),
    "importance mode": ({"importance_mode": "tois"}, ["`importance_mode` ('tois')", "one of 'pois', 'sais'"]),
    "overlong": ({"overlong": "filter"}, ["`overlong` ('filter')", "one of 'wrong', 'mask', 'soft'"]),
    "no update": ({"num_iterations": 0}, ["`num_iterations` (0)", "at least 1"]),
    "no generation": ({"num_generations": 0}, ["`num_generations` (0)", "at least 2"]),
    "half a segment": ({"num_segments": 2.5}, ["`num_segments` (2.5)", "whole number"]),
    "half a group": ({"max_inflight_groups": 2.5}, ["`max_inflight_groups` (2.5)", "whole number"]),
    "undefined staleness": ({"max_staleness": math.nan}, ["`max_staleness` (nan)", "whole number"]),
    "endless temperature": ({"temperature": math.inf}, ["`temperature` (inf) must be positive"]),
    "no nucleus": ({"top_p": 0.0}, ["`top_p` (0.0) must be in (0, 1]; 1 is off"]),
    "nucleus above one": ({"top_p": 1.5}, ["`top_p` (1.5) must be in (0, 1]"]),
    "negative top_k": ({"top_k": -5}, ["`top_k` (-5) must be 0 (off) or more"]),
    "min_p above one": ({"min_p": 1.5}, ["`min_p` (1.5) must be in [0, 1]"]),
    "no repetition": ({"repetition_penalty": 0.0}, ["`repetition_penalty` (0.0) must be positive; 1 is off"]),
    "negative clip range": ({"epsilon": -0.1}, ["`epsilon` (-0.1) must be 0 or more"]),
    "loss": ({"loss_type": "bogus"}, ["`loss_type` ('bogus')", "'dapo'"]),
    "importance level": ({"importance_sampling_level": "bogus"}, ["`importance_sampling_level` ('bogus')", "'token'"]),
    "eos behind the engine": (
        {"generation_kwargs": {"eos_token_id": 5}},
        ["`generation_kwargs` holds ['eos_token_id']", "Remove them"],
    ),
    "temperature behind the log-probs": (
        {"generation_kwargs": {"temperature": 0.3}},
        ["`generation_kwargs` holds ['temperature']", "Use the configuration's own fields"],
    ),
    "forced end behind the engine": (
        {"generation_kwargs": {"forced_eos_token_id": 5}},
        ["`generation_kwargs` holds ['forced_eos_token_id']", "allowed are do_sample"],
    ),
    "no row": ({"decode_batch_size": 0}, ["`decode_batch_size` (0)", "at least 1, or left out"]),
    "schedule": ({"rollout_schedule": "async"}, ["`rollout_schedule` ('async')", "one of 'segment', 'continuous'"]),
}


@pytest.mark.parametrize(
    ("fields", "slots", "inflight"),
    [
        ({}, 16, 12),  # two batches of eight rollouts; a batch of two groups, and 2.5 for each four slots
        ({"rollout_slots": 24}, 24, 17),
        ({"max_inflight_groups": 3}, 12, 3),
        ({"max_staleness": 0}, 8, 2),
    ],
)
def test_slots_and_groups_of_the_continuous_schedule(make, fields, slots, inflight):
    config = make(rollout_schedule="continuous", use_vllm=True, **fields)
    assert (config.rollout_slots, config.max_inflight_groups) == (slots, inflight)


def test_a_tight_bound_does_not_slow_the_continuous_schedule_down(make):
    """It cuts no segments, so no rollout is decoded to its end for the sake of fewer segments."""
    assert own_warnings(make, max_staleness=1)
    assert not own_warnings(make, rollout_schedule="continuous", use_vllm=True, max_staleness=1)


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({}, 32),  # four batches of two groups of four
        ({"max_inflight_groups": 3}, 12),
        ({"rollout_schedule": "continuous"}, 16),
        ({"rollout_schedule": "continuous", "rollout_slots": 4}, 8),  # TRL's evaluation decodes a batch
        ({"decode_batch_size": 5}, 5),
    ],
)
def test_an_engine_has_room_for_every_rollout_in_flight(make, fields, sequences):
    assert make(use_vllm=True, **fields).sequences_per_engine == sequences


def test_rollouts_in_flight_are_shared_out_over_the_engines(make, monkeypatch):
    monkeypatch.setattr(UloRLConfig, "world_size", 4)
    assert make(use_vllm=True, max_inflight_groups=9).sequences_per_engine == 3 * 4
    assert make(use_vllm=True, vllm_tensor_parallel_size=2, max_inflight_groups=9).sequences_per_engine == 5 * 4
    assert make(use_vllm=True, vllm_tensor_parallel_size=2, decode_batch_size=5).sequences_per_engine == 10


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(make, case):
    fields, texts = REFUSALS[case]
    with pytest.raises(ValueError) as caught:
        make(**fields)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "min_length",
        "num_beams",
        "num_return_sequences",
        "stop_strings",
    ],
)
def test_reserved_generation_kwargs(make, name):
    with pytest.raises(ValueError) as caught:
        make(generation_kwargs={name: 2, "do_sample": True})
    for text in (f"`generation_kwargs` holds ['{name}']", "Remove them; the limit is `max_completion_length`."):
        assert text in str(caught.value)


def test_reserved_generation_kwargs_as_json(make):
    with pytest.raises(ValueError, match=r"holds \['num_beams'\]"):
        make(generation_kwargs='{"num_beams": 2}')


def test_other_generation_kwargs_pass(make):
    assert make(generation_kwargs={"do_sample": False}).generation_kwargs == {"do_sample": False}


RESTRICTIONS = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_sais_refuses_another_sampling_distribution(make, name):
    with pytest.raises(ValueError) as caught:
        make(importance_mode="sais", **{name: RESTRICTIONS[name]})
    for text in (
        f"`{name}` ({RESTRICTIONS[name]})",
        "ratios would be biased",
        "Remove it (the paper samples with temperature only), or use `importance_mode='pois'`.",
    ):
        assert text in str(caught.value)


def test_sais_names_all_restrictions_at_once(make):
    with pytest.raises(ValueError, match=r"^`top_p` \(0.9\), `min_p` \(0.1\) changes"):
        make(importance_mode="sais", top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_pois_warns_of_another_sampling_distribution(make, name):
    (message,) = own_warnings(make, **{name: RESTRICTIONS[name]})
    assert f"`{name}` ({RESTRICTIONS[name]}) changes the distribution" in message
    assert "The paper trains with temperature only." in message


def test_sampling_in_full_is_allowed_in_both_modes(make):
    for mode in ("pois", "sais"):
        assert own_warnings(make, importance_mode=mode, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0) == []


def test_warning_where_staleness_brings_the_long_tail_back(make):
    (message,) = own_warnings(make, max_staleness=2)
    assert "`max_staleness` (2) is below `num_segments` - 1 (3)" in message
    assert "Use fewer segments or allow more staleness." in message
    assert own_warnings(make, max_staleness=3) == []


# ------------------------------------------------------------------------------------------- what is allowed beside them


@pytest.mark.parametrize(
    "fields",
    [
        {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_mask",
            "num_segments": 1,
        },
        {"importance_sampling_level": "sequence", "dmmpts": None},
        {"drain": True, "num_iterations": 2, "max_steps": 4},
        {"drain": True, "gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 3},
        {"max_staleness": 2, "num_iterations": 3, "num_segments": 1},
        {"overlong": "mask"},
        {"dynamic_micro_batches": True, "loss_type": "cispo"},
        {"overlong": "soft", "overlong_cache_length": 64},
        {"use_vllm": True, "vllm_max_model_length": 65},
    ],
)
def test_neighbours_of_refusals_are_allowed(make, fields):
    config = make(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_soft_punishment_covers_a_fifth_of_the_limit(make):
    assert make(overlong="soft").overlong_cache_length == 12  # 64 // 5
    assert make(overlong="wrong").overlong_cache_length is None


def test_the_papers_spelling_of_no_top_k_is_understood(make):
    assert make(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("micro", "accumulation", "updates"), [(1, 1, 1), (3, 1, 3), (1, 4, 1), (4, 2, 2), (2, 3, 2), (3, 2, 2), (5, 2, 3)]
)
def test_updates_that_a_batch_can_span(make, micro, accumulation, updates):
    """Counted at every place where a batch can begin within an update."""
    spans = {
        (start % accumulation + micro - 1) // accumulation + 1 for start in range(0, 12 * micro * accumulation, micro)
    }
    assert max(spans) == updates
    config = make(num_iterations=micro, steps_per_generation=1, gradient_accumulation_steps=accumulation)
    assert config.updates_per_batch == updates


@pytest.mark.parametrize(
    ("value", "remedy"),
    [({"tau": "0.9"}, "such as 2e-1, as text"), ({"dynamic": "false"}, "without quotes"), ({1: 2}, "unknown keys")],
)
def test_dmmpts_of_the_wrong_type(make, value, remedy):
    with pytest.raises((TypeError, ValueError), match=remedy):
        make(dmmpts=value)
