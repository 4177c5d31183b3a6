"""vLLM servers of our own: command line, placement through Ray, and the sampler that asks them
(`synthesis.sampler: vllm`).

Guarantees: one replica for each tensor-parallel group, pinned by Ray to its GPUs; sampling begins
when the first replica is healthy and loses no request when one crashes: the others answer, or it
waits until one is back; when `close` has returned, or an exception has left `sample`, no server is
left, and where this process is killed each stops itself (see supervisor.py). A replica that never
becomes healthy is one EvalError with the end of its log; one that crashes too often is left out
with a warning while another one works. Servers ask for a key that is made for this run and that is
on no command line. Does not guarantee the same draws from another number of replicas or other batch
sizes: vLLM's rounding depends on the batch.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels_eval.errors import ClusterError, DeviceError, EvalError, UsageError
from tasks.synthesis import sizing
from tasks.synthesis.addresses import Addresses
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import ServerConfig
from tasks.synthesis.replica import Replica, ReplicaSpec, ReplicaStatus
from tasks.synthesis.sampler import Requests, Response, TokenCounter

log = logging.getLogger(__name__)

RENEW_S = 0.5
PLACE_S = 600.0
"""How long Ray may take to place a replica: GPUs that another stage gives back, a cluster that
grows."""
ASK_AHEAD = 1.25
"""Requests in flight over what the replicas write at once: a response that ends has its successor
waiting."""
ATTEMPTS_A_CRASH = 3
"""A request may meet every crash of a server, and each a few times before it is known."""
ANSWER_TIMEOUT_S = 4 * 3600.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
PLACED_NOWHERE = (
    "`ray status` shows what the cluster lacks; lower synthesis.server.replicas or tensor_parallel"
)


def serve_command(config: ServerConfig) -> list[str]:
    """What starts vLLM, up to the model's name. Raises UsageError where nothing does."""
    if config.command:
        words = shlex.split(config.command)
        if not words or not shutil.which(words[0]):
            raise UsageError(
                f"synthesis.server.command {config.command!r} does not start with a program",
                "give one like 'vllm serve'",
            )
        return words
    python = config.python or os.environ.get("CONCUR_VLLM_PYTHON")
    if python:
        if not shutil.which(Path(python).expanduser()):
            named = "synthesis.server.python" if config.python else "CONCUR_VLLM_PYTHON"
            raise UsageError(
                f"{named} names {python}, which cannot be run",
                f"set {named} to the bin/python of an environment with vLLM",
            )
        # not resolved: an environment's interpreter is a link, known by the place of the link
        found = os.path.abspath(shutil.which(Path(python).expanduser()) or python)
        return [found, *"-m vllm.entrypoints.cli.main serve".split()]
    installed = shutil.which("vllm")
    if not installed:
        raise UsageError(
            "no vLLM was found",
            "python -m venv VENV && VENV/bin/pip install vllm, then export"
            " CONCUR_VLLM_PYTHON=VENV/bin/python",
        )
    return [installed, "serve"]


def options(
    config: ServerConfig,
    name: str,
    adapters: Mapping[str, str],
    gpus: bool,
    max_model_len: int,
    max_num_seqs: int,
) -> list[str]:
    """Arguments of vllm serve besides the model and the address. `args` come last, so they win."""
    guess = {
        "method": "ngram",
        "num_speculative_tokens": config.ngram_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    rank = sizing.lora_rank(adapters.values())
    named = [f"{key}={path}" for key, path in adapters.items()]
    # the access log has a line for every health check: soon they would be all that the log holds
    flags: dict[str, Sequence[object] | None] = {
        "--served-model-name": [name],
        "--max-model-len": [max_model_len],
        "--max-num-seqs": [max_num_seqs],
        "--enable-prefix-caching": [] if config.prefix_caching else None,
        "--no-enable-prefix-caching": None if config.prefix_caching else [],
        "--disable-uvicorn-access-log": [],
        "--tensor-parallel-size": [config.tensor_parallel] if config.tensor_parallel > 1 else None,
        "--gpu-memory-utilization": [config.gpu_memory_utilization] if gpus else None,
        "--enforce-eager": None if gpus else [],
        "--enable-lora": [] if adapters else None,
        "--max-loras": [len(adapters)] if adapters else None,
        "--max-lora-rank": [rank] if adapters else None,
        "--lora-modules": named or None,
        "--speculative-config": [json.dumps(guess)] if config.ngram_tokens else None,
    }
    given = {flag: values for flag, values in flags.items() if values is not None}
    words = [str(word) for flag, values in given.items() for word in (flag, *values)]
    return [*words, *config.args]


def served_tokenizer(model: str, args: Sequence[str] = ()) -> Path | None:
    """The tokenizer that vllm serve uses for `model` with these arguments, where its files are on
    this machine. Asks no network."""
    words = [word for arg in args for word in arg.split("=", 1)]
    named = [after for word, after in itertools.pairwise(words) if word == "--tokenizer"]
    directory = sizing.model_directory(named[-1] if named else model)
    held = directory is not None and any((directory / name).is_file() for name in TOKENIZER_FILES)
    return directory if held else None


@dataclass
class _Slot:
    """One replica as this process sees it."""

    index: int
    actor: Any = None
    pending: Any = None
    asked: float = 0.0
    placed: bool = False
    losses: int = 0
    status: ReplicaStatus = field(default_factory=lambda: ReplicaStatus(state="starting"))


class Servers:
    """`replicas` servers of one `spec`, each an actor with `gpus` GPUs. `addresses` are those that
    are healthy."""

    def __init__(self, spec: ReplicaSpec, replicas: int, gpus: int) -> None:
        self.addresses = Addresses()
        self._spec, self._gpus = spec, gpus
        self._slots = [_Slot(index) for index in range(replicas)]
        self._changed, self._stopping = threading.Event(), threading.Event()
        self._fault: EvalError | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Returns when one replica is healthy. Raises what waiting cannot correct; nothing is left
        running then."""
        try:
            for slot in self._slots:
                self._place(slot)
            self._thread = threading.Thread(target=self._watch, name="vllm servers", daemon=True)
            self._thread.start()
            while not self._changed.wait(timeout=0.5):
                pass  # a Ctrl-C that comes just before the wait begins does not wake it
            if self._fault:
                raise self._fault
        except BaseException:
            self.stop(at_once=True)
            raise

    def stop(self, at_once: bool = False) -> None:
        """Returns when no server is left, or cannot be reached any more and stops itself.
        `at_once`: answers in flight are not waited for."""
        import ray

        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        actors = [slot.actor for slot in self._slots if slot.actor is not None]
        try:
            if ray.is_initialized() and actors:
                ray.wait(
                    [actor.stop.remote(at_once) for actor in actors],
                    num_returns=len(actors),
                    timeout=self._spec.config.drain_s + 90,
                )
        finally:
            for actor in actors:
                with suppress(Exception):  # of a Ray that has gone
                    ray.kill(actor)
            self._slots = []

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [slot.status for slot in self._slots]

    def _place(self, slot: _Slot) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wishes: dict[str, Any] = {"num_gpus": self._gpus, "num_cpus": 0, "max_concurrency": 4}
        if self._spec.config.listen == "loopback":  # another node's loopback is out of reach
            wishes["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
        slot.actor = (
            ray.remote(Replica).options(**wishes).remote(self._spec, slot.index, slot.status.served)
        )
        slot.pending, slot.asked, slot.placed = slot.actor.renew.remote(), time.monotonic(), False

    def _watch(self) -> None:
        """Renews the leases and keeps `addresses` right, until it is told to stop."""
        try:
            while not self._stopping.wait(RENEW_S):
                for slot in self._slots:
                    if slot.status.state != "failed":
                        self._look_at(slot)
        except Exception as error:  # Ray itself: the servers are not watched any more
            self._give_up(
                ClusterError(
                    f"Ray does not answer for the vLLM servers: {error}",
                    "run the same again: answers so far are kept",
                )
            )

    def _look_at(self, slot: _Slot) -> None:
        import ray

        done, _ = ray.wait([slot.pending], timeout=0)
        if not done:
            if not slot.placed and time.monotonic() - slot.asked > PLACE_S:
                self._give_up(
                    DeviceError(
                        f"Ray has found no place for a vLLM replica with {self._gpus} GPUs",
                        PLACED_NOWHERE,
                    )
                )
            return
        try:
            before, slot.status, slot.placed = slot.status, ray.get(slot.pending), True
        except ray.exceptions.RayActorError as error:
            slot.losses += 1
            self.addresses.park(slot.index)
            log.warning("vLLM replica %s: its actor died: %s", slot.index, error)
            with suppress(Exception):
                ray.kill(
                    slot.actor
                )  # it may be out of reach only, and would keep its GPUs and its server
            if slot.losses > self._spec.config.restarts:
                self._left_out(
                    slot, f"vLLM replica {slot.index}: its actor died {slot.losses} times: {error}"
                )
            else:
                self._place(slot)
            return
        slot.pending, slot.asked = slot.actor.renew.remote(), time.monotonic()
        if slot.status.state == "healthy" and slot.status.base_url:
            if before.starts != slot.status.starts:
                self.addresses.park(
                    slot.index
                )  # the crash in between went by unseen: what was known of it is no longer true
            self.addresses.put(slot.index, slot.status.base_url)
            self._changed.set()
            return
        self.addresses.park(slot.index)
        if slot.status.state == "restarting" and before.state == "healthy":
            log.warning("vLLM replica %s is started again: %s", slot.index, slot.status.error)
        if slot.status.state == "failed":
            self._left_out(slot, slot.status.error or "")

    def _left_out(self, slot: _Slot, why: str) -> None:
        slot.status = slot.status.model_copy(update={"state": "failed"})
        if slot.status.served and any(other.status.state != "failed" for other in self._slots):
            log.error("%s; the other replicas continue", why)
            return
        self._give_up(
            EvalError(
                why,
                "fix the cause in its log, such as a wrong synthesis.server setting; answers so far"
                " are kept",
            )
        )

    def _give_up(self, fault: EvalError) -> None:
        self._fault = self._fault or fault
        self.addresses.fail(fault)
        self._changed.set()


class VllmSampler(TokenCounter):
    """Chat completions of servers that are started at the first request and stopped by `close`.

    `model` is a directory or a hub id, served as `name`; `adapters` are LoRA directories by name,
    and `asked` is what is asked: `name` or one of them. `generator` is the identity in every
    candidate. Logs go to `logs`. Raises UsageError where vLLM or an adapter is missing, DeviceError
    where the GPUs are too few, EvalError where a server does not start.
    """

    def __init__(
        self,
        model: str,
        name: str,
        config: ServerConfig,
        generator: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        asked: str | None = None,
        logs: str | Path | None = None,
        tokenizer: str | Path | None = None,
        address: str | None = None,
    ) -> None:
        self._config, self._command = config, serve_command(config)
        self._model, self._name, self._asked = model, name, asked or name
        self._adapters = {
            key: str(Path(path).expanduser().absolute()) for key, path in (adapters or {}).items()
        }
        for key, path in self._adapters.items():
            if not (Path(path) / "adapter_config.json").is_file():
                raise UsageError(
                    f"adapter {key!r}: {path} holds no adapter_config.json",
                    "give the directory of a LoRA adapter",
                )
        if self._asked != name and self._asked not in self._adapters:
            raise UsageError(
                f"there is no adapter {self._asked!r}",
                f"name one of synthesis.server.adapters: {', '.join(self._adapters)}",
            )
        self.generator = generator or (name if self._asked == name else f"{name}+{self._asked}")
        self._logs = (
            str(Path(logs).absolute())
            if logs
            else str(Path(tempfile.gettempdir()) / "concur-vllm-logs")
        )
        super().__init__(tokenizer)
        self._address, self._uncounted = address, False
        self.servers: Servers | None = None
        self._key = ""
        self._length = self._seqs = self._replicas = 0

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. An exception, in here or at the caller's, stops the servers."""
        if not requests:
            return
        try:
            servers, key = self._serve(requests)
            client = OpenAISampler(
                servers.addresses,
                self._asked,
                concurrency=max(1, int(self._replicas * self._seqs * ASK_AHEAD)),
                timeout_s=ANSWER_TIMEOUT_S,
                retries=ATTEMPTS_A_CRASH * (self._config.restarts + 2),
                name=self.generator,
                api_key=key,
                direct=True,
            )
            yield from client.sample(requests)
        except BaseException:
            self.close(at_once=True)
            raise

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of each text under the tokenizer given, else the one served; None, with a warning,
        where this machine has neither."""
        if self._tokenizer is None:
            self._tokenizer = served_tokenizer(self._model, self._config.args)
            if self._tokenizer is None and not self._uncounted:
                self._uncounted = True
                log.warning(
                    "no tokenizer of %s is on this machine: tokens are not counted; set"
                    " synthesis.tokenizer",
                    self._model,
                )
        return super().count_tokens(texts)

    def close(self, at_once: bool = False) -> None:
        """Stops the servers; sampling again starts them again."""
        servers, self.servers = self.servers, None
        if servers is not None:
            servers.stop(at_once)

    def _serve(self, requests: Requests) -> tuple[Servers, str]:
        """The servers, running, with room for these requests, and their key."""
        prompt = sizing.prompt_tokens(request.prompt for request in requests)
        most = max(request.sampling.max_tokens for request in requests)
        shape = sizing.read_shape(self._model)
        length = self._config.max_model_len or sizing.model_len(
            prompt, most, shape.window if shape else None
        )
        if self.servers is not None and length > self._length:
            self.close()
        if self.servers is None:
            gpus = self._plan()
            if gpus:
                memory = sizing.kv_cache_bytes(
                    shape, _gpu_bytes(), gpus, self._config.gpu_memory_utilization
                )
            else:
                memory = self._config.cpu_kv_cache_gib << 30
            self._seqs = self._config.max_num_seqs or sizing.num_seqs(shape, memory, prompt, most)
            self._length, self._key = length, secrets.token_urlsafe(24)
            self.servers = Servers(self._spec(gpus), self._replicas, gpus)
            try:
                self.servers.start()
            except BaseException:
                self.servers = None  # nothing of it is left
                raise
        return self.servers, self._key

    def _plan(self) -> int:
        """GPUs of each replica (0 where the cluster has none), with `_replicas` decided."""
        from kernels_eval.cluster.ray import start_ray

        start_ray(self._address)
        import ray

        mine, anywhere = ray.get_runtime_context().get_node_id(), self._config.listen == "node"
        list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
        nodes = [
            int(node["Resources"].get("GPU", 0))
            for node in list_nodes()
            if node["Alive"] and (anywhere or node["NodeID"] == mine)
        ]
        each = self._config.tensor_parallel if any(nodes) else 0
        fit = sum(gpus // each for gpus in nodes) if each else 1
        self._replicas = self._config.replicas or max(1, fit)
        if each and self._replicas > fit:
            where = "of the cluster" if anywhere else "of this machine"
            raise DeviceError(
                f"{self._replicas} vLLM replicas of {each} GPUs do not fit onto the {sum(nodes)}"
                f" GPUs {where}",
                "lower synthesis.server.replicas or tensor_parallel, or set"
                " synthesis.server.listen=node on a cluster",
            )
        return each

    def _spec(self, gpus: int) -> ReplicaSpec:
        config = self._config
        words = options(config, self._name, self._adapters, bool(gpus), self._length, self._seqs)
        directory = Path(self._model).expanduser()
        model = str(directory.absolute()) if directory.is_dir() else self._model
        memory = {} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(config.cpu_kv_cache_gib)}
        return ReplicaSpec(
            config=config,
            command=(*self._command, model, *words),
            names=(self._name, *self._adapters),
            env=memory | config.env,
            threads=os.environ.get("OMP_NUM_THREADS"),
            api_key=self._key,
            log_dir=self._logs,
        )


def _gpu_bytes() -> int | None:
    """Memory of the first GPU of this machine; None where that cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    except Exception:  # no driver, no library
        return None
