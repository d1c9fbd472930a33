"""A real HTTP server on loopback that speaks as much of OpenAI's API as the package needs, and fails as it is told to."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "judge-1"


class JudgeServer:
    """Answers chats with what a function of the messages returns, and texts with what it returns for these.

    A function that returns a pair says why the answer ended, too: "stop" or "length". Tokens are words.

    Attributes:
        script: What happens to the next requests, one entry each: an HTTP status, `"hang"`, `"trickle"` (a byte now and
            then, without an end), `"break"` (the connection), or a text that is sent as the body of a 200. Requests
            beyond the script are answered.
        seen: Headers (their names in lower case) and body of each request.
        most_open: Most requests that were open at a time.
    """

    def __init__(self, answer, *, delay=0.0):
        self.answer = answer
        self.delay = delay
        self.script = deque()
        self.seen = []
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self.http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server, *args):
        self.judge_server = server
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def do_POST(self):
        server = self.judge_server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(({name.lower(): value for name, value in self.headers.items()}, body))
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
            event = server.script.popleft() if server.script else None
        try:
            self.respond(event, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with server.lock:
                server.num_open -= 1

    def do_GET(self):
        if self.path == "/v1/models":
            self.send_json(200, json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:
            self.send_json(404, json.dumps({"error": {"message": f"There is no {self.path}."}}))

    def respond(self, event, body):
        server = self.judge_server
        if event == "hang":
            server.released.wait(30)
        elif event == "break":
            self.close_connection = True
        elif event == "trickle":
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not server.released.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        elif isinstance(event, int):
            # As some servers do, it repeats the key that it was sent.
            self.send_json(event, json.dumps({"error": {"message": f"refused {self.headers['Authorization']}"}}))
        elif isinstance(event, str):
            self.send_json(200, event)
        elif self.path not in ("/v1/chat/completions", "/v1/completions") or body["model"] != MODEL:
            self.send_json(404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}}))
        else:
            server.released.wait(server.delay)
            self.send_json(200, completion(server.answer(body.get("messages") or body["prompt"]), "prompt" in body))

    def send_json(self, status, text):
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def completion(answer, is_plain=False):
    content, reason = answer if isinstance(answer, tuple) else (answer, "stop")
    said = {"text": content} if is_plain else {"message": {"role": "assistant", "content": content}}
    length = len(content.split()) if isinstance(content, str) else 0
    return json.dumps(
        {
            "id": "1",
            "object": "text_completion" if is_plain else "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "finish_reason": reason, **said}],
            "usage": {"prompt_tokens": 1, "completion_tokens": length, "total_tokens": 1 + length},
        }
    )
