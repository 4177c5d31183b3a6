"""An adapter merged into its base model, for servers without LoRA: published only where the files'
logits agree with base plus adapter (`merge.json`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record
from tasks.files import atomic_directory
from tasks.models import load_causal_model, load_tokenizer, quiet_progress, renamed_option
from tasks.training.adapter import check_adapter

if TYPE_CHECKING:
    import torch

MERGE = "merge.json"
PROBE_TOKENS = 512
MergedType = Literal["float32", "bfloat16"]
TOLERANCES: dict[MergedType, float] = {"float32": 1e-3, "bfloat16": 0.15}
"""Share of the adapter's effect by which merging may differ; docs/how-to/use-the-adapter.md has the
measurements."""


class MergeCheck(Record):
    """Logits of base and adapter apart against those of the merged files, both computed in float32
    over the same positions."""

    dtype: MergedType
    """of the merged weights on disk"""
    positions: int
    """token positions compared"""
    effect_rms: float
    """root mean square over logits of what the adapter changes: (base + adapter) - base"""
    difference_rms: float
    """the same of what merging changes: merged - (base + adapter)"""
    tolerance: float
    """largest difference_rms / effect_rms that is accepted"""

    @property
    def relative_difference(self) -> float:
        """difference_rms / effect_rms; infinite where the adapter changes nothing."""
        return self.difference_rms / self.effect_rms if self.effect_rms else math.inf

    @property
    def agrees(self) -> bool:
        return self.relative_difference <= self.tolerance


def merge_adapter(
    base_model_dir: str | Path,
    adapter_dir: Path,
    out_dir: Path,
    probes: Sequence[str],
    *,
    dtype: MergedType = "bfloat16",
) -> MergeCheck:
    """Write base and adapter as one model with its tokenizer to a new `out_dir`, and return how
    well it agrees.

    `probes` are prompts with completions, cut to 512 tokens. Computed in float32 on the CPU, one
    model at a time: 4 bytes a parameter (131 GB for QwQ-32B), twice that while saving another type.
    Raises UsageError for unusable input, EvalError, without publishing, above `TOLERANCES`.
    """
    import torch

    if out_dir.exists():
        raise UsageError(f"{out_dir} exists", "give a directory that does not, or remove it")
    check_adapter(adapter_dir)
    tokenizer = load_tokenizer(base_model_dir)
    texts = [text for text in probes if text]
    if not texts:
        raise UsageError(
            "there is no probe to compare merged and unmerged weights on", "give at least one text"
        )
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    encoded = [each[:PROBE_TOKENS] for each in ids]
    with atomic_directory(out_dir) as folder, torch.inference_mode(), quiet_progress():
        base = _logits(load_causal_model(base_model_dir, dtype=torch.float32), encoded)
        apart = _merged_into(folder, base_model_dir, adapter_dir, encoded, getattr(torch, dtype))
        tokenizer.save_pretrained(folder)
        merged = _logits(load_causal_model(folder, dtype=torch.float32), encoded)
        check = MergeCheck(
            dtype=dtype,
            positions=len(base),
            effect_rms=_rms(apart - base),
            difference_rms=_rms(merged - apart),
            tolerance=TOLERANCES[dtype],
        )
        if not check.agrees:
            raise EvalError(
                f"merged weights in {dtype} are not published: they change the logits by"
                f" {check.difference_rms:.3g} where the adapter changes them by"
                f" {check.effect_rms:.3g}, {check.relative_difference:.1%} and at most"
                f" {check.tolerance:.1%} is allowed",
                "merge in float32, or serve the adapter beside the base model",
            )
        (folder / MERGE).write_text(json.dumps(check.model_dump(), indent=2), encoding="utf-8")
    return check


def _merged_into(
    directory: Path,
    base_model_dir: str | Path,
    adapter_dir: Path,
    encoded: Sequence[list[int]],
    dtype: Any,
) -> torch.Tensor:
    import torch
    from peft import PeftModel

    with renamed_option():
        plain = load_causal_model(base_model_dir, dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, str(adapter_dir)).eval()
        logits = _logits(model, encoded)
        model.merge_and_unload().to(dtype).save_pretrained(directory)
    return logits


def _logits(model: Any, encoded: Sequence[list[int]]) -> torch.Tensor:
    """[positions of all probes, vocabulary]."""
    import torch

    found = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in encoded]
    return torch.cat(found).double()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
