"""Samplers that replay recorded responses: the bundled ones, or a table. Requests without a
recording, follow-ups included, are skipped; sampling parameters are ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Row, stable_hash
from tasks.sources import bundled
from tasks.sources.files import existing
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.inputs import candidate_parts, model_of, task_id_of
from tasks.synthesis.parsing import guessed_finish
from tasks.synthesis.prompts import block
from tasks.synthesis.sampler import Request, Requests, Response, Sampler, tokenizer_of

Answer = Json
"""`text`, and what a table says of `reasoning` and `finish_reason`; empty without a recording."""
Key = tuple[str, str, int]
"""Task, language and sample."""


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
            return stable_hash(bundled.recordings())
        path = Path(config.responses)
        if not path.is_file():
            raise UsageError(
                f"{config.responses} is not a file",
                "give a table of responses with --set synthesis.responses=PATH",
            )
        return stable_hash([path.stat().st_size, path.stat().st_mtime_ns])

    def sample(self, requests: Requests) -> Iterator[Response]:
        for request in requests:
            if answer := self._answer(request) if request.turn == 1 else {}:
                known = {} if "finish_reason" in answer else guessed_finish(answer["text"])
                yield Response(request_key=request.request_key, **answer, **known)

    def _answer(self, request: Request) -> Answer:
        name = bundled.recorded_names().get(request.task.task_id)
        texts = bundled.responses(name, request.language.value) if name else []
        text = dict(enumerate(texts)).get(request.sample_index)
        return {} if text is None else {"text": text}


class ResponsesFile(RecordedSampler):
    """Recorded answers of one model, `generator`: a table of candidates (tasks.synthesis.inputs),
    in CUDA where it does not say the language. Raises UsageError for another table, several models,
    or two responses for one sample."""

    def __init__(self, path: str | Path, tokenizer: str | Path | None = None) -> None:
        super().__init__(tokenizer)
        file = existing(path)
        self._answers: dict[Key, Answer] = {}
        models: set[str | None] = set()
        samples: Counter[tuple[str, str]] = Counter()
        for part in candidate_parts(file):
            for number, row in enumerate(part.rows()):
                if (row.get("turn") or 1) > 1:
                    continue
                models.add(row["generator"] if "generator" in row else model_of(file))
                task_id = task_id_of(row, f"{part.name} row {number}")
                language = (row.get("language") or "cuda").lower()
                index = row.get("sample_index")
                key = (task_id, language, samples[task_id, language] if index is None else index)
                samples[task_id, language] += 1
                if key in self._answers:
                    raise UsageError(
                        f"{file} holds two responses for {task_id}, sample {key[2]}",
                        "keep one row for each sample of a task",
                    )
                self._answers[key] = _answer(row)
        if len(models) != 1 or None in models:
            named = ", ".join(sorted(map(str, models))) or "none"
            raise UsageError(
                f"{file} holds responses of {len(models)} models ({named})",
                "give a file whose rows all name one model",
            )
        self.generator = str(models.pop())

    def _answer(self, request: Request) -> Answer:
        key = (request.task.task_id, request.language.value, request.sample_index)
        return self._answers.get(key, {})


def _answer(row: Row) -> Answer:
    code, text = row.get("code"), row.get("response")
    text = block(code) if text is None and code else text
    kept = {name: row[name] for name in ("reasoning", "finish_reason") if row.get(name)}
    return {} if text is None else {"text": text, **kept}
