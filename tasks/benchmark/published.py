"""Published results, as data: for reference beside ours, never mixed with them.

Guarantees: every row says where its number comes from, and `quoted` marks what we know only as
public reviews of the paper quote it (shown as "(r)"). Does not guarantee comparability: these are
KernelBench levels 1 and 2 on an RTX 5090 under KernelBench's own harness and tolerance, on the
track "any".
"""

from __future__ import annotations

from typing import Literal

from kernels_eval.records import Record

PAPER = "ConCuR, arXiv 2510.07356"


class PublishedRow(Record):
    """One published number. `value` is a share in [0, 1], as in our own scores."""

    model: str
    level: Literal[1, 2]
    metric: Literal["exec", "fast_1"]
    k: Literal[1, 10]
    value: float
    source: str = PAPER
    quoted: bool = True

    @property
    def label(self) -> str:
        """The model's name, marked "(r)" where the number is as quoted by reviews."""
        return f"{self.model} (r)" if self.quoted else self.model


def _rows(
    model: str, *numbers: tuple[Literal[1, 2], Literal["exec", "fast_1"], Literal[1, 10], int]
) -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(model=model, level=level, metric=metric, k=k, value=percent / 100)
        for level, metric, k, percent in numbers
    )


PUBLISHED: tuple[PublishedRow, ...] = (
    *_rows(
        "KernelCoder",
        (1, "exec", 1, 58),
        (2, "exec", 1, 59),
        (1, "fast_1", 1, 17),
        (1, "exec", 10, 91),
        (2, "exec", 10, 95),
        (2, "fast_1", 10, 68),
    ),
    *_rows("QwQ-32B", (1, "exec", 1, 18), (2, "exec", 1, 17)),
    *_rows("Kevin-32B", (1, "exec", 1, 50), (2, "exec", 1, 46)),
    *_rows(
        "DeepSeek-R1-0528",
        (1, "exec", 1, 52),
        (2, "exec", 1, 55),
        (1, "fast_1", 1, 18),
        (2, "exec", 10, 97),
        (2, "fast_1", 10, 82),
    ),
    *_rows("DeepSeek-V3.1-Think", (1, "exec", 1, 44), (2, "exec", 1, 30)),
    *_rows("Claude-4-Sonnet", (1, "exec", 1, 33), (2, "exec", 1, 26)),
    *_rows("GPT-4o", (1, "exec", 1, 15), (2, "exec", 1, 5)),
    *_rows("Qwen3-8B", (1, "exec", 10, 31), (2, "exec", 10, 53)),
    *_rows("Qwen3-8B trained on the ConCuR set", (1, "exec", 10, 47), (2, "exec", 10, 89)),
)
"""The paper's main table, then its second base model before and after. Cells that no source we read
gives are not there."""
