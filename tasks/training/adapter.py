"""Check that vLLM can serve an adapter directory, and merge an adapter into its base model.

Guarantees: `check_adapter` passes no directory that vLLM refuses for its configuration, rank or
lack of tensors; merged weights are on disk only where the logits of the files themselves agree with
those of base and adapter apart, and the figures lie beside them in `merge.json`. Does not guarantee
that merged and unmerged give the same text: rounding to bfloat16 moves logits, by how much is what
the figures say; nor that probes of a few hundred tokens see every difference.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record
from tasks.files import atomic_directory
from tasks.sources.small_model import (
    load_causal_model,
    load_tokenizer,
    quiet_progress,
    renamed_option,
)

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, MERGE = "adapter_config.json", "adapter_model.safetensors", "merge.json"
VLLM_MAX_RANK = 32
"""What our servers are started with (`--max-lora-rank 32`). vLLM's own default is 16."""

# what vLLM 0.32 refuses (vllm/lora/peft_helper.py): PEFT writes the key, and anything but "off" is
# another kind of adapter
UNSUPPORTED = """modules_to_save use_dora lora_bias alora_invocation_tokens layer_replication
    use_bdlora use_qalora target_parameters trainable_token_indices""".split()
PLAIN_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
PROBE_TOKENS = 512
# Share of what the adapter changes that merging may change again; docs/how-to/use-the-adapter.md
# has the measurements
TOLERANCES: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.15}


class AdapterFacts(Record):
    """What an adapter directory holds."""

    base_model: str
    """as PEFT recorded it: what loads the adapter without being told a base model loads this"""
    rank: int
    """the largest rank of any module: what --max-lora-rank must be at least"""
    alpha: float
    target_modules: tuple[str, ...]
    modules: int
    """linear layers with a pair of matrices"""
    parameters: int
    size_bytes: int


class MergeCheck(Record):
    """Logits of base and adapter apart against those of the merged files, both computed in float32
    over the same positions."""

    dtype: Literal["float32", "bfloat16"]
    """of the merged weights on disk"""
    positions: int
    """token positions compared"""
    effect_rms: float
    """root mean square over logits of what the adapter changes: (base + adapter) - base"""
    difference_rms: float
    """the same of what merging changes: merged - (base + adapter)"""
    difference_max: float
    """largest absolute difference of one logit"""
    kl_nats: float
    """mean over positions of KL(base + adapter || merged), nats"""
    same_top_token: float
    """share of positions whose likeliest next token is the same"""
    tolerance: float
    """largest difference_rms / effect_rms that is accepted"""

    @property
    def relative_difference(self) -> float:
        """difference_rms / effect_rms; infinite where the adapter changes nothing."""
        return self.difference_rms / self.effect_rms if self.effect_rms else math.inf

    @property
    def agrees(self) -> bool:
        return self.relative_difference <= self.tolerance


# -- the directory ---------------------------------------------------------------------------------


def check_adapter(
    adapter_dir: Path, *, max_rank: int = VLLM_MAX_RANK, base_model: str | None = None
) -> AdapterFacts:
    """Read an adapter directory as vLLM will. Nothing is loaded onto a device; every tensor is read
    once.

    Raises UsageError for a directory that is not a LoRA adapter in PEFT's form, that has a feature
    vLLM refuses, a rank above `max_rank`, another base model than `base_model`, a matrix without
    its partner, values that are not finite, or no effect at all.
    """
    config = _config(adapter_dir)
    pattern = config.get("rank_pattern") or {}
    rank = max([int(config["r"]), *(int(value) for value in pattern.values())])
    if refused := _refused(config):
        raise UsageError(
            f"vLLM cannot serve the adapter {adapter_dir}: {'; '.join(refused)}",
            "train a plain LoRA adapter",
        )
    if rank > max_rank:
        raise UsageError(
            f"the adapter {adapter_dir} has rank {rank} and the server takes {max_rank}",
            f"start vLLM with --max-lora-rank {rank}",
        )
    named = str(config.get("base_model_name_or_path") or "")
    if base_model is not None and named != base_model:
        raise UsageError(
            f"the adapter {adapter_dir} names the base model {named!r}, not {base_model!r}",
            "load it onto its own base model",
        )
    modules, parameters = _checked_tensors(adapter_dir / WEIGHTS, rank)
    return AdapterFacts(
        base_model=named,
        rank=rank,
        alpha=float(config["lora_alpha"]),
        target_modules=tuple(sorted(config["target_modules"])),
        modules=modules,
        parameters=parameters,
        size_bytes=(adapter_dir / WEIGHTS).stat().st_size,
    )


def _config(adapter_dir: Path) -> dict[str, Any]:
    try:
        config = json.loads((adapter_dir / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{adapter_dir} is no adapter: {CONFIG} cannot be read ({error})",
            "give a directory that training wrote",
        ) from error
    if (
        not isinstance(config, dict)
        or config.get("peft_type") != "LORA"
        or not {"r", "lora_alpha", "target_modules"} <= config.keys()
    ):
        raise UsageError(
            f"{adapter_dir / CONFIG} is not that of a LoRA adapter",
            "give a directory that training wrote",
        )
    return config


def _refused(config: dict[str, Any]) -> list[str]:
    found = [f"{name} is set" for name in UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        found.append(f"bias is {config['bias']!r}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in PLAIN_INITIALISATIONS:
        found.append(f"init_lora_weights {start!r} changes the base model's weights")
    if not isinstance(config["target_modules"], list):
        found.append("target_modules is a pattern, not a list of names")
    return found


def _checked_tensors(weights: Path, rank: int) -> tuple[int, int]:
    """(modules, parameters)."""
    import torch
    from safetensors import SafetensorError, safe_open

    ranks: dict[str, dict[str, int]] = {}
    parameters, effective = 0, False
    try:
        with safe_open(str(weights), framework="pt") as file:
            names = file.keys()  # no mapping: it is not iterable itself
            for name in names:
                found = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
                if not found:
                    raise UsageError(
                        f"{weights} holds {name}, which is no matrix of a LoRA module",
                        "train a plain LoRA adapter",
                    )
                module, side = found.groups()
                tensor = file.get_tensor(name)
                if not torch.isfinite(tensor).all():
                    raise UsageError(
                        f"{name} in {weights} holds values that are not finite",
                        "train again, with a lower learning rate",
                    )
                ranks.setdefault(module, {})[side] = tensor.shape[0 if side == "A" else 1]
                parameters += tensor.numel()
                effective = effective or (side == "B" and bool(tensor.any()))
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"cannot read {weights}: {error}",
            "train again: the adapter's weights are missing or damaged",
        ) from error
    for module, sides in ranks.items():
        if len(sides) != 2 or len(set(sides.values())) != 1 or max(sides.values()) > rank:
            raise UsageError(
                f"{module} in {weights} has no pair of matrices of rank {rank} or less: {sides}",
                "train again",
            )
    if not effective:  # LoRA starts with B = 0: this was never trained
        raise UsageError(
            f"the adapter in {weights} changes nothing: all its second matrices are zero",
            "train at least one step",
        )
    return len(ranks), parameters


# -- merged weights --------------------------------------------------------------------------------


def merge_adapter(
    base_model_dir: str | Path,
    adapter_dir: Path,
    out_dir: Path,
    probes: Sequence[str],
    *,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    tolerance: float | None = None,
) -> MergeCheck:
    """Write base and adapter as one model with its tokenizer to `out_dir`, which must not exist,
    and return how well it agrees.

    `probes` are texts as the model sees them (prompts and completions); of each the first 512
    tokens count. Merging and comparing are done in float32 on the CPU, one model in memory at a
    time: 4 bytes a parameter (131 GB for QwQ-32B), twice while it is saved in another type. What is
    compared is read back from the files. Raises UsageError for input that cannot be used, EvalError
    where merged and unmerged differ by more than `tolerance` (a share of what the adapter changes;
    by default that of `TOLERANCES`): nothing is published then.
    """
    import torch

    if out_dir.exists():
        raise UsageError(f"{out_dir} exists", "give a directory that does not, or remove it")
    check_adapter(adapter_dir, max_rank=2**31)
    tokenizer = load_tokenizer(base_model_dir)
    encoded = [
        ids
        for text in probes
        if (ids := tokenizer(text, add_special_tokens=False)["input_ids"][:PROBE_TOKENS])
    ]
    if not encoded:
        raise UsageError(
            "there is no probe to compare merged and unmerged weights on", "give at least one text"
        )
    with atomic_directory(out_dir) as temporary:
        with torch.inference_mode(), quiet_progress():
            base = _logits(load_causal_model(base_model_dir, dtype=torch.float32), encoded)
            apart = _merged_into(
                temporary, base_model_dir, adapter_dir, encoded, getattr(torch, dtype)
            )
            tokenizer.save_pretrained(temporary)
            merged = _logits(load_causal_model(temporary, dtype=torch.float32), encoded)
        check = compare(
            base,
            apart,
            merged,
            dtype=dtype,
            tolerance=TOLERANCES[dtype] if tolerance is None else tolerance,
        )
        if not check.agrees:
            raise EvalError(
                f"merged weights in {dtype} are not published: they change the logits by"
                f" {check.difference_rms:.3g} where the adapter changes them by"
                f" {check.effect_rms:.3g}, {check.relative_difference:.1%} and at most"
                f" {check.tolerance:.1%} is allowed",
                "merge in float32, or serve the adapter beside the base model",
            )
        (temporary / MERGE).write_text(json.dumps(check.model_dump(), indent=2), encoding="utf-8")
    return check


def compare(
    base: Sequence[torch.Tensor],
    apart: Sequence[torch.Tensor],
    merged: Sequence[torch.Tensor],
    *,
    dtype: Any,
    tolerance: float,
) -> MergeCheck:
    """Of logits, one [positions, vocabulary] each a probe: the base model's, base and adapter
    apart, and merged."""
    import torch
    from torch.nn.functional import kl_div

    plain, tuned, joined = (torch.cat(list(each)).double() for each in (base, apart, merged))
    change = joined - tuned
    after, before = joined.log_softmax(-1), tuned.log_softmax(-1)
    divergence = float(kl_div(after, before, log_target=True, reduction="batchmean"))
    return MergeCheck(
        dtype=dtype,
        positions=len(tuned),
        effect_rms=float((tuned - plain).square().mean().sqrt()),
        difference_rms=float(change.square().mean().sqrt()),
        difference_max=float(change.abs().max()),
        kl_nats=max(divergence, 0.0),  # rounding can take it below 0
        same_top_token=float((tuned.argmax(-1) == joined.argmax(-1)).double().mean()),
        tolerance=tolerance,
    )


def _merged_into(
    directory: Path,
    base_model_dir: str | Path,
    adapter_dir: Path,
    encoded: Sequence[list[int]],
    dtype: Any,
) -> list[Any]:
    """Save the merged model; returns the logits before merging. A function of its own, so that its
    model is freed when it ends."""
    import torch
    from peft import PeftModel

    with renamed_option():
        model = PeftModel.from_pretrained(
            load_causal_model(base_model_dir, dtype=torch.float32), str(adapter_dir)
        ).eval()
        logits = _logits(model, encoded)
        model.merge_and_unload().to(dtype).save_pretrained(directory)
    return logits


def _logits(model: Any, encoded: Sequence[list[int]]) -> list[Any]:
    import torch

    return [
        model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float() for ids in encoded
    ]
