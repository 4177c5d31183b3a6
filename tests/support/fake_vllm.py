"""A stand-in for `vllm serve`: the same command line, /health, /v1/models and /v1/chat/completions,
and an engine process of its own.

What it does is said by files in $FAKE_VLLM_DIR, looked at whenever they matter: `refuse_start` (end
with status 3 after a traceback), `never_healthy`, `hold` (answers wait while it exists), `hang`
(nothing is answered any more). It appends its arguments, process ids and environment to
`starts.jsonl`, every request to `asked.jsonl` and every answer to `answers.jsonl`. With
`dies_after_three`, it ends with SIGKILL in the place of its fourth answer, as soon as `die` exists.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOME = Path(os.environ["FAKE_VLLM_DIR"])
ENGINE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    numbers = "max-model-len max-num-seqs max-loras max-lora-rank"
    for name in f"{numbers} tensor-parallel-size data-parallel-size".split():
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in ("--disable-uvicorn-access-log", "--enforce-eager", "--enable-lora"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--lora-modules", nargs="+", default=[])
    return parser.parse_args()


def there(name):
    return (HOME / name).exists()


def note(name, **what):
    with open(HOME / name, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    in_flight = answered = 0
    lock = threading.Lock()

    def do_GET(self):
        while there("hang"):
            time.sleep(0.02)
        if self.path == "/health":
            self.answer(503 if there("never_healthy") else 200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.allowed():
            return
        with Handler.lock:
            Handler.in_flight += 1
        note("asked.jsonl", seed=body["seed"])
        try:
            prompt = body["messages"][0]["content"]
            while there("hold") or there("hang"):
                time.sleep(0.02)
            with Handler.lock:
                if Handler.answered == 3 and there("dies_after_three"):
                    while not there("die"):
                        time.sleep(0.02)
                    os.kill(os.getpid(), signal.SIGKILL)
                Handler.answered += 1
            model, seed = body["model"], body["seed"]
            note("answers.jsonl", port=self.options.port, model=model, prompt=prompt, seed=seed)
            message = {"role": "assistant", "content": f"{model} says {prompt} {seed}"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
            said = {"id": "x", "object": "chat.completion", "created": 0, "model": model}
            self.answer(200, said | {"choices": [choice], "usage": usage})
        finally:
            with Handler.lock:
                Handler.in_flight -= 1

    def allowed(self):
        fine = self.headers["authorization"] == f"Bearer {os.environ['VLLM_API_KEY']}"
        if not fine:
            self.answer(401, {"error": {"message": "Unauthorized"}})
        return fine

    def log_message(self, *args):
        """No access log, as asked."""

    def answer(self, status, content):
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def main():
    options = Handler.options = arguments()
    if there("refuse_start"):
        print(
            "Traceback (most recent call last):\nValueError: the model has no such window",
            file=sys.stderr,
        )
        sys.exit(3)
    # as vLLM's engine: a process of its own, here in a session of its own that shrugs off SIGTERM,
    # the hardest case
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], start_new_session=True)
    note(
        "starts.jsonl", argv=sys.argv[1:], pid=os.getpid(), engine=engine.pid, env=dict(os.environ)
    )
    ThreadingHTTPServer.request_queue_size = 256  # as many as connect at once
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True

    def end(*_):
        """What is in flight is answered before the end, as vLLM does."""

        def drain():
            while Handler.in_flight:
                time.sleep(0.02)
            server.shutdown()

        threading.Thread(target=drain).start()

    signal.signal(signal.SIGTERM, end)
    print("Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
