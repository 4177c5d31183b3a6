"""The server that concur starts: real processes, and a real Ray where there are GPUs; vLLM alone is
a stand-in (support/fake_vllm.py)."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.records import Language
from tasks.progress import observed_by
from tasks.sources import stage as sources
from tasks.sources.config import TasksConfig
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis import server as server_module
from tasks.synthesis import sizing, vllm
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.server import VllmSampler, options, serve_command
from tasks.synthesis.stage import Synthesis
from tests.support.cases import cases
from tests.support.pools import fresh_ray
from tests.support.requests import make_request, without_pauses
from tests.support.training import tiny_model
from tests.support.vllm_servers import FAKE, ROOT, WAIT_S, stand_ins
from tests.support.waiting import until

CASES = cases("server")


@pytest.fixture
def fake(tmp_path):
    with stand_ins(tmp_path / "fake") as fake:
        yield fake


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Served by its path; its tokenizer counts the reasoning."""
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    without_pauses(monkeypatch)
    monkeypatch.setattr(vllm, "LOOK_S", 0.05)
    monkeypatch.setattr(vllm, "HURRY_S", 0.2)


@pytest.fixture(scope="module")
def ray_with_gpus():
    """A Ray that believes in four GPUs: it hands out their numbers, and that is all the stand-in
    asks of them."""
    with fresh_ray(2, 4):
        yield


@pytest.fixture
def four_gpus(ray_with_gpus, monkeypatch):
    monkeypatch.setattr(server_module, "visible_gpus", lambda: ["gpu"] * 4)


def sampler(fake, adapter=None, **settings):
    config = ServerConfig(command=fake.command, **settings)
    made = VllmSampler("org/model", "org/model", config, adapter, fake.home / "logs")
    fake.samplers.append(made)
    return made


def requests(count, prompt="prompt"):
    return [
        make_request(n, prompt=prompt, key=f"{prompt}#{n}", max_tokens=1000) for n in range(count)
    ]


def option(words, name):
    return words[words.index(name) + 1]


def test_it_starts_at_the_first_request_answers_and_leaves_nothing(fake, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "adapter_config.json").write_text(json.dumps({"r": 24}))
    served = sampler(fake, tmp_path / "tuned", args=("--max-loras", "7"))
    assert served.generator == "org/model+tuned"
    assert list(served.sample([])) == [] and fake.starts == []
    got = list(served.sample(requests(5)))
    assert sorted(each.text for each in got) == [f"tuned says prompt {n}" for n in range(5)]
    (start,) = fake.starts
    words, env = start["argv"], start["env"]
    assert words[:2] == ["serve", "org/model"]
    assert {"--enforce-eager", "--enable-lora", f"tuned={tmp_path / 'tuned'}"} <= set(words)
    assert {name: option(words, name) for name in CASES["options"]} == CASES["options"]
    assert "--tensor-parallel-size" not in words and "--data-parallel-size" not in words
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1" and "PYTHONPATH" not in env
    assert not any(name.startswith("RAY_") for name in env)
    key = env["VLLM_API_KEY"]
    (log,) = (fake.home / "logs").iterdir()
    assert len(key) > 20 and not any(key in word for word in words) and key not in log.read_text()
    assert psutil.pid_exists(start["pid"]) and psutil.pid_exists(start["engine"])
    assert len(list(served.sample(requests(1, "again")))) == 1 == len(fake.starts)
    served.close()
    assert fake.alive() == []
    served.close()


@pytest.mark.parametrize(
    "settings, parallel, words",
    [
        ({"tensor_parallel": 4}, (None, "4"), "vLLM replicas: 1; each: GPUs 4, answers at once"),
        ({"replicas": 1, "tensor_parallel": 2}, (None, "2"), "vLLM replicas: 1; each: GPUs 2,"),
        ({}, ("2", "2"), "vLLM replicas: 2; each: GPUs 2, answers at once "),
    ],
)
def test_parallel_sizes_follow_from_the_gpus_or_the_settings(
    four_gpus, fake, monkeypatch, settings, parallel, words
):
    """QwQ-32B in 16 bits on 80 GB: two GPUs write more as one replica than as two."""
    gpu = sizing.H200.model_copy(update={"memory_bytes": 80 * 10**9})
    monkeypatch.setattr(sizing, "read_gpu", lambda: gpu)
    monkeypatch.setattr(sizing, "read_shape", lambda model: sizing.QWQ_32B)
    served = sampler(fake, **settings)
    assert len(list(served.sample(requests(6)))) == 6
    assert served.served.startswith(words)
    (start,) = fake.starts
    names = ("--data-parallel-size", "--tensor-parallel-size")
    found = tuple(option(start["argv"], n) if n in start["argv"] else None for n in names)
    assert found == parallel
    gpus = start["env"]["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(set(gpus)) == len(gpus) == int(parallel[0] or 1) * int(parallel[1])
    served.close()
    assert fake.alive() == []


def test_gpus_that_another_server_holds_are_not_given_again(four_gpus, fake):
    first, second = (sampler(fake, replicas=1, tensor_parallel=2) for _ in range(2))
    for served in (first, second):
        assert len(list(served.sample(requests(1)))) == 1
    pinned = [start["env"]["CUDA_VISIBLE_DEVICES"] for start in fake.starts]
    assert sorted(",".join(pinned).split(",")) == ["0", "1", "2", "3"]
    first.close()
    second.close()


@pytest.mark.parametrize("replicas, each", [(3, 2), (None, 8)])
def test_more_gpus_than_there_are_is_said_before_anything_starts(four_gpus, fake, replicas, each):
    with pytest.raises(
        DeviceError,
        match=rf"{replicas or 1} vLLM replicas of {each} GPUs do not fit onto the 4 GPUs of this",
    ):
        list(sampler(fake, replicas=replicas, tensor_parallel=each).sample(requests(1)))
    assert fake.starts == []


def test_the_stage_starts_a_server_only_for_what_no_snapshot_answers(fake, tmp_path, model):
    root = str(tmp_path / "root")
    tasks = sources.run(TasksConfig(source="bundled", split="heldout"), root)
    server = {"command": fake.command}
    config = SynthesisConfig(sampler="vllm", model=model, samples_per_task=2, server=server)
    made = Synthesis(tasks, config, Language.CPP).run()
    rows = made.open().read()
    assert len(rows) == 2 * tasks.open().manifest["rows"] == len(fake.answers)
    assert set(rows["generator"]) == {model} and rows["reasoning_tokens"].null_count() == 0
    assert made.open().manifest["served"].startswith("vLLM replicas: 1; each: GPUs 0, answers")
    assert fake.alive() == [] and list((tmp_path / "root" / "logs" / "vllm").glob("vllm-*.log"))
    unused = config.model_copy(update={"server": ServerConfig(command="nothing at all")})
    assert Synthesis(tasks, unused, Language.CPP).run() == made
    more = Synthesis(tasks, config.model_copy(update={"samples_per_task": 1}), Language.CPP).run()
    assert more != made and len(more.open().read()) == tasks.open().manifest["rows"]
    assert len(fake.starts) == 1, "all of it was known"


def test_the_same_stage_starts_a_server_that_was_killed_again_and_no_answer_is_asked_twice(
    fake, tmp_path, model
):
    """As Prefect's retries do."""
    tasks = sources.run(TasksConfig(source="bundled", split="heldout"), str(tmp_path / "root"))
    config = SynthesisConfig(
        sampler="vllm", model=model, samples_per_task=5, server={"command": fake.command}
    )
    stage = Synthesis(tasks, config, Language.CPP)
    fake.set("dies_after_three")

    def seen(_, done, *more):
        if done:
            fake.set("die")

    with (
        observed_by(seen),
        pytest.raises(EvalError, match=r"vLLM failed: it ended with signal 9; the end of .*log"),
    ):
        stage.run()
    kept, answered = len(stage.snapshot.keys("request_key")), len(fake.answers)
    assert fake.alive() == [] and not stage.snapshot.finished
    fake.unset("dies_after_three")
    rows = Synthesis(tasks, config, Language.CPP).run().open().read()
    assert rows["request_key"].n_unique() == len(rows) == 20
    assert 0 < kept <= answered <= 3 and len(fake.answers) == answered + 20 - kept
    assert len(fake.starts) == 2 and fake.alive() == []


def test_what_a_healthy_server_does_not_answer_is_an_error(fake, monkeypatch):
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", 0.2)
    served = sampler(fake)
    assert len(list(served.sample(requests(1)))) == 1
    fake.set("hold")
    with pytest.raises(EvalError, match=r"gave no answer for user/mine: .*[Tt]ime"):
        list(served.sample(requests(1, "again")))
    fake.unset("hold")
    assert len(fake.starts) == 1 and fake.alive() == []


def test_a_server_that_never_serves_is_one_clear_error(fake):
    fake.set("refuse_start")
    message = (
        r"did not become healthy: it ended with exit status 3; the end of .*vllm-\w+\.log:\n"
        r"(.*\n)*.*has no such window"
    )
    with pytest.raises(EvalError, match=message) as caught:
        list(sampler(fake).sample(requests(3)))
    assert caught.value.hint and len(fake.starts) <= 1
    assert fake.alive() == []


def test_a_server_that_is_not_healthy_in_time_is_ended(fake, monkeypatch):
    monkeypatch.setattr(vllm, "START_S", 1.0)
    fake.set("never_healthy")
    with pytest.raises(EvalError, match="did not become healthy: it does not answer"):
        list(sampler(fake).sample(requests(1)))
    assert fake.alive() == []


def test_the_log_names_the_engine_s_exception(tmp_path):
    path = tmp_path / "vllm.log"
    fault = "(EngineCore_0 pid=7) ERROR 11-26 10:00:00 [core.py:1] ValueError: no memory left"
    path.write_text("\n".join([fault, *("later" for _ in range(40)), "RuntimeError: engine died"]))
    assert vllm.log_tail(path).splitlines()[0] == fault
    assert vllm.log_tail(path).endswith("engine died")


DRIVER = """
import sys
from pathlib import Path
from tests.support.vllm_servers import Fake
from tests.tasks.test_server import requests, sampler
served = sampler(Fake(Path(sys.argv[1])))
try:
    for answer in served.sample(requests(8)):
        pass
finally:
    served.close()
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow, id="Ctrl-C"),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_a_driver_that_is_stopped_leaves_nothing(fake, how):
    """Though answers are held, and the engine ignores SIGTERM in a session of its own."""
    fake.set("hold")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(fake.home)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: fake.asked, "a request")
        driver.send_signal(how)
        _, said = driver.communicate(timeout=WAIT_S)
        assert driver.returncode, "it was stopped, and did not end"
        until(lambda: not fake.alive(), "the end of what the driver has left")
        assert how == signal.SIGKILL or "KeyboardInterrupt" in said
    finally:
        driver.kill()


UNIMPORTANT = CASES["undecisive"]
"""Settings that decide nothing of what is generated, with a value other than the default."""


def test_only_what_changes_the_responses_is_part_of_the_fingerprint(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    tasks = SnapshotRef(root=str(tmp_path), stage="tasks", fingerprint="0" * 16)
    base = {"sampler": "vllm", "model": "m", "server": {}}

    def fingerprint(**changes):
        server = changes.pop("server", {})
        return Synthesis(
            tasks, SynthesisConfig(**base | changes | {"server": server}), Language.CPP
        ).snapshot.fingerprint

    plain = fingerprint()
    for name, value in UNIMPORTANT.items():
        assert fingerprint(server={name: value}) == plain, name
    asked = {"adapter": str(adapter)}
    important = [
        fingerprint(model="another"),
        fingerprint(sampling={"temperature": 0.1}),
        fingerprint(server={"args": ["--quantization", "fp8"]}),
        fingerprint(**asked),
    ]
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    important.append(fingerprint(**asked))
    assert len({plain, *important}) == 6


def test_a_setting_is_known_to_matter_or_not_to():
    """A new setting of the server must be put on one side or the other, here and in
    VllmSampler.data_version."""
    assert set(ServerConfig.model_fields) == UNIMPORTANT.keys() | {"args"}


def test_the_configured_sampler_serves_the_tuned_adapter_under_its_snapshot(tmp_path):
    adapter = tmp_path / "0123456789abcdef" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    config = SynthesisConfig(sampler="vllm", model="org/model", server={"command": FAKE})
    assert make_sampler(config, str(tmp_path)).generator == "org/model"
    assert make_sampler(config, str(tmp_path), adapter).generator == "org/model+0123456789ab"
    with pytest.raises(UsageError, match="synthesis.model is not set"):
        make_sampler(SynthesisConfig(sampler="vllm"), str(tmp_path))
    configured = config.model_copy(update={"adapter": str(adapter)})
    assert make_sampler(configured, str(tmp_path)).generator == "org/model+0123456789ab"
    with pytest.raises(UsageError, match="holds no adapter_config.json"):
        make_sampler(config.model_copy(update={"adapter": str(tmp_path)}), str(tmp_path))


def test_what_starts_vllm(monkeypatch, tmp_path):
    monkeypatch.delenv("CONCUR_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no vLLM was found: PATH has no vllm") as caught:
        serve_command(ServerConfig())
    assert "CONCUR_VLLM_PYTHON" in caught.value.hint
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert serve_command(ServerConfig()) == [str(tmp_path / "vllm"), "serve"]
    interpreter = tmp_path / "env" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)
    module = ["-m", "vllm.entrypoints.cli.main", "serve"]
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(interpreter))
    assert serve_command(ServerConfig()) == [str(interpreter), *module], (
        "an environment is known by its link"
    )
    named = ServerConfig(command=f"{interpreter} -m 'my server'")
    assert serve_command(named) == [str(interpreter), "-m", "my server"]
    for wrong in ("absent serve", " "):
        with pytest.raises(UsageError, match="synthesis.server.command names"):
            serve_command(ServerConfig(command=wrong))
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="CONCUR_VLLM_PYTHON names"):
        serve_command(ServerConfig())


def test_options_of_the_user_come_last():
    size = sizing.server_size("m", ServerConfig(), 0, [10], 100)
    words = options(ServerConfig(args=("--max-num-seqs", "3")), "m", None, size)
    assert words[-2:] == ["--max-num-seqs", "3"] and words.index("256") < words.index("3")
    assert "--enforce-eager" in words and "--enable-lora" not in words
    of_gpu = options(ServerConfig(), "m", None, size.model_copy(update={"gpus": 1}))
    assert "--gpu-memory-utilization" in of_gpu and "--enforce-eager" not in of_gpu
