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
import math
import os
import re
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
from kernels_eval.records import Json, stable_hash
from tasks.files import file_sha256
from tasks.sources.small_model import resolve_model
from tasks.synthesis import sizing
from tasks.synthesis.addresses import Addresses
from tasks.synthesis.client import OpenAISampler
from tasks.synthesis.config import ServerConfig, SynthesisConfig
from tasks.synthesis.replica import Replica, ReplicaSpec, ReplicaStatus
from tasks.synthesis.sampler import Requests, Response, Sampler, required, tokenizer_of

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
FAILED = (
    "fix the cause in its log, such as a wrong synthesis.server setting; answers so far are kept"
)


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
    gpus: int,
    max_model_len: int,
    max_num_seqs: int,
) -> list[str]:
    """Arguments of vllm serve besides the model and the address. `args` come last, so they win."""
    guess = {"method": "ngram", "num_speculative_tokens": config.ngram_tokens}
    guess |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    prefix = "--enable-prefix-caching" if config.prefix_caching else "--no-enable-prefix-caching"
    # the access log has a line for every health check: soon they would be all that the log holds
    words: list[object] = ["--served-model-name", name, prefix, "--disable-uvicorn-access-log"]
    words += ["--max-model-len", max_model_len, "--max-num-seqs", max_num_seqs]
    if (parallel := gpus or config.tensor_parallel or 1) > 1:
        words += ["--tensor-parallel-size", parallel]
    words += ["--gpu-memory-utilization", config.gpu_memory_utilization] * bool(gpus)
    words += ["--enforce-eager"] * (not gpus)
    if adapters:
        words += ["--enable-lora", "--max-loras", len(adapters)]
        words += ["--max-lora-rank", sizing.lora_rank(adapters.values())]
        words += ["--lora-modules", *(f"{key}={path}" for key, path in adapters.items())]
    if config.ngram_tokens:
        words += ["--speculative-config", json.dumps(guess)]
    return [*map(str, words), *config.args]


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
    """One replica as this process sees it; `asked` is when its answer `pending` was asked for."""

    index: int
    actor: Any = None
    pending: Any = None
    asked: float = 0.0
    placed: bool = False
    losses: int = 0
    status: ReplicaStatus = field(default_factory=lambda: ReplicaStatus(state="starting"))

    def ask(self) -> None:
        self.pending, self.asked = self.actor.renew.remote(), time.monotonic()


class Servers:
    """`replicas` servers of one `spec`, each an actor with `gpus` GPUs. `addresses` are those that
    are healthy."""

    def __init__(self, spec: ReplicaSpec, replicas: int, gpus: int) -> None:
        self.spec, self.addresses = spec, Addresses()
        self._gpus = gpus
        self.slots = [_Slot(index) for index in range(replicas)]
        self._changed, self._stopping = threading.Event(), threading.Event()
        self._fault: EvalError | None = None
        self._thread = threading.Thread(target=self._watch, name="vllm servers", daemon=True)

    def start(self) -> None:
        """Returns when one replica is healthy. Raises what waiting cannot correct; nothing is left
        running then."""
        try:
            for slot in self.slots:
                self._place(slot)
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
        if self._thread.ident is not None:
            self._thread.join()
        actors = [slot.actor for slot in self.slots if slot.actor is not None]
        self.slots = []
        try:
            if ray.is_initialized() and actors:
                stopping = [actor.stop.remote(at_once) for actor in actors]
                patience_s = self.spec.config.drain_s + 90
                ray.wait(stopping, num_returns=len(stopping), timeout=patience_s)
        finally:
            for actor in actors:
                _kill(actor)

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [slot.status for slot in self.slots]

    def _place(self, slot: _Slot) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        wishes: Json = {"num_gpus": self._gpus, "num_cpus": 0, "max_concurrency": 4}
        if self.spec.config.listen == "loopback":  # another node's loopback is out of reach
            here = ray.get_runtime_context().get_node_id()
            wishes["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        actors = ray.remote(Replica).options(**wishes)
        slot.actor = actors.remote(self.spec, slot.index, slot.status.served)
        slot.placed = False
        slot.ask()

    def _watch(self) -> None:
        """Renews the leases and keeps `addresses` right, until it is told to stop."""
        try:
            while not self._stopping.wait(RENEW_S):
                for slot in self.slots:
                    if slot.status.state != "failed":
                        self._look_at(slot)
        except Exception as error:  # Ray itself: the servers are not watched any more
            fault = f"Ray does not answer for the vLLM servers: {error}"
            self._give_up(ClusterError(fault, "rerun the same command: answers so far are kept"))

    def _look_at(self, slot: _Slot) -> None:
        import ray

        if not ray.wait([slot.pending], timeout=0)[0]:
            if not slot.placed and time.monotonic() - slot.asked > PLACE_S:
                fault = f"Ray has found no place for a vLLM replica with {self._gpus} GPUs"
                self._give_up(DeviceError(fault, PLACED_NOWHERE))
            return
        before = slot.status
        try:
            slot.status, slot.placed = ray.get(slot.pending), True
        except ray.exceptions.RayActorError as error:
            self._replace(slot, error)
            return
        slot.ask()
        now = slot.status
        healthy = now.state == "healthy" and now.base_url
        if not healthy or before.starts != now.starts:
            self.addresses.park(slot.index)  # also after a crash in between that went by unseen
        if healthy and now.base_url:
            self.addresses.put(slot.index, now.base_url)
            self._changed.set()
        elif now.state == "restarting" and before.state == "healthy":
            log.warning("vLLM replica %s is started again: %s", slot.index, now.error)
        elif now.state == "failed":
            self._left_out(slot, now.error or "")

    def _replace(self, slot: _Slot, error: Exception) -> None:
        """Start another actor for one that died, unless it has died too often."""
        slot.losses += 1
        self.addresses.park(slot.index)
        log.warning("vLLM replica %s: its actor died: %s", slot.index, error)
        _kill(slot.actor)  # it may be out of reach only, and would keep its GPUs and its server
        if slot.losses > self.spec.config.restarts:
            died = f"vLLM replica {slot.index}: its actor died {slot.losses} times: {error}"
            self._left_out(slot, died)
        else:
            self._place(slot)

    def _left_out(self, slot: _Slot, why: str) -> None:
        slot.status = slot.status.model_copy(update={"state": "failed"})
        if slot.status.served and any(other.state != "failed" for other in self.statuses):
            log.error("%s; the other replicas continue", why)
        else:
            self._give_up(EvalError(why, FAILED))

    def _give_up(self, fault: EvalError) -> None:
        self._fault = self._fault or fault
        self.addresses.fail(fault)
        self._changed.set()


def _kill(actor: Any) -> None:
    import ray

    with suppress(Exception):  # of a Ray that has gone
        ray.kill(actor)


class VllmSampler(Sampler):
    """Chat completions of servers that are started at the first request and stopped by `close`.

    `model` is a directory or a hub id, served as `name`; `adapters` are LoRA directories by name,
    and `asked` is what is asked: `name` or one of them. `generator` is the name, and the adapter
    where one is asked. Logs go to `logs`. The tail is as for `OpenAISampler`. Raises UsageError
    where vLLM or an adapter is missing, DeviceError where the GPUs are too few or too small,
    EvalError where a server does not start.
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
        tail_wait_s: float | None = None,
        tail_share: float = 0.02,
    ) -> None:
        super().__init__(tokenizer)
        self._tail_wait_s, self._tail_share = tail_wait_s, tail_share
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
        if self._asked not in (name, *self._adapters):
            raise UsageError(
                f"there is no adapter {self._asked!r}",
                f"name one of synthesis.server.adapters: {', '.join(self._adapters)}",
            )
        self.generator = name if self._asked == name else f"{name}+{self._asked}"
        self._logs = Path(logs or Path(tempfile.gettempdir()) / "concur-vllm-logs").absolute()
        self._uncounted = False
        self.servers: Servers | None = None
        self._length = self.concurrency = 0

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
        """Responses as they finish. An exception, in here or at the caller's, stops the servers."""
        if not requests:
            return
        try:
            servers = self._serve(requests)
            client = OpenAISampler(
                servers.addresses,
                self._asked,
                concurrency=self.concurrency,
                timeout_s=ANSWER_TIMEOUT_S,
                retries=ATTEMPTS_A_CRASH * (self._config.restarts + 2),
                api_key=servers.spec.api_key,
                direct=True,
                tail_wait_s=self._tail_wait_s,
                tail_share=self._tail_share,
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
        """Stops the servers; sampling again starts them again."""
        servers, self.servers = self.servers, None
        if servers is not None:
            servers.stop(at_once)

    def _serve(self, requests: Requests) -> Servers:
        """The servers, running, with room for these requests."""
        config, shape = self._config, sizing.read_shape(self._model)
        asked = [(sizing.size_of(each.prompt), each.sampling.max_tokens) for each in requests]
        longest, mean = sizing.prompt_tokens([size for size, _ in asked])
        most = max(tokens for _, tokens in asked)
        window = shape.window if shape else None
        length = config.max_model_len or sizing.model_len(longest, most, window)
        if self.servers is not None and length > self._length:
            self.close()
        if self.servers is None:
            gpu, nodes = sizing.read_gpu(), self._nodes()
            answer = sizing.ANSWER_SHARE * most
            wanted = sizing.gpus_a_replica(shape, gpu, config, nodes, mean, answer)
            replicas, gpus = self._placed(nodes, wanted)
            shape = shape and shape.served(config.args, gpus or 1)
            memory: int | None = config.cpu_kv_cache_gib << 30
            if gpus:
                share = config.gpu_memory_utilization
                held = gpu.memory_bytes if gpu else None
                self._require_room(shape, gpu, gpus)
                memory = sizing.kv_cache_bytes(shape, held, gpus, share)
            seqs = config.max_num_seqs or sizing.num_seqs(shape, memory, mean, most)
            self._length, self.concurrency = length, max(1, int(replicas * seqs * ASK_AHEAD))
            self.served = (
                f"vLLM servers: {replicas}; each: GPUs {gpus}"
                f"{' (computed to write most)' if gpus > (config.tensor_parallel or 1) else ''},"
                f" answers at once {seqs} (mean prompt {mean:,} tokens), prompt and answer up to"
                f" {length:,} tokens"
            )
            log.info("%s: %s", self.generator, self.served)
            servers = Servers(self._spec(gpus, seqs), replicas, gpus)
            self.servers = servers
            try:
                servers.start()
            except BaseException:
                self.servers = None  # nothing of it is left
                raise
        return self.servers

    def _require_room(self, shape: sizing.Shape | None, gpu: sizing.Gpu | None, gpus: int) -> None:
        """Raise DeviceError for weights that surely do not fit: vLLM would say so after minutes."""
        elsewhere = self._config.listen == "node"  # with other GPUs, perhaps
        if elsewhere or not (shape and gpu):
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

    def _nodes(self) -> list[int]:
        """GPUs of each node that servers may run on."""
        from kernels_eval.pool.ray import start_ray

        start_ray(None)
        import ray

        here, anywhere = ray.get_runtime_context().get_node_id(), self._config.listen == "node"
        list_nodes: Callable[[], list[Json]] = ray.nodes
        return [
            int(node["Resources"].get("GPU", 0))
            for node in list_nodes()
            if node["Alive"] and (anywhere or node["NodeID"] == here)
        ]

    def _placed(self, nodes: Sequence[int], wanted: int) -> tuple[int, int]:
        """Replicas of `wanted` GPUs, and GPUs of each (0 where there are none)."""
        each = wanted if any(nodes) else 0
        fit = sum(gpus // each for gpus in nodes) if each else 1
        replicas = self._config.replicas or max(1, fit)
        if each and replicas > fit:
            where = "of the cluster" if self._config.listen == "node" else "of this machine"
            raise DeviceError(
                f"{replicas} vLLM replicas of {each} GPUs do not fit onto the {sum(nodes)}"
                f" GPUs {where}",
                "lower synthesis.server.replicas or tensor_parallel, or set"
                " synthesis.server.listen=node on a cluster",
            )
        return replicas, each

    def _spec(self, gpus: int, seqs: int) -> ReplicaSpec:
        config, directory = self._config, Path(self._model).expanduser()
        model = str(directory.absolute()) if directory.is_dir() else self._model
        words = options(config, self._name, self._adapters, gpus, self._length, seqs)
        memory = {} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(config.cpu_kv_cache_gib)}
        return ReplicaSpec(
            config=config,
            command=(*self._command, model, *words),
            names=(self._name, *self._adapters),
            env=memory | config.env,
            threads=os.environ.get("OMP_NUM_THREADS"),
            api_key=secrets.token_urlsafe(24),
            log_dir=str(self._logs),
        )


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
