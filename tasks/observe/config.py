"""How the observations divide reasoning lengths."""

from __future__ import annotations

from pydantic import PositiveInt

from kernels_eval.records import Record


class ObservationConfig(Record):
    """Bins of reasoning length, in tokens of the generator's own tokenizer."""

    bin_tokens: PositiveInt = 256
    """width of a bin of reasoning length (paper)"""
    last_bin_tokens: PositiveInt = 20_000
    """from here on one bin holds all (paper)"""
