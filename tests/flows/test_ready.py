"""What a run would find out at its end is asked at its start: tasks, endpoint, tokenizer,
memory."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from flows import ready
from flows.cli.main import main
from flows.config import load_profile
from flows.launch import require_ready
from kernels_eval.errors import EvalError, UsageError
from tasks.store import Snapshot
from tasks.synthesis import sizing
from tasks.synthesis.config import SynthesisConfig
from tasks.training.recipe import TrainingRecipe


@pytest.fixture
def server():
    """An endpoint: `answers` maps a path to status and body; anything else is 404."""
    answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.headers["authorization"]
            status, body = answers.get(self.path, (404, {}))
            if answers.get("key") not in (None, key):
                status, body = 401, {}
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        answers["url"] = f"http://127.0.0.1:{http.server_port}/v1"
        yield answers
        http.shutdown()
        thread.join()


def asked(url, **more):
    return SynthesisConfig(sampler="openai", model="mine", base_url=url, tokenizer="small", **more)


MODELS = {"data": [{"id": "mine"}, {"id": "other"}]}


@pytest.mark.parametrize(
    "status, body, said",
    [
        (200, MODELS, "has mine"),
        (200, {"data": []}, "does not list mine"),
        (200, b"<html>", "does not list mine"),
        (404, {}, "does not list mine"),
    ],
)
def test_an_endpoint_that_has_the_model_or_keeps_no_list(
    server, tmp_path, monkeypatch, status, body, said
):
    monkeypatch.chdir(tmp_path)
    server["/v1/models"] = (status, body)
    assert said in ready.endpoint(asked(server["url"]), str(tmp_path))
    assert not list(tmp_path.iterdir()), "asking makes no small model for its tokenizer"


def test_an_endpoint_without_the_model_names_those_it_has(server, tmp_path, monkeypatch):
    server["/v1/models"] = (200, {"data": [{"id": "other\x1b[2J"}]})
    with pytest.raises(UsageError, match=r"has no model 'mine'; it has other") as caught:
        ready.endpoint(asked(server["url"]), str(tmp_path))
    assert "\x1b" not in str(caught.value) and "synthesis.model" in caught.value.hint
    server["key"] = "Bearer right"
    monkeypatch.setenv("OPENAI_API_KEY", "wrong-key")
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        ready.endpoint(asked(server["url"]), str(tmp_path))
    assert "wrong-key" not in str(caught.value)


def test_an_endpoint_that_is_not_there_is_said_at_once(tmp_path):
    with pytest.raises(EvalError, match="does not answer") as caught:
        ready.endpoint(asked("http://127.0.0.1:9/v1"), str(tmp_path))
    assert "synthesis.base_url" in caught.value.hint


def test_a_rerun_whose_answers_are_there_needs_no_endpoint(tmp_path):
    config = asked("http://127.0.0.1:9/v1")
    Snapshot(str(tmp_path), "synthesis", "a" * 32).publish(config=config, rows=0)
    assert "not asked" in ready.endpoint(config, str(tmp_path))
    with pytest.raises(EvalError):
        ready.endpoint(asked("http://127.0.0.1:9/v1", samples_per_task=2), str(tmp_path))


def test_a_tokenizer_that_is_missing_stops_the_run_and_none_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = asked("http://127.0.0.1:9/v1")
    unnamed = config.model_copy(update={"tokenizer": None})
    assert "the endpoint's usage" in ready.generator_tokenizer(unnamed, str(tmp_path))
    with pytest.raises(UsageError, match="does not exist"):
        ready.tokenizer(str(tmp_path / "gone"), str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="cannot load"):
        ready.tokenizer(str(tmp_path / "empty"), str(tmp_path))
    assert "small" in ready.generator_tokenizer(config, str(tmp_path))
    assert not (tmp_path / "models").exists(), "it looks and makes nothing"


def model_of(monkeypatch, weight_gb, memory_gb):
    shape = sizing.QWQ_32B.model_copy(update={"weight_bytes": weight_gb * 10**9})
    gpu = sizing.H200.model_copy(update={"memory_bytes": memory_gb * 10**9})
    monkeypatch.setattr(sizing, "read_shape", lambda model: shape)
    monkeypatch.setattr(sizing, "read_gpu", lambda: gpu)


def test_weights_that_do_not_fit_name_the_number_of_gpus_that_would(monkeypatch):
    model_of(monkeypatch, 65, 80)
    assert "65 GB of weights" in ready.training_memory(TrainingRecipe(base_model="m"))
    model_of(monkeypatch, 65, 48)
    with pytest.raises(UsageError) as caught:
        ready.training_memory(TrainingRecipe(base_model="m"))
    fix = "--set training.parallelism=fsdp2 --set training.workers=2"
    assert caught.value.hint == fix
    shared = TrainingRecipe(base_model="m", parallelism="fsdp2", workers=2)
    assert "2 x NVIDIA H200 have 96 GB" in ready.training_memory(shared)
    with pytest.raises(UsageError, match="65 GB of weights") as caught:
        ready.serving_memory(SynthesisConfig(sampler="vllm", model="m"))
    assert caught.value.hint == "--set synthesis.server.tensor_parallel=2"
    fp8 = {"args": ["--quantization", "fp8"]}
    held = SynthesisConfig.model_validate({"sampler": "vllm", "model": "m", "server": fp8})
    assert "36 GB of weights" in ready.serving_memory(held)
    model_of(monkeypatch, 650, 8)
    with pytest.raises(UsageError, match="smaller model"):
        ready.training_memory(TrainingRecipe(base_model="m"))


def test_what_is_not_on_this_machine_is_not_judged(monkeypatch):
    monkeypatch.setattr(sizing, "read_gpu", lambda: None)
    assert ready.training_memory(TrainingRecipe(base_model="m")) == "no GPU: trains on the CPU"


def test_a_run_is_refused_before_it_has_written_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_profile("local", ["benchmark.tasks={source: files, location: gone}", "root=out"])
    with pytest.raises(UsageError, match="gone"):
        require_ready(config, "benchmark")
    require_ready(config, "refresh")
    require_ready(config)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


def test_doctor_says_cannot_run_with_the_cause_and_the_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.doctor.ask", lambda command, **_: "yes")
    (tmp_path / "mine.yaml").write_text(
        "synthesis: {sampler: openai, model: m, base_url: http://127.0.0.1:9/v1}\n"
        "tasks: {source: files, location: gone}\n"
    )
    done = CliRunner().invoke(main, ["doctor", "--profile", "mine.yaml", "--json"])
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 1
    for name, fix in (("tasks", "tasks"), ("endpoint", "synthesis.base_url")):
        assert not found[name]["ok"] and found[name]["need"] == "required", found[name]
        assert fix in found[name]["fix"] or name == "tasks"
    text = CliRunner().invoke(main, ["doctor", "--profile", "mine.yaml"]).stdout
    assert re.search("│ endpoint +│ .*http://127.0.0.1:9/v1", text), "found, beside its name"
    assert re.search(r"^refresh +no", text, re.MULTILINE)
