"""The documents' Python that trains, or asks a server: run as it stands, but for a small model and local rows."""

import pytest
from doc_blocks import RUN_WITH_STAND_INS, run_page
from judge_server import MODEL, JudgeServer
from test_judge_endpoint import honest

from trl_ulorl.data.arithmetic import arithmetic_dataset, embedded_model_path

pytestmark = pytest.mark.slow

EMBEDDED = f'"{embedded_model_path()}"'
ON_A_CPU = 'use_cpu=True, bf16=False, report_to="none"'
SMALL = {
    '"Qwen/Qwen3-4B"': EMBEDDED,
    "from datasets import load_dataset": "",
    'load_dataset("trl-lib/DeepMath-103K", split="train")': "rows",
}


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows():
    return {"rows": arithmetic_dataset(64, seed=0, split="train")}


def test_each_page_has_its_test():
    names = {name.removeprefix("test_page_") for name in globals() if name.startswith("test_page_")}
    assert names == {name.lower() for name in RUN_WITH_STAND_INS}


def first_example(name, rows):
    smaller = {
        "max_completion_length=32_768": "max_completion_length=128",
        "num_segments=4,": f"num_segments=4, max_steps=1, {ON_A_CPU},",
        "gradient_accumulation_steps=128": "gradient_accumulation_steps=16",
        "use_vllm=True,": "",  # tests/vllm_cpu
        "vllm_enable_sleep_mode=True,": "",
    }
    trainer = run_page(name, SMALL | smaller, rows)["trainer"]
    assert trainer.state.global_step == 1
    assert trainer.ledger()["groups"]["trained"] == 2


def test_page_readme(rows, in_a_folder):
    first_example("README", rows)


def test_page_index(rows, in_a_folder):
    first_example("index", rows)


def test_page_quickstart(in_a_folder):
    smaller = {
        "max_steps=50": 'max_steps=1, save_strategy="no", report_to="none"',
        "per_device_train_batch_size=32": "per_device_train_batch_size=8",
    }
    assert run_page("quickstart", smaller)["trainer"].ledger()["groups"]["trained"] == 4


def test_page_resume(rows, in_a_folder):
    def steps(number):
        return SMALL | {
            "max_completion_length=16_384": "max_completion_length=32",
            "gradient_accumulation_steps=16,": "",
            "save_steps=10": f"save_steps=1, max_steps={number}, {ON_A_CPU}",
        }

    run_page("resume", steps(1) | {"resume_from_checkpoint=True": ""}, rows)
    trainer = run_page("resume", steps(2), rows)["trainer"]
    assert trainer.state.global_step == 2
    assert trainer.ledger()["groups"]["trained"] == 2, "one of them before it was resumed"


def test_page_judge(in_a_folder, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "key")
    equal = {"half a litre", "500 mL"}
    with JudgeServer(lambda messages: honest(messages) if not _holds(messages, equal) else "EQUIVALENT") as server:
        stand_ins = {
            "http://localhost:8000/v1": server.base_url,
            '"Qwen/Qwen3-4B-Instruct-2507"))': f'"{MODEL}"))',
            '"Qwen/Qwen3-0.6B"': EMBEDDED,
            '"outputs/verifier"': EMBEDDED,
            # tests/vllm_cpu/test_judge_vllm.py
            'VLLMModel("Qwen/Qwen3-4B-Instruct-2507", gpu_memory_utilization=0.1, max_model_len=2048)': "None",
        }
        names = run_page("judge", stand_ins)
    assert names["verdicts"] == [True, False, False]
    assert names["missed"] is not None


def _holds(messages, group):
    return all(each in messages[-1]["content"] for each in group)


def test_page_plan(in_a_folder, capsys):
    run_page("plan")
    assert float(capsys.readouterr().out) > 1, "the continuous schedule is faster"
