"""Servers that concur starts: real processes, a real supervisor and a real Ray; vLLM alone is a
stand-in (support/fake_vllm.py)."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import psutil
import pytest

from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.records import Language
from tasks.sources import stage as sources
from tasks.sources.config import TasksConfig
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis import server as server_module
from tasks.synthesis import sizing
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.samplers import make_sampler
from tasks.synthesis.server import VllmSampler, options, serve_command
from tasks.synthesis.stage import Synthesis
from tests.support.cases import cases
from tests.support.pools import fresh_ray
from tests.support.requests import make_request
from tests.support.vllm_servers import FAKE, ROOT, WAIT_S, stand_ins
from tests.support.waiting import until

CASES = cases("server")


@pytest.fixture
def fake(tmp_path):
    with stand_ins(tmp_path / "fake") as fake:
        yield fake


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What the driver looks at twice a second is looked at ten times: these tests wait for it some
    forty times."""
    monkeypatch.setattr(server_module, "RENEW_S", 0.1)


@pytest.fixture(scope="module")
def four_gpus():
    """A Ray that believes in four GPUs: it hands out their numbers, and that is all the stand-in
    asks of them."""
    with fresh_ray(2, 4):
        yield


def sampler(fake, adapters=None, asked=None, tail_wait_s=None, tail_share=0.02, **settings):
    settings = {"replicas": 1, "restart_pause_s": 0.1, "drain_s": 0.2, "max_num_seqs": 8} | settings
    config = ServerConfig(command=FAKE, env={"FAKE_VLLM_DIR": str(fake.home)}, **settings)
    made = VllmSampler(
        *("org/model", "org/model", config),
        adapters=adapters,
        asked=asked,
        logs=fake.home / "logs",
        tail_wait_s=tail_wait_s,
        tail_share=tail_share,
    )
    fake.samplers.append(made)
    return made


def requests(count, prompt="prompt"):
    return [
        make_request(n, prompt=prompt, key=f"{prompt}#{n}", max_tokens=1000) for n in range(count)
    ]


class Asking(threading.Thread):
    """A run in the background: `got` when it has ended, `error` if in an exception."""

    def __init__(self, sampler, asked):
        super().__init__()
        self.sampler, self.asked = sampler, asked
        self.got = []
        self.error = None
        self.start()

    def run(self):
        try:
            self.got += self.sampler.sample(self.asked)
        except BaseException as error:
            self.error = error

    def healthy(self, replicas):
        """Wait until so many replicas can answer; without a held answer one may answer all before
        the next has started."""
        until(
            lambda: (
                self.error
                or (self.sampler.servers and self.sampler.servers.addresses.most == replicas)
            ),
            f"{replicas} healthy replicas",
        )
        assert self.error is None, self.error

    def all_answered(self):
        self.join(timeout=WAIT_S)
        assert not self.is_alive() and self.error is None, self.error
        return Counter(answer.request_key for answer in self.got) == Counter(
            asked.request_key for asked in self.asked
        )


# --- one server, from start to end
# ------------------------------------------------------------------------------------------------


def test_starts_at_the_first_request_answers_and_leaves_nothing(four_gpus, fake, tmp_path):
    for rank, name in ((16, "tuned"), (24, "other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    adapters = {"tuned": str(tmp_path / "tuned"), "other": str(tmp_path / "other")}
    served = sampler(
        fake, adapters, "tuned", tensor_parallel=2, ngram_tokens=4, args=("--max-loras", "7")
    )
    assert (
        served.generator == "org/model+tuned"
        and list(served.sample([])) == []
        and fake.starts == []
    )
    got = list(served.sample(requests(5)))
    assert sorted(response.text for response in got) == [
        f"tuned says prompt {index}" for index in range(5)
    ]
    (start,) = fake.starts
    words = start["argv"]
    assert words[:2] == ["serve", "org/model"]
    served_so = {"--enable-prefix-caching", "--speculative-config", "--enable-lora"}
    assert served_so | {f"tuned={adapters['tuned']}"} <= set(words)
    assert {name: words[words.index(name) + 1] for name in CASES["options"]} == CASES["options"]
    assert start["env"]["CUDA_VISIBLE_DEVICES"] in ("0,1", "2,3")
    assert "PYTHONPATH" not in start["env"] and not any(
        name.startswith("RAY_") for name in start["env"]
    )
    key = start["env"]["VLLM_API_KEY"]
    assert len(key) > 20 and not any(key in word for word in words)
    assert key not in (fake.home / "logs" / "replica-0.log").read_text()
    assert psutil.pid_exists(start["pid"]) and psutil.pid_exists(start["engine"])
    again = list(served.sample(requests(1, "again")))
    assert len(again) == 1 and len(fake.starts) == 1, "the server stays up between two calls"
    served.close()
    assert fake.alive() == []
    served.close()


def test_replicas_are_pinned_to_gpus_of_their_own_and_share_the_work(four_gpus, fake):
    served = sampler(fake, replicas=None, tensor_parallel=2, max_num_seqs=4)
    fake.set("hold")
    asking = Asking(served, requests(30))
    asking.healthy(2)
    fake.unset("hold")
    assert asking.all_answered()
    assert sorted(start["env"]["CUDA_VISIBLE_DEVICES"] for start in fake.starts) == ["0,1", "2,3"]
    ports = Counter(answer["port"] for answer in fake.answers)
    assert len(ports) == 2 and min(ports.values()) >= 5, ports
    assert served.served.startswith("vLLM servers: 2; each: GPUs 2, answers at once 4 (mean prompt")
    served.close()
    assert fake.alive() == []


def test_gpus_of_a_replica_are_computed_where_they_are_not_given(four_gpus, fake, monkeypatch):
    """QwQ-32B in 16 bits on 80 GB: two GPUs write more as one replica than as two."""
    gpu = sizing.H200.model_copy(update={"memory_bytes": 80 * 10**9})
    monkeypatch.setattr(sizing, "read_gpu", lambda: gpu)
    monkeypatch.setattr(sizing, "read_shape", lambda model: sizing.QWQ_32B)
    served = sampler(fake, replicas=None, max_num_seqs=None)
    fake.set("hold")
    asking = Asking(served, requests(4))
    asking.healthy(2)
    fake.unset("hold")
    assert asking.all_answered()
    assert served.served.startswith("vLLM servers: 2; each: GPUs 2 (computed to write most), ")
    served.close()
    pinned = [start["env"]["CUDA_VISIBLE_DEVICES"] for start in fake.starts]
    assert sorted(pinned) == ["0,1", "2,3"]
    words = fake.starts[0]["argv"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"


def test_weights_that_do_not_fit_are_said_before_anything_starts(four_gpus, fake, monkeypatch):
    gpu = sizing.Gpu(name="card", memory_bytes=24 * 10**9, bytes_per_s=1e12)
    monkeypatch.setattr(sizing, "read_gpu", lambda: gpu)
    monkeypatch.setattr(sizing, "read_shape", lambda model: sizing.QWQ_32B)
    with pytest.raises(DeviceError, match="66 GB of weights, and 2 x card give a replica") as told:
        list(sampler(fake, tensor_parallel=2).sample(requests(1)))
    assert "tensor_parallel=4" in told.value.hint and fake.starts == []


@pytest.mark.parametrize("replicas, each", [(3, 2), (None, 8)])
def test_more_gpus_than_there_are_is_said_before_anything_starts(four_gpus, fake, replicas, each):
    with pytest.raises(
        DeviceError,
        match=(
            rf"{replicas or 1} vLLM replicas of {each} GPUs do not fit onto the 4 GPUs of this"
            r" machine"
        ),
    ):
        list(sampler(fake, replicas=replicas, tensor_parallel=each).sample(requests(1)))
    assert fake.starts == []


def test_the_stage_starts_servers_only_for_what_no_snapshot_answers(four_gpus, fake, tmp_path):
    root = str(tmp_path / "root")
    tasks = sources.run(TasksConfig(source="bundled", split="heldout"), root)
    server = {"command": FAKE, "env": {"FAKE_VLLM_DIR": str(fake.home)}, "replicas": 1}
    config = SynthesisConfig(sampler="vllm", model="org/model", samples_per_task=2, server=server)
    made = Synthesis(tasks, config, Language.CPP).run()
    rows = made.open().read()
    assert len(rows) == 2 * tasks.open().manifest["rows"] == len(fake.answers) and set(
        rows["generator"]
    ) == {"org/model"}
    assert made.open().manifest["served"].startswith("vLLM servers: 1; each: GPUs 1, answers")
    assert fake.alive() == [] and [
        path.name for path in (tmp_path / "root" / "logs" / "vllm").glob("*.log")
    ] == ["replica-0.log"]
    assert (
        Synthesis(
            tasks,
            config.model_copy(update={"server": ServerConfig(command="nothing at all")}),
            Language.CPP,
        ).run()
        == made
    )
    more = Synthesis(tasks, config.model_copy(update={"samples_per_task": 1}), Language.CPP).run()
    assert more != made and len(more.open().read()) == tasks.open().manifest["rows"]
    assert len(fake.starts) == 1, "all of it was known"


def test_the_last_answer_does_not_hold_the_servers_once_its_deadline_has_passed(four_gpus, fake):
    fake.set("hold-7")
    served = sampler(fake, tail_wait_s=0.0, tail_share=0.1)
    got = list(served.sample(requests(10)))
    assert sorted(int(answer.request_key.split("#")[1]) for answer in got) == [*range(7), 8, 9]
    until(lambda: fake.aborted == [{"seed": 7}], "the end of the answer at the server")
    assert len(list(served.sample(requests(5)))) == 5 and len(fake.starts) == 1
    served.close()
    assert fake.alive() == []


# --- crashes
# --------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_comes_back_and_no_request_is_lost(four_gpus, fake):
    served = sampler(fake)
    fake.set("hold")
    asking = Asking(served, requests(20))
    asking.healthy(1)
    os.kill(fake.starts[0]["pid"], signal.SIGKILL)
    fake.unset("hold")
    assert asking.all_answered()
    first, second = fake.starts
    assert first["argv"] == second["argv"], (
        "on the same port: who knows its address need not learn another"
    )
    until(lambda: not psutil.pid_exists(first["engine"]), "the end of what the server had started")
    served.close()


def test_the_other_replica_answers_while_one_is_down(four_gpus, fake):
    served = sampler(fake, replicas=2, restart_pause_s=3600)
    fake.set("hold")
    asking = Asking(served, requests(16))
    asking.healthy(2)
    killed = fake.starts[0]
    os.kill(killed["pid"], signal.SIGKILL)
    fake.unset("hold")
    assert asking.all_answered()
    port = int(killed["argv"][killed["argv"].index("--port") + 1])
    assert {answer["port"] for answer in fake.answers}.isdisjoint({port}) and len(fake.starts) == 2
    served.close()


def test_an_actor_that_dies_is_replaced_and_its_server_with_it(four_gpus, fake):
    import ray

    served = sampler(fake)
    assert len(list(served.sample(requests(1)))) == 1
    ray.kill(served.servers.slots[0].actor)
    until(lambda: len(fake.starts) == 2, "another actor's server")
    assert len(list(served.sample(requests(3, "then")))) == 3
    until(lambda: not psutil.pid_exists(fake.starts[0]["pid"]), "the end of the first server")
    served.close()


def test_a_request_that_kills_every_server_ends_the_run(four_gpus, fake):
    fake.set("poison")
    served = sampler(fake, restarts=1)
    with pytest.raises(
        EvalError, match=r"replica 0 crashed 2 times, the last time: it ended with signal 9"
    ):
        list(served.sample(requests(1, "kill the server")))
    assert len(fake.starts) == 2 and fake.alive() == []


def test_a_server_that_never_serves_is_one_clear_error(four_gpus, fake):
    fake.set("refuse_start")
    message = (
        r"did not become healthy: it ended with exit status 3; the end of .*replica-0\.log:\n"
        r"(.*\n)*.*has no such window"
    )
    with pytest.raises(EvalError, match=message) as caught:
        list(sampler(fake).sample(requests(3)))
    assert caught.value.hint and len(fake.starts) <= 1
    assert fake.alive() == []


DRIVER = """
import sys
from pathlib import Path
from tests.support.vllm_servers import Fake
from tests.tasks.test_server import requests, sampler
served = sampler(Fake(Path(sys.argv[1])), replicas=2)
try:
    for answer in served.sample(requests(8)):
        pass
finally:
    served.close()
"""


def stopped_driver(fake, how, **environment):
    """A run in a process of its own that is stopped in the middle of its answers, with two servers;
    nothing of it is left."""
    fake.set("hold")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(fake.home)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(fake.starts) == 2, "two servers")
        until(lambda: fake.asked, "a request")
        driver.send_signal(how)
        _, said = driver.communicate(timeout=WAIT_S)
        assert driver.returncode, "it was stopped, and did not end"
        if how == signal.SIGKILL:
            until(lambda: not fake.alive(), "the end of what the driver has left")
        else:
            assert "KeyboardInterrupt" in said
        assert fake.alive() == []
    finally:
        driver.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_a_driver_that_is_stopped_leaves_nothing_on_a_cluster_that_goes_on(four_gpus, fake, how):
    import ray

    stopped_driver(fake, how, RAY_ADDRESS=ray.get_runtime_context().gcs_address)


@pytest.mark.slow
def test_a_driver_that_is_killed_with_a_ray_of_its_own_leaves_nothing(fake):
    """On the CPU: this Ray knows of no GPUs."""
    stopped_driver(fake, signal.SIGKILL, CUDA_VISIBLE_DEVICES="")
    assert all(
        "--enforce-eager" in start["argv"] and "--tensor-parallel-size" not in start["argv"]
        for start in fake.starts
    )
    assert all(start["env"]["VLLM_CPU_KVCACHE_SPACE"] == "1" for start in fake.starts)


# --- settings
# --------------------------------------------------------------------------------------------------


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

    plain, adapters = fingerprint(), {"adapters": {"a": str(adapter)}}
    for name, value in (UNIMPORTANT | adapters).items():
        assert fingerprint(server={name: value}) == plain, name
    asked = {"adapter": "a", "server": adapters}
    important = [
        fingerprint(model="another"),
        fingerprint(sampling={"temperature": 0.1}),
        fingerprint(server={"args": ["--quantization", "fp8"]}),
        fingerprint(server={"max_model_len": 4096}),
        fingerprint(**asked),
    ]
    (adapter / "adapter_config.json").write_text('{"r": 16}')
    important.append(fingerprint(**asked))
    assert len({plain, *important}) == 7


def test_a_setting_is_known_to_matter_or_not_to():
    """A new setting of the server must be put on one side or the other, here and in
    ServerConfig.identity."""
    decisive = {"args", "max_model_len"}
    assert set(ServerConfig.model_fields) == UNIMPORTANT.keys() | decisive | {"adapters"}


def test_the_configured_sampler_serves_the_tuned_adapter_under_its_snapshot(tmp_path):
    adapter = tmp_path / "0123456789abcdef" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    config = SynthesisConfig(sampler="vllm", model="org/model", server={"command": FAKE})
    assert make_sampler(config, str(tmp_path)).generator == "org/model"
    assert make_sampler(config, str(tmp_path), adapter).generator == "org/model+0123456789ab"
    with pytest.raises(UsageError, match="synthesis.model is not set"):
        make_sampler(SynthesisConfig(sampler="vllm"), str(tmp_path))
    with pytest.raises(UsageError, match="no adapter 'absent'"):
        make_sampler(config.model_copy(update={"adapter": "absent"}), str(tmp_path))
    with pytest.raises(UsageError, match="holds no adapter_config.json"):
        make_sampler(
            config.model_copy(
                update={"server": ServerConfig(command=FAKE, adapters={"a": str(tmp_path)})}
            ),
            str(tmp_path),
        )


def test_what_starts_vllm(monkeypatch, tmp_path):
    monkeypatch.delenv("CONCUR_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no vLLM was found") as caught:
        serve_command(ServerConfig())
    assert "CONCUR_VLLM_PYTHON" in caught.value.hint
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    assert serve_command(ServerConfig()) == [str(tmp_path / "vllm"), "serve"]
    interpreter = tmp_path / "env" / "python"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)
    module = ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert serve_command(ServerConfig(python=str(interpreter))) == [str(interpreter), *module], (
        "an environment is known by its link"
    )
    monkeypatch.setenv("CONCUR_VLLM_PYTHON", str(interpreter))
    assert serve_command(ServerConfig()) == [str(interpreter), *module]
    for wrong in (
        {"python": str(tmp_path / "absent")},
        {"command": "absent serve"},
        {"command": " "},
    ):
        with pytest.raises(UsageError):
            serve_command(ServerConfig(**wrong))


def test_options_of_the_user_come_last():
    words = options(
        ServerConfig(args=("--max-num-seqs", "3"), prefix_caching=False), "m", {}, False, 2048, 16
    )
    assert words[-2:] == ["--max-num-seqs", "3"] and words.index("16") < words.index("3")
    assert (
        "--no-enable-prefix-caching" in words
        and "--enforce-eager" in words
        and "--enable-lora" not in words
    )
    assert "--gpu-memory-utilization" in options(ServerConfig(), "m", {}, True, 2048, 16)
