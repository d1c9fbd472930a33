"""`trl-ulorl eval --engine endpoint` on `vllm serve`."""

import json

from server_helpers import running_server
from vllm_helpers import needs_vllm

from trl_ulorl.cli import main
from trl_ulorl.data.arithmetic import embedded_model_path

pytestmark = needs_vllm


def evaluate(server, output, *arguments):
    given = ["--model", embedded_model_path(), "--dataset", "arithmetic", "--num_problems", "64", "--k", "4"]
    sampling = ["--temperature", "0.85", "--top_p", "1.0", "--top_k", "0", "--max_completion_length", "128"]
    endpoint = ["--engine", "endpoint", "--base_url", f"{server.base_url}/v1", "--max_retries", "0"]
    return main(["eval", *given, *sampling, *endpoint, "--output", str(output), *arguments])


def test_the_figures_of_the_other_engines_and_a_restart(tmp_path):
    output, samples = tmp_path / "run.json", tmp_path / "run.samples.jsonl"
    with running_server(tmp_path) as server:
        assert evaluate(server, output) == 0
        values = json.loads(output.read_text())
        # The transformers engine gets 49.2 % of these problems right (seed 42, four answers each, standard error 3.9).
        assert abs(values["avg_at_k"] - 0.492) < 3 * values["standard_error"]
        assert values["truncated_fraction"] < 0.05 and values["lengths"]["max"] <= 128
        lines = samples.read_text().splitlines(keepends=True)
        assert len(lines) == 1 + 64 * 4
        cut = [json.loads(line) for line in lines[1:] if json.loads(line)["is_truncated"]]
        assert all(each["length"] == 128 for each in cut)
        samples.write_text("".join(lines[:150]))  # as if it had been stopped
        output.unlink()
        server.kill()
        assert evaluate(server, output) == 2  # it can't be reached
        assert not output.exists()
    with running_server(tmp_path) as server:
        assert evaluate(server, output) == 0
    assert samples.read_text().startswith("".join(lines[:150]))
    assert len(samples.read_text().splitlines()) == 1 + 64 * 4
