"""Samplers that replay what a generator wrote earlier: the bundled responses, or a Parquet file of
them.

Guarantees: the same request always gives the same response; a request without a recording is passed
over, never answered with another task's text, and no follow-up has one: what was recorded answers
the first prompt. Sampling parameters are not looked at: the recording was made with those of its
own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.sources import bundled
from tasks.sources.files import existing, read_parquet
from tasks.synthesis.parsing import is_unfinished
from tasks.synthesis.sampler import Request, Requests, Response, TokenCounter

COLUMNS = ("level", "problem_id", "sample_id", "model", "response")
OPTIONAL_COLUMNS = ("language",)


class RecordedSampler(TokenCounter):
    """The bundled responses: sample i of a bundled task is its i-th recording in the language asked
    for."""

    generator = "recorded"

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses in the order of the requests, fewer where a recording is missing."""
        known = {task.task_id: task.name for task in bundled.load("all")}
        for request in requests:
            if request.task.task_id not in known or request.turn > 1:
                continue
            texts = bundled.responses(known[request.task.task_id], request.language.value)
            if request.sample_index < len(texts):
                yield _response(request, texts[request.sample_index])


class ResponsesFile(TokenCounter):
    """Recorded responses to KernelBench: columns level, problem_id, sample_id, model, response, and
    language where it is not CUDA.

    `generator` is the file's `model`. Raises UsageError for a file that lacks a column, holds
    several models, or two responses for one level, problem_id and sample_id.
    """

    def __init__(self, path: str | Path, tokenizer: str | Path | None = None) -> None:
        super().__init__(tokenizer)
        file = existing(path)
        rows = read_parquet(file, COLUMNS, OPTIONAL_COLUMNS).to_dicts()
        models = {row["model"] for row in rows}
        if len(models) != 1 or None in models:
            named = ", ".join(sorted(map(str, models))) or "none"
            raise UsageError(
                f"{file} holds responses of {len(models)} models ({named})",
                "give a file whose rows all name one model",
            )
        self.generator = str(models.pop())
        self._texts: dict[tuple[str, str, int], str] = {}
        for row in rows:
            key = (
                f"kernelbench/L{row['level']}/{row['problem_id']}",
                row.get("language") or Language.CUDA.value,
                row["sample_id"],
            )
            if key in self._texts:
                raise UsageError(
                    f"{file} holds two responses for {key[0]}, sample {key[2]}",
                    "keep one row for each sample_id of a task",
                )
            if row["response"] is not None:
                self._texts[key] = row["response"]

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses in the order of the requests, fewer where a recording is missing."""
        for request in requests:
            text = self._texts.get(
                (request.task.task_id, request.language.value, request.sample_index)
            )
            if text is not None and request.turn == 1:
                yield _response(request, text)


def _response(request: Request, text: str) -> Response:
    return Response(
        request_key=request.request_key,
        text=text,
        finish_reason="length" if is_unfinished(text) else "stop",
    )
