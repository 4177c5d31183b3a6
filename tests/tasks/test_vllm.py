"""The managed server with a real vLLM, and the pages' commands of vLLM: `make vllm` first, then
`pytest -m vllm`. Anything from 2 to 5 minutes on two cores."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from kernels_eval.errors import EvalError
from tasks.models import load_causal_model
from tasks.sources.small_model import build_small_model
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.server import VllmSampler
from tests.support.doc_commands import commands
from tests.support.processes import processes_with
from tests.support.requests import make_request

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CONCUR_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = [
    f"Write a kernel that adds {number} to every element of a tensor.\n" + "x = x + 1\n" * 40
    for number in range(4)
]
PARSED = """
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.serve import ServeSubcommand
ServeSubcommand.cmd = staticmethod(lambda args: print("parsed", args.model_tag))
main()
"""

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
    """Five samples for four prompts, a killed server and another one, an adapter by its name, and
    nothing left at the end."""
    env = f"env CONCUR_TEST={tmp_path} VLLM_NO_USAGE_STATS=1"
    config = ServerConfig(
        command=f"{env} {PYTHON} -m vllm.entrypoints.cli.main serve",
        args=("--max-num-seqs", "4"),
    )
    logs = tmp_path / "logs"
    base = VllmSampler(str(model), "small", config, logs=logs)
    adapted = VllmSampler(str(model), "small", config, adapter, logs)
    try:
        wanted = requests(samples=5, temperature=1.0, max_tokens=400)
        with pytest.raises(EvalError, match="ended with signal 9"):
            for _ in base.sample(wanted):
                os.kill(base.server.process.pid, signal.SIGKILL)
        got = list(base.sample(wanted))
        assert sorted(response.request_key for response in got) == sorted(
            request.request_key for request in wanted
        )
        assert all(
            response.completion_tokens and response.finish_reason in ("stop", "length")
            for response in got
        )
        for number in range(len(PROMPTS)):
            samples = {text for key, text in texts(got).items() if key.startswith(f"{number}#")}
            assert len(samples) >= 4, "samples of a prompt differ by their seeds"

        greedy = requests(samples=1, temperature=0.0, max_tokens=24)
        first, again = texts(list(base.sample(greedy))), texts(list(base.sample(greedy)))
        base.close()
        tuned = texts(list(adapted.sample(greedy)))
        assert first == again and all(tuned[key] != first[key] for key in first), (
            "the adapter answers under its name"
        )
    finally:
        base.close()
        adapted.close()
    assert alive(str(tmp_path)) == []
    assert all("enable_prefix_caching" in log.read_text() for log in logs.iterdir())


@pytest.mark.parametrize(
    "text", [command.text for command in commands() if "vllm serve" in command.text]
)
def test_commands_of_the_pages_have_options_that_vllm_knows(text):
    words = shlex.split(text)
    words = words[words.index("serve") :]
    done = subprocess.run([PYTHON, "-c", PARSED, *words], capture_output=True, text=True)
    assert done.returncode == 0 and "parsed Qwen/QwQ-32B" in done.stdout, done.stderr
