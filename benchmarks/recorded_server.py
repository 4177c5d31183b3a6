"""A vLLM server that answers with recorded texts: for measuring a whole refresh with a model of
dummy weights, whose own answers hold no kernel.

    synthesis:
      sampler: vllm
      server:
        command: >-
          python -m benchmarks.recorded_server --tasks kernelbench.parquet --responses
          qwq32b_candidates.parquet --claims DIR -- vllm serve

Starts the command after `--` on another port and passes every request on. For a chat completion it
looks for the task whose code the prompt holds, has the server write as many tokens as the next
recorded response of that task has (3.6 characters a token, up to the request's `max_tokens`;
`ignore_eos`), and puts the recorded text in the place of what was written. So the time and the
answers are real, and the two do not belong together. A response is given once by all servers that
share `--claims`; after the last of a task they begin again. Needs polars.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import polars as pl

from kernels_eval.records import stable_hash
from tasks.synthesis.vllm import free_port

CHARACTERS_A_TOKEN = 3.6
"""Of QwQ-32B's answers about KernelBench; no tokenizer was at hand to count them."""
UNAVAILABLE = 503
PASSED_ON = ("authorization", "content-type")


class Recorded:
    """Responses by the code of their task."""

    def __init__(self, tasks: Path, responses: Path, claims: Path) -> None:
        rows = pl.read_parquet(responses).join(
            pl.read_parquet(tasks).select("level", "problem_id", "code"), ("level", "problem_id")
        )
        self.texts = {
            str(code).strip(): group.sort("sample_id")["response"].to_list()
            for (code,), group in rows.group_by("code")
        }
        self.claims = claims
        claims.mkdir(parents=True, exist_ok=True)

    def next(self, prompt: str) -> str | None:
        """The next response to this prompt; None where its task has none."""
        code = next((code for code in self.texts if code in prompt), None)
        if code is None:
            return None
        texts, number = self.texts[code], 0
        while True:
            with suppress(FileExistsError):
                (self.claims / f"{stable_hash(code)}-{number}").touch(exist_ok=False)
                return str(texts[number % len(texts)])
            number += 1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tasks", "responses", "claims"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("command", nargs="+", help="after --; concur adds --host and --port")
    asked = parser.parse_args(arguments)
    recorded, command = Recorded(asked.tasks, asked.responses, asked.claims), asked.command
    host, port = (command.index(name) + 1 for name in ("--host", "--port"))
    address = command[host], int(command[port])
    behind = address[0], free_port(address[0])
    command[port] = str(behind[1])
    server = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    front = Front(address, recorded, behind)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    return server.wait()


class Front(ThreadingHTTPServer):
    """Listens where concur asks."""

    daemon_threads, request_queue_size = True, 512

    def __init__(self, address: tuple[str, int], recorded: Recorded, to: tuple[str, int]) -> None:
        super().__init__(address, Passing)
        self.recorded, self.to = recorded, to


class Passing(BaseHTTPRequestHandler):
    """Passes a request on to the server."""

    protocol_version = "HTTP/1.1"
    server: Front

    def do_GET(self) -> None:
        self._answer(*self._passed_on(None))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        text = None
        if self.path.endswith("/chat/completions"):
            asked = json.loads(content)
            text = self.server.recorded.next(asked["messages"][-1]["content"])
            if text is not None:
                wanted = max(1, round(len(text) / CHARACTERS_A_TOKEN))
                asked["max_tokens"] = min(wanted, asked.get("max_tokens", wanted))
                asked["ignore_eos"] = True
                content = json.dumps(asked).encode()
        status, kind, body = self._passed_on(content)
        if text is not None and status == http.client.OK:
            body = json.dumps(with_text(json.loads(body), text)).encode()
        self._answer(status, kind, body)

    def _passed_on(self, content: bytes | None) -> tuple[int, str, bytes]:
        headers = {name: value for name in PASSED_ON if (value := self.headers.get(name))}
        connection = http.client.HTTPConnection(*self.server.to)
        try:
            connection.request(self.command, self.path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type", ""), answer.read()
        except OSError:
            return UNAVAILABLE, "text/plain", b"the server behind does not answer yet\n"
        finally:
            connection.close()

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # who asked may be gone
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def with_text(answer: Any, text: str) -> Any:
    """The answer with a recorded text; it ended by itself unless it was cut at its limit."""
    choice = answer["choices"][0]
    choice["message"] |= {"content": text, "reasoning_content": None, "reasoning": None}
    written = answer["usage"]["completion_tokens"]
    cut = written < round(len(text) / CHARACTERS_A_TOKEN)
    choice["finish_reason"] = "length" if cut else "stop"
    if cut:
        choice["message"]["content"] = text[: round(written * CHARACTERS_A_TOKEN)]
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
