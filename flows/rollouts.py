"""What a policy learns in: it answers in this process or on vLLM servers, and workers judge the
answers.

Guarantees: answers of this process are written in batches that its device holds; the same code
for the same task is judged once in a step, and with `verification.once_per_code` once in a run.
Imports nothing of Prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flows.config import PipelineConfig
from kernels_eval.judge.messages import no_code_verdict
from kernels_eval.records import Candidate, KernelTask, Verdict
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.sampler import Request
from tasks.verification.stage import pool_of

if TYPE_CHECKING:
    from tasks.synthesis.served_policy import ServedPolicy
    from tasks.training.grpo import Answer, Asked, Environment

Code = tuple[str, str]
"""A task's id, and code for it."""
Pairs = Iterable[tuple[KernelTask, Candidate] | None]
Verify = Callable[[Pairs], Iterable[Verdict]]
"""`Pool.verify`, or what does the same."""


@contextmanager
def environment(
    config: PipelineConfig, tasks: Mapping[str, KernelTask], prompts: Mapping[str, str]
) -> Iterator[Environment]:
    """Answers by the policy, in this process or where `reinforcement.base_url` says, and verdicts
    by a pool of workers."""
    root = None if "://" in config.root else config.root
    with (
        pool_of(config.language, config.verification) as pool,
        served_policy(config.reinforcement.base_url, root) as served,
    ):
        yield environment_of(config, tasks, prompts, pool.verify, served)


@contextmanager
def served_policy(
    base_url: str | Sequence[str] | None, root: str | Path | None
) -> Iterator[ServedPolicy | None]:
    """The servers of a policy, which read its adapters in a folder below `root` that ends with it;
    None without an address."""
    if not base_url:
        yield None
        return
    from tasks.synthesis.served_policy import ServedPolicy

    with TemporaryDirectory(prefix="policy-", dir=root) as folder:
        served = ServedPolicy(base_url, Path(folder))
        try:
            yield served
        finally:
            served.close()


def environment_of(
    config: PipelineConfig,
    tasks: Mapping[str, KernelTask],
    prompts: Mapping[str, str],
    verify: Verify,
    served: ServedPolicy | None = None,
) -> Environment:
    """`environment` with verdicts from elsewhere, and answers from `served` where it is given."""
    from tasks.training.grpo import Answer, Environment

    sampling, kept = config.reinforcement.sampling, dict[Code, Verdict]()

    def write(model: Any, tokenizer: Any, asked: Sequence[Asked]) -> Iterator[Answer]:
        from tasks.synthesis.local import Loaded, Row

        loaded = Loaded(tokenizer, model)
        requests = [
            Request(
                request_key=str(each.place),
                task=tasks[each.task_id],
                language=config.language,
                prompt=prompts[each.task_id],
                sample_index=each.place,
                sampling=sampling.model_copy(
                    update={
                        "seed": each.seed,
                        "max_tokens": min(sampling.max_tokens, loaded.window - len(each.prompt)),
                    }
                ),
            )
            for each in asked
        ]
        written: Iterable[tuple[str, list[int]]]
        if served:
            given = {str(each.place): each.prompt for each in asked}
            found = served.write(model, requests, given)
            written = ((each.request_key, list(each.tokens or ())) for each in found)
        else:
            pairs = zip(requests, asked, strict=True)
            rows = [Row(request, each.prompt, loaded.window) for request, each in pairs]
            written = ((row.request.request_key, row.tokens) for row in loaded.written(rows))
        for place, tokens in written:
            text = loaded.text_of(tokens)
            reasoning = parse_response(text).reasoning or ""
            length = len(tokenizer(reasoning, add_special_tokens=False)["input_ids"])
            yield Answer(asked[int(place)], text, tokens, length)

    def judge(answers: Iterable[Answer | None]) -> Iterator[tuple[int, Verdict]]:
        known = kept if config.verification.once_per_code else {}
        asked, codes = dict.fromkeys(known, -1), dict[int, Code]()
        settled: list[tuple[int, Verdict]] = []

        def new() -> Pairs:
            for answer in answers:
                if answer is None:
                    yield None
                    continue
                task, place = tasks[answer.asked.task_id], answer.asked.place
                candidate = _candidate(answer, config, task)
                if candidate.code is None:
                    settled.append((place, no_code_verdict(task, candidate)))
                    continue
                code = codes[place] = task.task_id, candidate.code
                if asked.setdefault(code, place) == place:
                    yield task, candidate

        for verdict in verify(new()):
            place = int(verdict.candidate_id)
            known[codes[place]] = verdict
            yield place, verdict
        yield from settled
        for place, code in codes.items():
            if code in known and asked[code] != place:
                yield place, known[code]

    # nothing may run beside a timed kernel on its device
    return Environment(write, judge, apart=config.language.needs_gpu)


def _candidate(answer: Answer, config: PipelineConfig, task: KernelTask) -> Candidate:
    parsed = parse_response(answer.text)
    return Candidate(
        candidate_id=str(answer.asked.place),
        task_id=task.task_id,
        language=config.language,
        generator="policy",
        sample_index=answer.asked.place,
        response=answer.text,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        code=parsed.code,
        parse_reason=parsed.parse_reason,
    )
