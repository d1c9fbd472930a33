"""`trl-ulorl eval --engine vllm`."""

import json
import subprocess
import sys

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_helpers import TOLERANCE, environment_of_a_process, needs_vllm

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.evaluation.engines import EvaluationSettings, build_engine, load_config, load_tokenizer
from trl_ulorl.positions import extended_positions
from trl_ulorl.rollout.engine import DecodeRequest

pytestmark = needs_vllm


def evaluate(output):
    command = [sys.executable, "-m", "trl_ulorl.cli", "eval", "--model", "embedded", "--dataset", "arithmetic"]
    command += ["--k", "4", "--temperature", "0.85", "--top_p", "1.0", "--top_k", "0", "--num_problems", "64"]
    command += ["--max_completion_length", "128", "--engine", "vllm", "--output", str(output)]
    environment = environment_of_a_process()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return json.loads(output.read_text())


def test_the_figures_of_the_transformers_engine_and_a_restart(tmp_path):
    output, samples = tmp_path / "run.json", tmp_path / "run.samples.jsonl"
    values = evaluate(output)
    # The transformers engine gets 49.2 % of these problems right (seed 42, four answers each, standard error 3.9).
    assert abs(values["avg_at_k"] - 0.492) < 3 * values["standard_error"]
    assert values["truncated_fraction"] < 0.05 and values["lengths"]["max"] <= 128
    lines = samples.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 64 * 4
    samples.write_text("".join(lines[:150]))  # as if it had been stopped
    output.unlink()
    again = evaluate(output)
    assert samples.read_text().startswith("".join(lines[:150]))
    assert again["num_samples"] == 4 and len(again["problems"]) == 64


def test_yarn_reaches_the_engine():
    folder = str(embedded_model_path())
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    settings = EvaluationSettings(
        folder, 4, top_p=1.0, top_k=0, engine="vllm", batch_size=4, dtype="float32", rope_parameters=json.dumps(yarn)
    )
    config, tokenizer = load_config(settings), load_tokenizer(settings)
    assert config.max_position_embeddings == 1024
    engine, end = build_engine(settings, config, tokenizer, Accelerator(cpu=True), max_model_length=1024, num_kept=0)
    prompt = np.asarray(tokenizer("1+2-3+4=")["input_ids"], dtype=np.int32)
    try:
        assert engine.max_model_length == 1024
        decoded = list(engine.decode([DecodeRequest(prompt, 100)] * 4))
    finally:
        end()
    gaps = {}
    for name, kwargs in {"yarn": extended_positions(AutoConfig.from_pretrained(folder), yarn), "own": {}}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
        gaps[name] = max(gap_of(model, prompt, each) for each in decoded)
    assert gaps["yarn"] < TOLERANCE < gaps["own"], gaps


def gap_of(model, prompt, decoded):
    ids = torch.from_numpy(np.concatenate([prompt, decoded.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logps = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / 0.85, dim=-1)
    own = logps.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(own - decoded.per_token_logps).max())
