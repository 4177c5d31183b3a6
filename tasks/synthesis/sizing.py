"""Size of a vLLM server, computed from a model's config.json and the GPUs.

A token of context takes `2 * layers * kv_heads * head_dim * value_bytes` bytes
(https://docs.vllm.ai/en/stable/design/paged_attention.html). Memory for keys and values is the GPU
share less weights and 2 GiB a GPU for activations. A running response holds on average its prompt
and half of its length; reasoning models write about half of their limit (7,000 of 16,384 tokens in
the paper's set). Sliding windows and latent attention need less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from kernels_eval.errors import DeviceError
from kernels_eval.records import Json, Record
from kernels_eval.written import json_of
from tasks.synthesis.config import ServerConfig

MOST_SEQS = 256
"""vLLM's own default on most GPUs."""
GPU_SHARE = 0.9
"""--gpu-memory-utilization: share of a GPU's memory for a server."""
ENOUGH_SEQS = 56
"""Sequences at once of a replica, beyond which further GPUs add less than 15 % to what each writes:
computed for QwQ-32B on H100 and H200 (benchmarks/decoding.py)."""
FP8_WEIGHTS = 0.55
"""Share of 16-bit weights: layers halve, embeddings stay (measured, QwQ-32B's shape)."""
ANSWER_SHARE = 0.5
"""Share of `max_tokens` that a response takes."""
PROMPT_TOKENS = 1_300
"""Mean prompt: 4,500 bytes for CUDA (KernelBook and KernelBench), 3.5 bytes per token."""
BYTES_A_TOKEN = 2.0
"""Bytes of code and English per token: 3 to 4 today. Fewer is safe."""
MEAN_BYTES_A_TOKEN = 3.5
TEMPLATE_TOKENS = 256
"""Tokens that a chat template adds."""
ROUND_TO = 256
ACTIVATIONS_BYTES = 2 << 30
CPU_CACHE_BYTES = 1 << 30
"""Memory for keys and values without GPUs (VLLM_CPU_KVCACHE_SPACE=1)."""
WEIGHTS = ("model*.safetensors", "*.safetensors", "pytorch_model*.bin")
"""Weight files. The first kind found counts: some repositories hold the weights in several."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank in vLLM."""


class Shape(Record):
    """Of a model: what its memory depends on."""

    layers: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None = None
    weight_bytes: NonNegativeInt = 0
    quantized: bool = False
    """the weights already are: FP8 makes them no smaller"""
    value_bytes: PositiveInt = 2
    """Of one key or value: 2, or 1 in an FP8 cache."""

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    def served(self, args: Sequence[str], gpus: int = 1) -> Shape:
        """The shape as served with these arguments: FP8 weights and cache, and a key and value head
        per GPU, copied where there are fewer."""
        words = " ".join(args).replace("=", " ").replace("_", "-")
        fp8 = re.search(r"(--quantization|-q) fp8( |$)", words) and not self.quantized
        changed = {
            "weight_bytes": int(self.weight_bytes * (FP8_WEIGHTS if fp8 else 1)),
            "value_bytes": 1 if "--kv-cache-dtype fp8" in words else self.value_bytes,
            "kv_heads": max(self.kv_heads, gpus),
        }
        return self.model_copy(update=changed)


class Gpu(Record):
    """A GPU's memory."""

    name: str
    memory_bytes: PositiveInt


QWQ_32B = Shape(layers=64, kv_heads=8, head_dim=128, window=40960, weight_bytes=65_530_000_000)
"""QwQ-32B, Kevin-32B and KernelCoder: 32.8 billion parameters in 16 bits."""
H200 = Gpu(name="NVIDIA H200", memory_bytes=143_771 << 20)


def gpus_a_replica(
    shape: Shape | None,
    gpu: Gpu | None,
    server: ServerConfig,
    machine_gpus: int,
    prompt: float,
    answer: float,
) -> int:
    """GPUs of a replica: `tensor_parallel`, where given.

    Else the fewest of 1, 2, 4 or 8 that divide the machine's GPUs (or fit `replicas` times) and the
    key and value heads, and hold ENOUGH_SEQS answers at once, or the most. 1 where shape or GPU is
    unknown, or nothing fits."""
    if server.tensor_parallel or not (shape and shape.weight_bytes and gpu):
        return server.tensor_parallel or 1
    held = dict[int, int]()
    for gpus in (1, 2, 4, 8):
        fits = (
            gpus * server.replicas <= machine_gpus if server.replicas else not machine_gpus % gpus
        )
        if fits and machine_gpus and shape.kv_heads % gpus == 0:
            held[gpus] = _held(shape, gpu, gpus, server, prompt, answer)
    enough = (gpus for gpus, count in held.items() if count >= ENOUGH_SEQS)
    return next(enough, max(held, key=lambda gpus: held[gpus], default=1))


def _held(
    shape: Shape, gpu: Gpu, gpus: int, server: ServerConfig, prompt: float, answer: float
) -> int:
    served = shape.served(server.args, gpus)
    memory = kv_cache_bytes(served, gpu.memory_bytes, gpus, GPU_SHARE) or 0
    return min(MOST_SEQS, fitting(served, memory, prompt + answer / 2))


def planned_gpus(model: str | None, server: ServerConfig, max_tokens: int, gpus: int) -> int:
    """GPUs of a replica on a machine of `gpus` GPUs like this one's, before any prompt is known."""
    shape = read_shape(model) if model and not server.tensor_parallel else None
    answer = ANSWER_SHARE * max_tokens
    return gpus_a_replica(shape, read_gpu(), server, gpus, PROMPT_TOKENS, answer)


class ServerSize(Record):
    """What a server is started with; `gpus` of each of the `replicas`, 0 without GPUs."""

    replicas: PositiveInt
    gpus: NonNegativeInt
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt

    def in_words(self) -> str:
        return (
            f"vLLM replicas: {self.replicas}; each: GPUs {self.gpus}, answers at once"
            f" {self.max_num_seqs}, prompt and answer up to {self.max_model_len:,} tokens"
        )


def server_size(
    model: str, server: ServerConfig, machine_gpus: int, prompts: Sequence[int], max_tokens: int
) -> ServerSize:
    """Server settings for these prompts (in bytes) on this machine. Raises DeviceError for fewer
    GPUs than `server` asks."""
    shape, gpu = read_shape(model), read_gpu()
    window = shape.window if shape else None
    longest, mean = prompt_tokens(prompts)
    replicas, gpus = server.replicas or 1, 0
    memory: int | None = CPU_CACHE_BYTES
    if machine_gpus:
        answer = ANSWER_SHARE * max_tokens
        gpus = gpus_a_replica(shape, gpu, server, machine_gpus, mean, answer)
        replicas = server.replicas or max(1, machine_gpus // gpus)
        shape = shape.served(server.args, gpus) if shape else None
        memory = kv_cache_bytes(shape, gpu.memory_bytes if gpu else None, gpus, GPU_SHARE)
    if replicas * gpus > machine_gpus:
        raise DeviceError(
            f"{replicas} vLLM replicas of {gpus} GPUs do not fit onto the {machine_gpus} GPUs"
            " of this machine",
            "lower synthesis.server.replicas or tensor_parallel",
        )
    return ServerSize(
        replicas=replicas,
        gpus=gpus,
        max_model_len=model_len(longest, max_tokens, window),
        max_num_seqs=num_seqs(shape, memory, mean, max_tokens),
    )


def read_gpu() -> Gpu | None:
    """This machine's first GPU, by NVML. None where NVML does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
        return Gpu(name=pynvml.nvmlDeviceGetName(handle), memory_bytes=memory)
    except Exception:  # no driver, no library
        return None


def read_shape(model: str) -> Shape | None:
    """Shape of a model directory or cached hub id; None where its config.json says too little. vLLM
    serves 32-bit weights in 16."""
    directory = model_directory(model)
    if directory is None:
        return None
    try:
        config: Json = json_of((directory / "config.json").read_text(encoding="utf-8"))
        quantized = "quantization_config" in config
        config = config.get("text_config") or config
        heads = config["num_attention_heads"]
        wide = "float32" in (config.get("dtype"), config.get("torch_dtype"))
        held = ([*directory.glob(pattern)] for pattern in WEIGHTS)
        files = next(filter(None, held), [])
        return Shape(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            window=config.get("max_position_embeddings"),
            weight_bytes=sum(path.stat().st_size for path in files) // (2 if wide else 1),
            quantized=quantized,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def size_of(prompt: str) -> int:
    return len(prompt.encode("utf-8", "replace"))


def prompt_tokens(sizes: Sequence[int]) -> tuple[int, int]:
    """Estimated tokens of prompts of these sizes in bytes, with their template: an upper bound for
    the longest, and the mean."""
    most, mean = max(sizes, default=0), sum(sizes) / max(1, len(sizes))
    return (
        int(most / BYTES_A_TOKEN) + TEMPLATE_TOKENS,
        int(mean / MEAN_BYTES_A_TOKEN) + TEMPLATE_TOKENS,
    )


def model_len(prompt: int, max_tokens: int, window: int | None) -> int:
    """--max-model-len: room for the longest prompt and a whole response (tokens), within the
    model's window."""
    wanted = -(-(prompt + max_tokens) // ROUND_TO) * ROUND_TO
    return min(wanted, window) if window else wanted


def num_seqs(shape: Shape | None, memory_bytes: int | None, prompt: int, max_tokens: int) -> int:
    """--max-num-seqs, 1 to 256: how many responses to prompts of `prompt` tokens (the mean) fit
    into memory; 256 where unknown.

    The longest prompt would cost 14 % of the speed for 4,808 tokens (computed, KernelBench on an
    H200). Half too many slots cost 2 % by preemption (benchmarks/results/2026-11-25-night.md).
    """
    if shape is None or memory_bytes is None:
        return MOST_SEQS
    fit = fitting(shape, memory_bytes, prompt + ANSWER_SHARE * max_tokens / 2)
    return min(MOST_SEQS, max(1, fit))


def fitting(shape: Shape, memory_bytes: int, context: float) -> int:
    return max(0, int(memory_bytes / (shape.token_bytes * max(1, context))))


def kv_cache_bytes(
    shape: Shape | None, gpu_bytes: int | None, gpus: int, utilization: float
) -> int | None:
    """Memory for keys and values of a replica on `gpus` GPUs of `gpu_bytes` each; None where
    unknown."""
    if shape is None or gpu_bytes is None:
        return None
    return int(gpus * (gpu_bytes * utilization - ACTIVATIONS_BYTES)) - shape.weight_bytes


def lora_rank(adapter: Path) -> int:
    """--max-lora-rank for an adapter directory: the smallest in vLLM that fits."""
    try:
        words = (adapter / "adapter_config.json").read_text(encoding="utf-8")
        needed = int(json_of(words)["r"])
    except (OSError, ValueError, KeyError, TypeError):
        needed = 1  # vLLM says what is wrong with it
    return next((rank for rank in LORA_RANKS if rank >= needed), LORA_RANKS[-1])


def model_directory(model: str) -> Path | None:
    """Directory of a model's files: its own, or the local hub cache's. Uses no network; None where
    it is in neither."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
