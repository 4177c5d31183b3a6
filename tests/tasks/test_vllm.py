"""The managed server with a real vLLM: `make vllm` first, then `pytest -m vllm`. Anything from 2 to
5 minutes on two cores."""

import os
import signal
import time
from pathlib import Path

import pytest

from flows.config import load_profile
from flows.rollouts import environment_of
from tasks.sources import bundled
from tasks.sources.small_model import build_small_model, load_causal_model, load_tokenizer
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.served_policy import ServedPolicy
from tasks.synthesis.server import VllmSampler
from tests.support.processes import processes_with
from tests.support.requests import make_request

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CONCUR_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = [
    f"Write a kernel that adds {number} to every element of a tensor.\n" + "x = x + 1\n" * 40
    for number in range(4)
]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs a vLLM environment: make vllm"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_small_model(tmp_path_factory.mktemp("model") / "small", PROMPTS)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A LoRA adapter that changes what the model says: both of its matrices are random."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = get_peft_model(
        load_causal_model(model, dtype=torch.float32),
        LoraConfig(r=32, target_modules=targets, init_lora_weights=False),
    )
    directory = tmp_path_factory.mktemp("run") / "adapter"
    tuned.save_pretrained(directory)
    return directory


def requests(samples, temperature, max_tokens):
    options = {"temperature": temperature, "max_tokens": max_tokens}
    return [
        make_request(index, prompt=prompt, key=f"{number}#{index}", **options)
        for number, prompt in enumerate(PROMPTS)
        for index in range(samples)
    ]


def alive(mark):
    return processes_with("CONCUR_TEST", mark)


def texts(responses):
    return {response.request_key: response.text for response in responses}


@pytest.mark.timeout(900)
def test_a_real_vllm_from_start_to_end(model, adapter, tmp_path):
    """Five samples for four prompts with the server killed in the middle, an adapter by its name,
    and nothing left at the end."""
    config = ServerConfig(
        python=str(PYTHON),
        env={"CONCUR_TEST": str(tmp_path), "VLLM_NO_USAGE_STATS": "1"},
        max_num_seqs=4,
    )
    base = VllmSampler(
        str(model), "small", config, adapters={"tuned": adapter}, logs=tmp_path / "logs"
    )
    try:
        began = time.monotonic()
        wanted, got = requests(samples=5, temperature=1.0, max_tokens=400), []
        for response in base.sample(wanted):
            got.append(response)
            if len(got) == 1:
                print(f"first of {len(wanted)} responses after {time.monotonic() - began:.1f} s")
                os.kill(base.server.process.pid, signal.SIGKILL)
        print(f"all of them, with a restart, after {time.monotonic() - began:.1f} s")
        assert sorted(response.request_key for response in got) == sorted(
            request.request_key for request in wanted
        )
        assert all(
            response.completion_tokens and response.finish_reason in ("stop", "length")
            for response in got
        )
        assert base.server.starts == 2
        for number in range(len(PROMPTS)):
            samples = {text for key, text in texts(got).items() if key.startswith(f"{number}#")}
            assert len(samples) >= 4, "samples of a prompt differ by their seeds"

        greedy = requests(samples=1, temperature=0.0, max_tokens=24)
        first, again = texts(list(base.sample(greedy))), texts(list(base.sample(greedy)))
        base._asked = "tuned"
        tuned = texts(list(base.sample(greedy)))
        assert first == again and all(tuned[key] != first[key] for key in first), (
            "the adapter answers under its name"
        )
    finally:
        base.close()
    assert alive(str(tmp_path)) == []
    (log,) = (tmp_path / "logs").iterdir()
    assert "enable_prefix_caching" in log.read_text()


@pytest.mark.timeout(600)
def test_a_real_vllm_answers_with_the_adapter_of_each_step(tmp_path, monkeypatch):
    """A policy whose weights change between steps, as in training: what the server writes is what
    this process would have written."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tasks.training.grpo import Asked  # takes seconds

    model = build_small_model(tmp_path / "small", PROMPTS)
    plain, tokenizer = load_causal_model(model, dtype=torch.float32), load_tokenizer(model)
    with torch.no_grad():  # the most likely token leads by more than the kernels' rounding
        plain.get_output_embeddings().weight.mul_(20)
    plain.save_pretrained(model)
    trained = get_peft_model(plain, LoraConfig(r=32, target_modules=["q_proj", "down_proj"]))
    trained.save_pretrained(tmp_path / "first")
    config = load_profile(
        "local", ["reinforcement.sampling={temperature: 0, max_tokens: 12}", "language=cpp"]
    )
    tasks = {task.task_id: task for task in bundled.load("train")[:2]}
    asked = [
        Asked(place, name, tokenizer(PROMPTS[place])["input_ids"], place)
        for place, name in enumerate(tasks)
    ]
    served = ServerConfig(
        python=str(PYTHON),
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"},
        max_num_seqs=4,
        args=("--dtype", "float32"),
    )
    adapters = {"first": tmp_path / "first"}
    server = VllmSampler(str(model), "small", served, adapters=adapters, logs=tmp_path / "logs")
    found = []
    try:
        assert list(server.sample(requests(samples=1, temperature=0.0, max_tokens=4)))
        monkeypatch.setenv("OPENAI_API_KEY", server.api_key)
        policy = ServedPolicy([f"{server.server.address}/v1"], tmp_path / "policy")
        there, here = (
            environment_of(config, tasks, dict.fromkeys(tasks, "x"), iter, by)
            for by in (policy, None)
        )
        for step in range(3):
            torch.manual_seed(step)
            with torch.no_grad():
                for name, weight in trained.named_parameters():
                    if "lora_" in name:
                        weight.normal_(std=0.3)
            by_server, by_process = (
                {each.asked.place: each.tokens for each in world.write(trained, tokenizer, asked)}
                for world in (there, here)
            )
            assert by_server == by_process and len(by_server) == 2
            found.append(by_server)
        policy.close()
    finally:
        server.close()
    assert len({str(each) for each in found}) == 3, "each step has an adapter of its own"
    assert not list((tmp_path / "policy").iterdir())
