"""Publishing, against a stand-in of the Hub's HTTP interface on this machine: what arrives there is what was trained."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

pytestmark = pytest.mark.slow

DEMO = str(Path(__file__).parents[2] / "examples" / "configs" / "demo.yaml")
TOKEN = "hf_stand_in"


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits in the form in which huggingface_hub sends them; every file is a regular one."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Request)
        self.repositories = {}
        self.messages = []
        self.refused = []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/api/whoami-v2":
            self.answer({"name": "someone", "type": "user", "orgs": []})
        else:
            self.refuse(404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401)
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
            self.server.repositories.setdefault(name, {})
            self.answer({"url": f"{self.server.endpoint}/{name}", "id": name})
        elif self.path == "/api/validate-yaml":
            _, metadata, _ = json.loads(body)["content"].split("---\n", 2)
            values = yaml.safe_load(metadata)
            errors = [] if isinstance(values.get("tags"), list) else [{"message": "no tags"}]
            self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif self.repository_of("preupload"):
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": modes})
        elif name := self.repository_of("commit"):
            self.commit(self.server.repositories[name], [json.loads(line) for line in body.splitlines()])
            self.answer({"commitUrl": f"{self.server.endpoint}/{name}/commit/1", "commitOid": "1" * 40})
        else:
            self.refuse(404)

    def commit(self, files, lines):
        for line in lines:
            if line["key"] == "header":
                self.server.messages.append(line["value"]["summary"])
            else:
                assert (line["key"], line["value"]["encoding"]) == ("file", "base64")
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])

    def repository_of(self, action):
        """The name in `/api/models/NAME/ACTION/main`, if there is such a repository."""
        name = self.path.removeprefix("/api/models/").removesuffix(f"/{action}/main")
        return name if name in self.server.repositories and self.path == f"/api/models/{name}/{action}/main" else None

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def refuse(self, status):
        self.server.refused.append(f"{self.command} {self.path}")
        self.answer({"error": "refused"}, status)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def train(hub, folder, *arguments, token=TOKEN):
    command = [sys.executable, "-m", "trl_ulorl.cli", "train", "--config", DEMO, "--output_dir", str(folder)]
    command += ["--max_steps", "2", "--eval_problems", "4", "--eval_k", "2", "--per_device_train_batch_size", "16"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_trained_model_arrives_with_its_card(hub, tmp_path):
    folder = tmp_path / "run"
    done = train(hub, folder, "--push_to_hub", "True", "--hub_model_id", "someone/mine")
    assert done.returncode == 0, done.stderr[-4000:]
    files = hub.repositories["someone/mine"]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md", "summary.json"):
        assert files[name] == (folder / name).read_bytes(), name
    assert "End of training" in hub.messages
    assert (
        folder / "_samples.json"
    ).exists() and "_samples.json" not in files  # prompts and completions are the user's
    card = ModelCard(files["README.md"].decode())
    assert {"ulorl", "trl", "grpo"} <= set(card.data.tags)
    assert card.data.datasets is None  # the embedded task is none of the Hub's
    for text in (
        'model="someone/mine"',
        "of up to 128 tokens, in segments of 32",
        "**POIS** importance sampling",
        "**DMMPTs**: positive tokens of a probability above 0.99",
        "| `num_segments` | 4 |",
        "| `temperature` | 0.85 |",
        "| accuracy of the groups completed in a step |",
        "| token entropy, nats |",
        "| completion length, mean of a step, tokens |",
        "@article{du2025ulorl",
        "https://huggingface.co/papers/2507.19766",
    ):
        assert text in card.text, text
    assert "[None]" not in card.text and '"None"' not in card.text
    summary = json.loads(files["summary.json"])
    assert f"| groups | {summary['ledger']['groups']['admitted']} admitted |" in card.text
    assert f"| 0 | {summary['accuracy_before']:.1%} ± {100 * summary['standard_error_before']:.1f} |" in card.text
    assert f"| 2 | {summary['accuracy_after']:.1%} ± {100 * summary['standard_error_after']:.1f} |" in card.text


def test_a_token_that_is_refused_is_told_before_training(hub, tmp_path):
    done = train(hub, tmp_path / "run", "--push_to_hub", "True", "--hub_model_id", "someone/mine", token="hf_wrong")
    assert done.returncode == 2
    assert "trl-ulorl train: " in done.stderr and "401" in done.stderr
    assert not hub.repositories and not (tmp_path / "run" / "model.safetensors").exists()
