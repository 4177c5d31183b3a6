"""A Hugging Face hub of one data set, as its own client asks it: a branch's commit, the tree of a
commit, and files."""

import fnmatch
import hashlib
import inspect
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import HfApi


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


class FakeHub:
    """The calls of HfApi that we make, with their real signatures, on repositories in memory."""

    endpoint = "https://hub.invalid"

    def __init__(self):
        self.repos = {}
        self.calls = []
        self.fails = {}

    def _called(self, name, *args, **named):
        bound = inspect.signature(getattr(HfApi, name)).bind(
            None, *args, **named
        )  # a call that the real one refuses fails here
        self.calls.append(name)
        if name in self.fails:
            raise self.fails.pop(name)
        return bound.arguments

    def _repo(self, name, *args, **named):
        asked = self._called(name, *args, **named)
        return asked, self.repos[asked["repo_id"]]

    def create_repo(self, *args, **named):
        asked = self._called("create_repo", *args, **named)
        assert asked["repo_type"] == "dataset" and asked["exist_ok"]
        self.repos.setdefault(asked["repo_id"], empty(asked["private"]))

    def repo_info(self, *args, **named):
        return SimpleNamespace(private=self._repo("repo_info", *args, **named)[1]["private"])

    def list_repo_refs(self, *args, **named):
        tags = self._repo("list_repo_refs", *args, **named)[1]["tags"]
        return SimpleNamespace(tags=[SimpleNamespace(name=tag) for tag in tags])

    def upload_folder(self, *args, **named):
        asked, repo = self._repo("upload_folder", *args, **named)
        kept = {
            name: data
            for name, data in repo["files"].items()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in asked["delete_patterns"])
        }
        sent = contents(Path(asked["folder_path"]))
        repo["files"] = kept | {
            name: sent[name] for name in sent if name in asked["allow_patterns"]
        }
        repo["commits"] += 1
        return SimpleNamespace(oid=f"commit{repo['commits']}")

    def create_tag(self, *args, **named):
        asked, repo = self._repo("create_tag", *args, **named)
        repo["tags"][asked["tag"]] = asked["revision"]


def empty(private):
    return {"private": private, "files": {}, "tags": {}, "commits": 0}


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
