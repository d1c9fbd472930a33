"""A real vLLM server in a process of its own, and a small stand-in that fails as it is told to."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from trl_ulorl.data.arithmetic import embedded_model_path
from trl_ulorl.rollout.vllm_server import ServedVLLM

START_SECONDS = 240
VOCABULARY, HIDDEN = 103, 128  # the embedded model's
MAX_MODEL_LEN = 480  # below its 512 positions


def connect(base_url, folder, **overrides):
    """Build TRL's back end alone, for the embedded model."""
    values = {"server_timeout": 10, "temperature": 0.85, "max_completion_length": 64}
    model = overrides.pop("model", None) or AutoModelForCausalLM.from_pretrained(embedded_model_path())
    return ServedVLLM(
        model,
        Accelerator(cpu=True),
        None,
        mode="server",
        server_base_url=base_url,
        output_dir=str(folder),
        **{**values, **overrides},
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`vllm serve` on the embedded model, on this machine only."""

    def __init__(self, log_file):
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", embedded_model_path()]
        command += ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--max-num-seqs",
            "64",
            "--max-model-len",
            str(MAX_MODEL_LEN),
        ]
        environment = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.log_file = log_file
        with log_file.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self):
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.base_url}/health", timeout=5).close()
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start:\n{self.log_file.read_text()[-4000:]}")
            time.sleep(0.5)

    def kill(self):
        """End it without a chance to say anything: its workers are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        self.kill()


@contextlib.contextmanager
def running_server(folder):
    server = Server(folder / "server.log")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


class FakeServer:
    """Speaks as much of vLLM's language as the engine does; what it does wrong is set in its attributes.

    The token at position `p` of a sequence is `4 + p % 7` with the log-probability `-p / 64`, so that a sequence that was
    broken off and taken up again can be told from one that lost or repeated a token.

    Attributes:
        script: What happens to the next requests for completions, one entry each: `("break", n)` sends n tokens and
            breaks the connection, `("status", code)` refuses, `("length", n)` ends early, `("null", n)` sends a token
            without a log-prob after n, `("silent", 0)` never answers.
    """

    def __init__(self):
        self.script = deque()
        self.requests = []
        self.has_dev_mode = True
        self.instance_id = "1"
        self.model_config = {
            "model": "/models/policy",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": MAX_MODEL_LEN,
        }
        self.inspection = f"VocabParallelEmbedding(embedding_dim={HIDDEN}, org_vocab_size={VOCABULARY})"
        self.can_reload = True
        self.resets = [True]
        self.released = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self.http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path, body):
        """Return status and JSON value for everything but completions."""
        if path in ("/health", "/v1/models"):
            return 200, {"data": [{"id": "policy"}]}
        if not self.has_dev_mode:
            return 404, {}
        if path == "/server_info":
            return 200, {"vllm_config": {"model_config": self.model_config, "instance_id": self.instance_id}}
        if path == "/reset_prefix_cache":
            return 200, {"success": self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]}
        if path == "/collective_rpc" and body["method"] == "get_model_inspection":
            return 200, {"results": [self.inspection]}
        if path == "/collective_rpc":
            return (200, {"results": [None]}) if self.can_reload else (500, {"error": "Cannot find any model weights"})
        return 404, {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server, *args):
        self.fake = server
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer(*self.fake.answer(self.path.split("?")[0], None))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/v1/completions":
            self._complete(body)
        else:
            self._answer(*self.fake.answer(self.path, body))

    def _answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _complete(self, body):
        self.fake.requests.append(body)
        kind, number = self.fake.script.popleft() if self.fake.script else ("finish", body["max_tokens"])
        if kind == "status":
            return self._answer(number, {"error": {"message": "told to"}})
        if kind == "silent":
            self.fake.released.wait()
            self.close_connection = True
            return None
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        start = len(body["prompt"])
        for position in range(start, start + number):
            reason = "length" if kind != "break" and position == start + number - 1 else None
            self._send(4 + position % 7, -position / 64, reason)
        if kind == "null":
            self._send(4, None, None)
        if kind == "break":
            self.close_connection = True
            return None
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _send(self, token, logp, reason):
        logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [logp]}
        message = {"choices": [{"logprobs": logprobs, "finish_reason": reason}]}
        self._chunk(b"data: " + json.dumps(message).encode() + b"\n\n")

    def _chunk(self, content):
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()
