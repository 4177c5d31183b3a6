"""The sampler `vllm`: one `vllm serve` command of our own, and the client that asks it.

Guarantees: the server starts at the first request and is sized by its model, GPUs and prompts;
requests that a crash cuts off are asked again; when `close` has returned, or an exception has left
`sample`, no server is left. It asks for a key that is made for this run and that is on no command
line. Does not guarantee the same draws from another number of replicas or other batch sizes: vLLM's
rounding depends on the batch.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from kernels_eval.devices import visible_gpus
from kernels_eval.errors import DeviceError, UsageError
from kernels_eval.records import stable_hash
from tasks.files import file_sha256
from tasks.sources.small_model import resolve_model
from tasks.synthesis import sizing
from tasks.synthesis.client import ATTEMPTS, OpenAISampler
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.sampler import Requests, Response, Sampler, required, tokenizer_of
from tasks.synthesis.vllm import VllmServer, reserved_gpus

log = logging.getLogger(__name__)

ASK_AHEAD = 1.25
"""Requests in flight over what the replicas write at once: a response that ends has its successor
waiting."""
ANSWER_TIMEOUT_S = 4 * 3600.0
CPU_MEMORY = {"VLLM_CPU_KVCACHE_SPACE": str(sizing.CPU_CACHE_BYTES >> 30)}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def serve_command(config: ServerConfig) -> list[str]:
    """What starts vLLM, up to the model's name. Raises UsageError where nothing does."""
    if config.command:
        words = shlex.split(config.command)
        if words and shutil.which(words[0]):
            return words
        raise UsageError(
            f"synthesis.server.command {config.command!r} does not start with a program",
            "give one like 'vllm serve'",
        )
    if python := config.python or os.environ.get("CONCUR_VLLM_PYTHON"):
        if found := shutil.which(Path(python).expanduser()):
            # not resolved: an environment's interpreter is a link, known by the place of the link
            return [str(Path(found).absolute()), *"-m vllm.entrypoints.cli.main serve".split()]
        named = "synthesis.server.python" if config.python else "CONCUR_VLLM_PYTHON"
        raise UsageError(
            f"{named} names {python}, which cannot be run",
            f"set {named} to the bin/python of an environment with vLLM",
        )
    if installed := shutil.which("vllm"):
        return [installed, "serve"]
    raise UsageError(
        "no vLLM was found",
        "python -m venv VENV && VENV/bin/pip install vllm, then export"
        " CONCUR_VLLM_PYTHON=VENV/bin/python",
    )


def options(
    config: ServerConfig,
    name: str,
    adapters: Mapping[str, str],
    size: sizing.ServerSize,
) -> list[str]:
    """Arguments of vllm serve besides the model and the address. `args` come last, so they win."""
    # the access log has a line for every health check: soon they would be all that the log holds
    words: list[object] = ["--served-model-name", name, "--disable-uvicorn-access-log"]
    words += ["--max-model-len", size.max_model_len, "--max-num-seqs", size.max_num_seqs]
    if size.replicas > 1:
        words += ["--data-parallel-size", size.replicas]
    if (parallel := size.gpus or config.tensor_parallel or 1) > 1:
        words += ["--tensor-parallel-size", parallel]
    if size.gpus:
        words += ["--gpu-memory-utilization", config.gpu_memory_utilization]
    else:
        words += ["--enforce-eager"]
    if adapters:
        words += ["--enable-lora", "--max-loras", len(adapters)]
        words += ["--max-lora-rank", sizing.lora_rank(adapters.values())]
        words += ["--lora-modules", *(f"{key}={path}" for key, path in adapters.items())]
    return [*map(str, words), *config.args]


def served_tokenizer(model: str, args: Sequence[str] = ()) -> Path | None:
    """The tokenizer that vllm serve uses for `model` with these arguments, where its files are on
    this machine. Asks no network."""
    words = [word for arg in args for word in arg.split("=", 1)]
    named = [after for word, after in itertools.pairwise(words) if word == "--tokenizer"]
    directory = sizing.model_directory(named[-1] if named else model)
    held = directory is not None and any((directory / name).is_file() for name in TOKENIZER_FILES)
    return directory if held else None


class VllmSampler(Sampler):
    """Chat completions of a server that is started at the first request and stopped by `close`.

    `model` is a directory or a hub id, served as `name`; `adapters` are LoRA directories by name,
    and `asked` is what is asked: `name` or one of them. `generator` is the name, and the adapter
    where one is asked. Logs go to `logs`. Raises UsageError where vLLM or an adapter is missing,
    DeviceError where the GPUs are too few or too small, EvalError where the server does not start.
    """

    def __init__(
        self,
        model: str,
        name: str,
        config: ServerConfig,
        adapters: Mapping[str, str | Path] | None = None,
        asked: str | None = None,
        logs: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._config, self._command = config, serve_command(config)
        self._model, self._name, self._asked = model, name, asked or name
        self._adapters = {key: _adapter(key, path) for key, path in (adapters or {}).items()}
        if self._asked not in (name, *self._adapters):
            raise UsageError(
                f"there is no adapter {self._asked!r}",
                f"name one of synthesis.server.adapters: {', '.join(self._adapters)}",
            )
        self.generator = name if self._asked == name else f"{name}+{self._asked}"
        self._logs = Path(logs or Path(tempfile.gettempdir()) / "concur-vllm-logs").absolute()
        self._uncounted = False
        self._running = ExitStack()
        self.server: VllmServer | None = None
        self.api_key = secrets.token_urlsafe(24)
        self.concurrency = 0
        self._max_model_len = 0

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> VllmSampler:
        name = required(config, "model", "NAME")
        adapters, asked = config.server.adapters, config.adapter
        if adapter is not None:
            asked = adapter.parent.name[:12]
            adapters = adapters | {asked: str(adapter)}
        logs = None if "://" in root else Path(root) / "logs" / "vllm"
        model, tokenizer = resolve_model(name, root), tokenizer_of(config, root)
        return cls(model, name, config.server, adapters, asked, logs, tokenizer)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        """Arguments of a server, and the content of an adapter that is asked by name."""
        decisive = [config.server.identity, _adapter_digest(config)]
        return stable_hash(decisive) if any(decisive) else ""

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. An exception, in here or at the caller's, stops the server."""
        if not requests:
            return
        try:
            server = self._serve(requests)
            client = OpenAISampler(
                f"{server.address}/v1",
                self._asked,
                concurrency=self.concurrency,
                timeout_s=ANSWER_TIMEOUT_S,
                attempts=ATTEMPTS + self._config.restarts,
                api_key=self.api_key,
                direct=True,
                before_retry=server.wait_ready,
            )
            yield from client.sample(requests)
        except BaseException:
            self.close(at_once=True)
            raise

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of each text under the tokenizer given, else the one served; None, with a warning,
        where this machine has neither."""
        if self.tokenizer is None:
            self.tokenizer = served_tokenizer(self._model, self._config.args)
            if self.tokenizer is None and not self._uncounted:
                self._uncounted = True
                log.warning(
                    "no tokenizer of %s is on this machine: tokens are not counted; set"
                    " synthesis.tokenizer",
                    self._model,
                )
        return super().count_tokens(texts)

    def close(self, at_once: bool = False) -> None:
        """Stop the server; sampling again starts it again. `at_once`: answers in flight are not
        waited for."""
        server, self.server = self.server, None
        if server is not None:
            server.stop(at_once)
        self._running.close()

    def _serve(self, requests: Requests) -> VllmServer:
        """The server, running, with room for these requests."""
        prompts = [sizing.size_of(request.prompt) for request in requests]
        most = max(request.sampling.max_tokens for request in requests)
        size = sizing.server_size(self._model, self._config, len(visible_gpus()), prompts, most)
        if self.server is not None and size.max_model_len > self._max_model_len:
            self.close()
        if self.server is None:
            self._require_room(size)
            self._max_model_len = size.max_model_len
            self.concurrency = max(1, int(size.replicas * size.max_num_seqs * ASK_AHEAD))
            self.served = size.in_words(self._config)
            log.info("%s: %s", self.generator, self.served)
            self.server = self._start(size)
        return self.server

    def _start(self, size: sizing.ServerSize) -> VllmServer:
        config, directory = self._config, Path(self._model).expanduser()
        model = str(directory.absolute()) if directory.is_dir() else self._model
        words = options(config, self._name, self._adapters, size)
        with ExitStack() as stack:
            gpus = stack.enter_context(reserved_gpus(size.replicas * size.gpus))
            memory = {} if size.gpus else CPU_MEMORY
            server = VllmServer(
                [*self._command, model, *words],
                env=gpus | memory | config.env | {"VLLM_API_KEY": self.api_key},
                log_dir=self._logs,
                start_timeout_s=config.start_timeout_s,
                restarts=config.restarts,
            )
            stack.enter_context(server)
            self._running = stack.pop_all()
        return server

    def _require_room(self, size: sizing.ServerSize) -> None:
        """Raise DeviceError for weights that surely do not fit: vLLM would say so after minutes."""
        shape, gpu, gpus = size.shape, size.gpu, size.gpus
        if not (shape and gpu and gpus):
            return
        if re.search("offload|pipeline", " ".join(self._config.args)):
            return
        share = self._config.gpu_memory_utilization * gpu.memory_bytes
        if shape.weight_bytes > gpus * share:
            enough = 1 << math.ceil(math.log2(shape.weight_bytes / share))
            raise DeviceError(
                f"{self._model} has {shape.weight_bytes / 1e9:.0f} GB of weights, and"
                f" {gpus} x {gpu.name} give a replica {gpus * share / 1e9:.0f} GB",
                f"--set synthesis.server.tensor_parallel={enough}, or serve fewer bytes with"
                " synthesis.server.args: [--quantization, fp8]",
            )


def _adapter(name: str, path: str | Path) -> str:
    """The directory of an adapter. Raises UsageError where it is none."""
    directory = Path(path).expanduser().absolute()
    if not (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"adapter {name!r}: {directory} holds no adapter_config.json",
            "give the directory of a LoRA adapter",
        )
    return str(directory)


def _adapter_digest(config: SynthesisConfig) -> str:
    """Of the files of the adapter that is asked by name: its content counts, not where it lies.
    Empty where none is asked, or where the sampler says what is missing."""
    location = Path(config.server.adapters.get(config.adapter or "", "")).expanduser()
    if not config.adapter or not location.is_dir():
        return ""
    digests = []
    for path in sorted(location.glob("adapter_*")):
        if path.is_file():
            digests.append([path.name, file_sha256(path)])
    return stable_hash(digests)
