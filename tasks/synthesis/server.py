"""The sampler `vllm`: its own `vllm serve` command and a client.

Guarantees: starts at the first request; no server is left after `close` or an exception; its random
key is on no command line. Does not guarantee equal draws for other batches."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kernels_eval.devices import visible_gpus
from kernels_eval.errors import EvalError, UsageError
from tasks.sources.small_model import resolve_model
from tasks.synthesis import sizing
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.sampler import (
    Requests,
    Response,
    Sampler,
    adapter_digest,
    adapter_name,
    adapter_of,
    model_name,
    required,
    tokenizer_of,
)
from tasks.synthesis.vllm import FAILED, VllmServer, reserved_gpus

log = logging.getLogger(__name__)

ASK_AHEAD = 1.25
"""Requests in flight beyond what the replicas write at once, so that a successor is waiting."""
ANSWER_TIMEOUT_S = 4 * 3600.0
RETRIES = 1
"""Of the client: few, so that an ended server is noticed soon."""
CPU_MEMORY = {"VLLM_CPU_KVCACHE_SPACE": str(sizing.CPU_CACHE_BYTES >> 30)}


def serve_command(config: ServerConfig) -> list[str]:
    """The command that starts vLLM, up to the model's name. Raises UsageError where there is
    none."""
    fix = "give one like '/opt/vllm/bin/vllm serve'"
    if config.command is not None:
        words, named = shlex.split(config.command), "synthesis.server.command"
    elif python := os.environ.get("CONCUR_VLLM_PYTHON"):
        # not resolved: an environment's interpreter is a link, known by the place of the link
        words = [python, "-m", "vllm.entrypoints.cli.main", "serve"]
        named, fix = (
            "CONCUR_VLLM_PYTHON",
            "set CONCUR_VLLM_PYTHON to the bin/python of an environment with vLLM",
        )
    else:
        words, named = ["vllm", "serve"], ""
        fix = (
            "python -m venv VENV && VENV/bin/pip install vllm, then export"
            " CONCUR_VLLM_PYTHON=VENV/bin/python"
        )
    found = shutil.which(Path(words[0]).expanduser()) if words else None
    if found is None:
        program = words[0] if words else "no program"
        why = f"{named} names {program}, which cannot be run" if named else "PATH has no vllm"
        raise UsageError(f"no vLLM was found: {why}", fix)
    return [str(Path(found).absolute()), *words[1:]]


def options(
    config: ServerConfig, name: str, adapter: Path | None, size: sizing.ServerSize
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
        words += ["--gpu-memory-utilization", sizing.GPU_SHARE]
    else:
        words += ["--enforce-eager"]
    if adapter:
        words += ["--enable-lora", "--max-lora-rank", sizing.lora_rank(adapter)]
        words += ["--lora-modules", f"{adapter_name(adapter)}={adapter}"]
    return [*map(str, words), *config.args]


class VllmSampler(Sampler):
    """Chat completions of a server that starts at the first request and ends with `close`.

    `model` is a directory or hub id, served as `name`; with a LoRA `adapter` directory, that is
    sampled. Raises UsageError where vLLM or the adapter is missing, DeviceError for too few GPUs,
    EvalError where the server does not start.
    """

    def __init__(
        self,
        model: str,
        name: str,
        config: ServerConfig,
        adapter: Path | None = None,
        logs: str | Path | None = None,
        tokenizer: str | Path | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._config, self._command = config, serve_command(config)
        self._model, self._name, self._adapter = model, name, adapter
        self.generator = model_name(name, adapter)
        self._logs = Path(logs or Path(tempfile.gettempdir()) / "concur-vllm-logs").absolute()
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
        logs = None if "://" in root else Path(root) / "logs" / "vllm"
        model = resolve_model(name, root)
        tokenizer = tokenizer_of(config, root) or model
        return cls(model, name, config.server, adapter_of(config, adapter), logs, tokenizer)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        return adapter_digest(config, *config.server.args)

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. An exception here or in the caller stops the server."""
        if not requests:
            return
        try:
            server = self._serve(requests)
            try:
                yield from self._client(server).sample(requests)
            except EvalError as error:
                if isinstance(error, UsageError) or server.is_healthy():
                    raise
                raise EvalError(f"vLLM failed: {server.fault()}", FAILED) from error
        except BaseException:
            self.close(at_once=True)
            raise

    def close(self, at_once: bool = False) -> None:
        """Stop the server; sampling again restarts it. `at_once`: do not wait for answers in
        flight."""
        server, self.server = self.server, None
        if server is not None:
            server.stop(at_once)
        self._running.close()

    def _client(self, server: VllmServer) -> OpenAISampler:
        asked = adapter_name(self._adapter) if self._adapter else self._name
        return OpenAISampler(
            f"{server.address}/v1",
            asked,
            concurrency=self.concurrency,
            timeout_s=ANSWER_TIMEOUT_S,
            retries=RETRIES,
            api_key=self.api_key,
            direct=True,
        )

    def _serve(self, requests: Requests) -> VllmServer:
        prompts = [sizing.size_of(request.prompt) for request in requests]
        most = max(request.sampling.max_tokens for request in requests)
        size = sizing.server_size(self._model, self._config, len(visible_gpus()), prompts, most)
        if self.server is not None and size.max_model_len > self._max_model_len:
            self.close()
        if self.server is None:
            self._max_model_len = size.max_model_len
            self.concurrency = max(1, int(size.replicas * size.max_num_seqs * ASK_AHEAD))
            self.served = size.in_words()
            log.info("%s: %s", self.generator, self.served)
            self.server = self._start(size)
        return self.server

    def _start(self, size: sizing.ServerSize) -> VllmServer:
        directory = Path(self._model).expanduser()
        model = str(directory.absolute()) if directory.is_dir() else self._model
        words = options(self._config, self._name, self._adapter, size)
        with ExitStack() as stack:
            gpus = stack.enter_context(reserved_gpus(size.replicas * size.gpus))
            memory = {} if size.gpus else CPU_MEMORY
            server = VllmServer(
                [*self._command, model, *words],
                env=gpus | memory | {"VLLM_API_KEY": self.api_key},
                log=self._logs / f"vllm-{secrets.token_hex(4)}.log",
            )
            stack.enter_context(server)
            self._running = stack.pop_all()
        return server
