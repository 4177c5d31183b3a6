"""An OpenAI-compatible endpoint in a thread, which answers what a test says and remembers what it
was asked."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ManyAtOnce(ThreadingHTTPServer):
    request_queue_size = 256
    """Connections that wait to be accepted: beyond 5, a busy machine refuses them."""


class Server:
    """A chat completions endpoint. `answer(number, body)` says what the request with that number
    (from 0) gets: status, body and perhaps headers (status 0 drops the connection), or a function
    that writes to the connection itself.

    A GET (what a redirected POST may become) is answered 405 and counted in `gets`; `die` ends the
    endpoint for good.
    """

    def __init__(self, answer, port=0):
        self.gets = 0
        self.bodies = []
        self.headers = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with owner.lock:
                    number = len(owner.bodies)
                    owner.bodies.append(body | {"path": self.path})
                    owner.headers.append(
                        {name.lower(): value for name, value in self.headers.items()}
                    )
                    owner.in_flight += 1
                    owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
                try:
                    said = answer(number, body)
                finally:
                    with owner.lock:
                        owner.in_flight -= 1
                if callable(said):
                    self.close_connection = True
                    with suppress(ConnectionError):  # the client has gone, as some tests want
                        said(self)
                    return
                status, content, *more = said
                if status == 0:  # drop the connection
                    self.close_connection = True
                    return
                raw = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    for name, value in (
                        {"content-type": "application/json", "content-length": str(len(raw))}
                        | (more[0] if more else {})
                    ).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)
                except ConnectionError:  # the client has gone, as some tests want
                    self.close_connection = True

            def do_GET(self):
                owner.gets += 1
                self.send_response(405)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args):
                """Quiet."""

        self.server = ManyAtOnce(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def die(self):
        """Nobody listens any more when this returns. Not for the thread that serves; a handler's
        will do."""
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serving(answer, port=0):
    """A server that runs until the block is left."""
    server = Server(answer, port)
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        thread.join()
        server.server.server_close()


def completion(
    content="an answer",
    finish="stop",
    tokens=7,
    **message,
):
    """A completion with one choice; without `tokens` it says nothing of its usage."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": content} | message,
    }
    usage = (
        {"usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}}
        if tokens is not None
        else {}
    )
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
    } | usage
