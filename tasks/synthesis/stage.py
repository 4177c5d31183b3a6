"""Tasks in, candidates out: every response is parsed, counted and kept as it arrives.

Guarantees: n candidates per task in the finished snapshot unless the generator has fewer; a response to the same request (task, prompt,
generator, sampling, sample index) in this or an earlier snapshot is never asked for again; a killed run loses at most what is in flight.
"""

from __future__ import annotations

from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, Language, candidate_id
from tasks.progress import report
from tasks.schemas import CANDIDATES
from tasks.sources.models import resolve_model
from tasks.store import Snapshot, SnapshotRef, code_version, fingerprint, known_rows
from tasks.synthesis.asked import Asked, Speed, data_version
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.prompts import prompt_hash
from tasks.synthesis.sampler import Request, Response, Sampler

STAGE = "synthesis"


def make_sampler(config: SynthesisConfig, root: str, adapter: Path | None = None) -> Sampler:
    """The configured sampler. Raises UsageError naming the setting that is missing."""
    tokenizer = resolve_model(config.tokenizer, root) if config.tokenizer else None
    if config.sampler == "recorded":
        from tasks.synthesis.recorded import RecordedSampler, ResponsesFile

        return ResponsesFile(config.responses, tokenizer=tokenizer) if config.responses else RecordedSampler(tokenizer=tokenizer)
    if config.model is None:
        raise UsageError(f"synthesis.sampler is {config.sampler!r} but synthesis.model is not set", "--set synthesis.model=NAME")
    if config.sampler == "transformers":
        from tasks.synthesis.local import TransformersSampler

        return TransformersSampler(resolve_model(config.model, root), adapter, name=model_name(config, adapter))
    if config.sampler == "vllm":
        return _vllm_sampler(config, root, adapter, tokenizer)
    from tasks.synthesis.client import OpenAISampler

    if config.base_url is None:
        raise UsageError("synthesis.sampler is 'openai' but synthesis.base_url is not set", "--set synthesis.base_url=http://HOST:PORT/v1")
    key, place = None, f"the environment variable {config.api_key_env}"
    if config.api_key_block is not None:
        from tasks.policy import secret

        key, place = secret(config.api_key_block), f"the Prefect secret block {config.api_key_block}"
    return OpenAISampler(
        base_url=config.base_url,
        model=config.model,
        api_key_env=config.api_key_env,
        api_key=key,
        key_place=place,
        concurrency=config.concurrency,
        tokenizer=tokenizer,
    )


def _vllm_sampler(config: SynthesisConfig, root: str, adapter: Path | None, tokenizer: str | None) -> Sampler:
    from tasks.synthesis.server import VllmSampler

    name, adapters, asked = str(config.model), dict(config.server.adapters), config.adapter
    if adapter is not None:
        asked = adapter.parent.name[:12]
        adapters[asked] = str(adapter)
    return VllmSampler(
        resolve_model(name, root),
        name,
        config.server,
        generator=model_name(config, adapter),
        adapters=adapters,
        asked=asked,
        logs=None if "://" in root else Path(root) / "logs" / "vllm",
        tokenizer=tokenizer,
    )


def model_name(config: SynthesisConfig, adapter: Path | None) -> str:
    """The generator's identity: the model, and the adapter by the fingerprint of the snapshot it lies in, or by its name."""
    if adapter is not None:
        return f"{config.model}+{adapter.parent.name[:12]}"
    return f"{config.model}+{config.adapter}" if config.adapter and config.sampler == "vllm" else str(config.model)


class Synthesis:
    """The synthesis of one tasks snapshot by one generator."""

    def __init__(self, tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None) -> None:
        self.config, self.language, self.adapter = config, language, adapter
        self._tasks = tasks
        identity = [
            config.model_dump(mode="json", exclude={"concurrency", "api_key_env", "api_key_block", "server"}),
            language.value,
            model_name(config, adapter),
            data_version(config),
        ]
        self.snapshot = Snapshot(tasks.root, STAGE, fingerprint(STAGE, identity, [tasks.fingerprint], code_version("tasks.synthesis")))

    def run(self) -> SnapshotRef:
        """Ask for what is missing and publish. Returns a finished snapshot of tasks.schemas.CANDIDATES."""
        snapshot = self.snapshot
        if snapshot.finished:
            return snapshot.ref
        snapshot.recover(CANDIDATES)
        sampler = make_sampler(self.config, snapshot.root, self.adapter)
        try:
            requests = Asked(self._tasks, self.config, self.language, sampler.generator)
            done = snapshot.keys("request_key")
            asked_before = known_rows(snapshot.root, STAGE, "request_key", requests.keys - done, exclude=snapshot.fingerprint)
            snapshot.append(asked_before, CANDIDATES)
            done = snapshot.keys("request_key")
            total, left = len(requests), requests.without(done)
            if len(left) and self.config.sampler == "vllm":
                report(STAGE, len(done), total, f"{sampler.generator}: starting servers")  # for minutes, where the model is large
            speed = Speed()
            with snapshot.journal(CANDIDATES) as add:
                for number, response in enumerate(sampler.sample(left), start=1):
                    add(self._row(requests[response.request_key], response, sampler))
                    speed.count(response)
                    report(STAGE, len(done) + number, total, f"{sampler.generator}{speed.line(len(left) - number)}")
            rows = len(snapshot.read(columns=["candidate_id"], unique="candidate_id"))
            extra = {"generator": sampler.generator, "requests": total, "unanswered": total - len(snapshot.keys("request_key"))}
        finally:
            sampler.close()
        if not rows:
            raise UsageError(f"{sampler.generator} gave no response to any of {total} requests", "check synthesis.sampler and the language")
        return snapshot.publish(config=self.config, upstream=[self._tasks.fingerprint], rows=rows, extra=extra).ref

    def _row(self, request: Request, response: Response, sampler: Sampler) -> dict:
        parsed = parse_response(response.text, reasoning=response.reasoning, finish_reason=response.finish_reason)
        counts = sampler.count_tokens([parsed.reasoning])
        candidate = Candidate(
            candidate_id=candidate_id(request.task, sampler.generator, request.sampling, request.sample_index, response.text),
            task_id=request.task.task_id,
            language=request.language,
            generator=sampler.generator,
            sampling=request.sampling,
            sample_index=request.sample_index,
            prompt_hash=prompt_hash(request.prompt),
            response=response.text,
            reasoning=parsed.reasoning,
            answer=parsed.answer,
            code=parsed.code,
            parse_reason=parsed.parse_reason,
            reasoning_tokens=counts[0] if counts else None,
            completion_tokens=response.completion_tokens,
            finish_reason=response.finish_reason,
        )
        return candidate.model_dump(mode="json") | {"request_key": request.request_key}


def planned(tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None) -> Snapshot:
    """The snapshot that `run` with the same arguments fills."""
    return Synthesis(tasks, config, language, adapter).snapshot


def run(tasks: SnapshotRef, config: SynthesisConfig, language: Language, adapter: Path | None = None) -> SnapshotRef:
    """The whole stage as a plain call."""
    return Synthesis(tasks, config, language, adapter).run()
