"""A Hugging Face hub of one data set, as its own client asks it: a branch's commit, the tree of a
commit, and files."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubServer:
    """`files` by path are those of `commit`; a `status` other than 200 answers everything."""

    def __init__(self):
        self.commit, self.files, self.status, self.asked = "a" * 40, {}, 200, []

    def keep(self, commit, **splits):
        """A commit with one table of JSON lines for each split."""
        self.commit = commit
        self.files = {
            f"{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
            for split, rows in splits.items()
        }
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        readme = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
        self.files["README.md"] = readme.encode()

    def answer(self, path):
        """The body of a path, and its headers."""
        if "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                for name, data in self.files.items()
            ]
            return json.dumps(tree).encode(), {}
        if "/resolve/" in path:
            data = self.files[path.rpartition(f"/{self.commit}/")[2]]
            return data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": self.commit}
        return json.dumps({"id": "owner/name", "sha": self.commit}).encode(), {}


def _digest(data):
    return hashlib.sha1(data).hexdigest()


@contextmanager
def hub_of(monkeypatch, home):
    """A running `HubServer`, with an empty cache of the client under `home`."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            hub.asked.append(self.path)
            body, headers = hub.answer(self.path) if hub.status == 200 else (b"", {})
            self.send_response(hub.status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "datasets")
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
