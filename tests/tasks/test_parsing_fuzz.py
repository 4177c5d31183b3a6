"""The parser of responses under a minute of arbitrary bytes: it never raises, and what it returns
is always legal."""

import random
import time

import pytest

from kernels_eval.records import REASONS, Status
from tasks.synthesis.parsing import parse_response

PIECES = [
    *(
        b"<think>",
        b"</think>",
        b"```python\n",
        b"```",
        b"~~~",
        b"\n",
        b"class ModelNew(nn.Module):\n",
        b"import torch\n",
        b"\x00",
    ),
    *(
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\r\n",
        b"<|im_end|>",
        b"    def forward(self, x):\n        return x\n",
        b"```cpp\n",
        b"'''",
    ),
    *(b'"""', b"\\", b"\xf0\x9f\x98\x80"),
]


def arbitrary(rng):
    """Random bytes, pieces of responses, or both, up to some kilobytes."""
    parts = []
    for _ in range(rng.randint(0, 40)):
        parts.append(
            rng.choice(PIECES) if rng.random() < 0.6 else rng.randbytes(rng.randint(0, 60))
        )
    return b"".join(parts) * (rng.randint(2, 50) if rng.random() < 0.02 else 1)


@pytest.mark.slow
def test_a_minute_of_arbitrary_bytes():
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    deadline, count = time.monotonic() + 60, 0
    while time.monotonic() < deadline:
        text = arbitrary(rng).decode("utf-8", rng.choice(["replace", "surrogateescape", "ignore"]))
        parsed = parse_response(text, finish_reason=rng.choice([None, "stop", "length"]))
        assert (parsed.code is None) == (parsed.parse_reason is not None), (
            f"seed {seed}, input {count}"
        )
        assert parsed.parse_reason is None or parsed.parse_reason in REASONS[Status.NO_CODE], (
            f"seed {seed}, input {count}"
        )
        assert parsed.code is None or "ModelNew" in parsed.code, f"seed {seed}, input {count}"
        parsed.model_dump_json()
        count += 1
    assert count > 1000
