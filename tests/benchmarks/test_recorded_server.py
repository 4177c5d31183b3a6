"""The server that answers with recorded texts, before a stand-in for vLLM."""

import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress

import polars as pl
import pytest

from benchmarks.recorded_server import with_text
from tasks.synthesis.vllm import free_port
from tests.support.waiting import until

CODE = "class Model:\n    pass\n"
TEXTS = ["a" * 36, "b" * 360]
INNER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"at": self.path, "key": self.headers.get("authorization")})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": json.dumps(asked)}
        choice = {"message": message, "finish_reason": "length"}
        self.reply({"choices": [choice], "usage": {"completion_tokens": asked["max_tokens"]}})
    def reply(self, body):
        body = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """The address of one with two responses to a task."""
    ids = {"level": [1], "problem_id": [1]}
    pl.DataFrame(ids | {"code": [CODE]}).write_parquet(tmp_path / "tasks.parquet")
    rows = {"level": [1, 1], "problem_id": [1, 1], "sample_id": [0, 1], "response": TEXTS}
    pl.DataFrame(rows).write_parquet(tmp_path / "responses.parquet")
    (tmp_path / "inner.py").write_text(INNER)
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.recorded_server"]
    command += ["--tasks", str(tmp_path / "tasks.parquet"), "--claims", str(tmp_path / "claims")]
    command += ["--responses", str(tmp_path / "responses.parquet"), "--", sys.executable]
    command += [str(tmp_path / "inner.py"), "model", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command) as process:
        address = f"http://127.0.0.1:{port}"
        until(lambda: answers(f"{address}/health"), "an answer of the server behind")
        yield address
        process.terminate()
        assert process.wait(120) == 256 - signal.SIGTERM, "it ends as what is behind it ended"


def answers(url):
    with suppress(OSError):  # it is not up, or what is behind it is not
        return ask(url)


def ask(url, body=None):
    content = None if body is None else json.dumps(body).encode()
    headers = {"authorization": "Bearer k", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, content, headers)) as answer:
        return json.loads(answer.read())


def chat(address, prompt, max_tokens):
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    return ask(f"{address}/v1/chat/completions", body)


def test_it_writes_as_many_tokens_as_a_recorded_answer_and_gives_each_once(server):
    assert ask(f"{server}/v1/models") == {"at": "/v1/models", "key": "Bearer k"}
    prompt = f"Optimise\n{CODE}\nplease"
    answers = [chat(server, prompt, 50) for _ in range(3)]
    choices = [each["choices"][0] for each in answers]
    assert [each["usage"]["completion_tokens"] for each in answers] == [10, 50, 10]
    assert [each["message"]["content"] for each in choices] == [TEXTS[0], "b" * 180, TEXTS[0]]
    assert [each["finish_reason"] for each in choices] == ["stop", "length", "stop"]


def test_other_prompts_are_passed_on_as_they_are(server):
    answer = chat(server, "What is a kernel?", 50)["choices"][0]["message"]["content"]
    assert json.loads(answer)["max_tokens"] == 50 and "ignore_eos" not in json.loads(answer)


def test_reasoning_of_the_model_is_not_left_beside_a_recorded_text():
    choice = {"message": {"content": "x", "reasoning_content": "y"}, "finish_reason": "length"}
    answer = {"choices": [choice], "usage": {"completion_tokens": 10}}
    assert with_text(answer, TEXTS[0])["choices"][0]["message"]["reasoning_content"] is None
