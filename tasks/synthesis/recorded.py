"""Samplers that replay recorded responses: the bundled ones, or a Parquet file. Requests without a
recording, follow-ups included, are skipped; sampling parameters are ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.sources import bundled
from tasks.sources.files import existing, read_parquet
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import guessed_finish
from tasks.synthesis.sampler import Request, Requests, Response, Sampler, tokenizer_of
from tasks.typed import typed_row

COLUMNS = ("level", "problem_id", "sample_id", "model", "response")


class RecordedSampler(Sampler):
    """The bundled responses: sample i of a task is its i-th recording in the requested language."""

    generator = "recorded"
    answers_follow_ups = False

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> RecordedSampler:
        tokenizer = tokenizer_of(config, root)
        return ResponsesFile(config.responses, tokenizer) if config.responses else cls(tokenizer)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        if not config.responses:
            return stable_hash(bundled.texts())
        path = Path(config.responses)
        if not path.is_file():
            raise UsageError(
                f"{config.responses} is not a file",
                "give a Parquet file of responses with --set synthesis.responses=PATH",
            )
        return stable_hash([path.stat().st_size, path.stat().st_mtime_ns])

    def sample(self, requests: Requests) -> Iterator[Response]:
        for request in requests:
            text = self._text(request) if request.turn == 1 else None
            if text is not None:
                known = guessed_finish(text)
                yield Response(request_key=request.request_key, text=text, **known)

    def _text(self, request: Request) -> str | None:
        names = {
            task.task_id: task.name for task in bundled.load("all") + bundled.load("gradients")
        }
        name = names.get(request.task.task_id)
        texts = bundled.responses(name, request.language.value) if name else []
        return dict(enumerate(texts)).get(request.sample_index)


class ResponsesFile(RecordedSampler):
    """Recorded responses to KernelBench: columns level, problem_id, sample_id, model, response, and
    language where it is not CUDA. `generator` is the file's `model`. Raises UsageError for a
    missing column, several models, or two responses for one sample."""

    def __init__(self, path: str | Path, tokenizer: str | Path | None = None) -> None:
        super().__init__(tokenizer)
        file = existing(path)
        found = read_parquet(file, COLUMNS, ["language"]).iter_rows(named=True)
        rows = [typed_row(row, f"{file} row {number}") for number, row in enumerate(found)]
        models = {row["model"] for row in rows}
        if len(models) != 1 or None in models:
            named = ", ".join(sorted(map(str, models))) or "none"
            raise UsageError(
                f"{file} holds responses of {len(models)} models ({named})",
                "give a file whose rows all name one model",
            )
        self.generator = str(models.pop())
        self._texts: dict[tuple[str, str, int], str | None] = {}
        for row in rows:
            task_id = f"kernelbench/L{row['level']}/{row['problem_id']}"
            key = (task_id, row.get("language") or "cuda", row["sample_id"])
            if key in self._texts:
                raise UsageError(
                    f"{file} holds two responses for {task_id}, sample {row['sample_id']}",
                    "keep one row for each sample_id of a task",
                )
            self._texts[key] = row["response"]

    def _text(self, request: Request) -> str | None:
        key = (request.task.task_id, request.language.value, request.sample_index)
        return self._texts.get(key)
