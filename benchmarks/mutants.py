"""First-order mutants of correct kernels: how many the judge ends, and which live.

    python -m benchmarks.mutants --language cpp --limit 500 --out mutants.jsonl
    python -m benchmarks.mutants --tasks kernelbench.parquet --responses qwq32b_candidates.parquet
    --out mutants.jsonl         # recorded CUDA answers, on a GPU

A mutant differs from a correct answer in one place of its C++ or CUDA text, by one rule of
`RULES`. The mutants are drawn rule by rule, so that no rule crowds out another, with a seed. A run
that is stopped goes on where it was. Prints, for each rule, how many were built, ended and lived,
then the line of each that lives: it is to be read, as some mean the same (equivalent mutants,
Offutt and Pan 1997).
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing_budget import choosing, chosen
from kernels_eval.config import EvalConfig
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Candidate, KernelTask, Language, Status, Verdict, stable_hash
from kernels_eval.source.lexer import blank

RULES: dict[str, tuple[tuple[str, str], ...]] = {
    "bound": ((r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > ")),
    "start": ((r"= 0;(?= \w+ <)", "= 1;"),),
    "step": ((r"\+\+(\w+)\)", r"\1 += 2)"), (r" \+= (\w+\.x)\)", r" += 2 * \1)")),
    "index": ((r"(?<=[\w)])\](?! *[\(\{])", " + 1]"), (r" [+-] 1\]", "]")),
    "sum": ((r" \+ ", " - "), (r" - ", " + ")),
    "product": ((r" \* ", " + "), (r" / ", " * ")),
    "accumulate": ((r" \+= ", " = "), (r" \+= ", " -= ")),
    "factor": ((r"\b(?!0\.0*f?(?![\w.]))(\d+\.\d*f?)(?!e)", r"(1.02f * \1)"),),
    "sign": ((r"(?<== )(?=[\w(])(?!0)", "-"), (r"(?<=return )(?=[\w(])", "-")),
    "tiny": ((r"\b1e-\d+f?", "1e-3f"), (r"\beps\b(?= *\))", "0 * eps")),
    "size": ((r"(?<== )(\d{2,})(?=;)", r"\1 - 1"),),
    "ceiling": ((r"\((\w+) \+ \w+ - 1\) / ", r"\1 / "),),
    "extreme": (
        (r"\bmax\(", "min("),
        (r"\bmin\(", "max("),
        (r"\bfmaxf\(", "fminf("),
        (r"-INFINITY|-FLT_MAX|std::numeric_limits<float>::lowest\(\)", "0.0f"),
    ),
    "function": (
        (r"\b(?:std::)?exp[f]?\(", "expm1f("),
        (r"\b(?:std::)?sqrt[f]?\(", "("),
        (r"\brsqrtf\(", "1.0f / ("),
        (r"\b(?:std::)?f?abs[f]?\(", "("),
        (r"\b(?:std::)?tanh[f]?\(", "erff("),
    ),
    "condition": ((r" && ", " || "), (r" == ", " != "), (r"\bif \(", "if (true || ")),
    "precision": (
        (r"\bdouble(?= \w+ = )", "float"),
        (r"\bfloat(?= \w+ = 0)", "c10::BFloat16"),
    ),
    "omission": ((r"(?<=[;{}]\s)\s*[\w\[\]\.]+ [-+*/]= [^;]*;", ""), (r"\bcontinue;", "")),
    "barrier": ((r"__sync(?:threads|warp)\([^;]*\);", ""),),
}
"""Patterns and what takes their place. A pattern sees neither comments nor strings."""

NOT_A_KERNEL = re.compile(r"TORCH_CHECK|#|template|static_assert|PYBIND11")
"""Lines that are left as they are."""


@dataclass(frozen=True)
class Mutant:
    task: KernelTask
    candidate: Candidate
    rule: str
    before: str
    after: str


def main() -> int:
    parser = choosing(__doc__, limit=500)
    parser.add_argument("--answers", type=int, default=1000, help="answers that are tried")
    parser.add_argument("--level", choices=("screen", "confirm"), default="confirm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="verdicts as JSON lines, appended")
    arguments = parser.parse_args()
    language, limit = Language(arguments.language), arguments.limit
    arguments.limit = arguments.answers
    config = EvalConfig() if arguments.level == "confirm" else EvalConfig().screened()
    said = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    rows = {row["candidate"]: row for row in map(json.loads, said)}
    with (
        Pool(language, config, workers=arguments.workers) as pool,
        arguments.out.open("a", encoding="utf-8") as file,
    ):

        def judge(mutants: list[Mutant]) -> None:
            by_id = {each.candidate.candidate_id: each for each in mutants}
            left = [each for name, each in by_id.items() if name not in rows]
            for verdict in pool.verify((each.task, each.candidate) for each in left):
                row = row_of(by_id[verdict.candidate_id], verdict)
                rows[verdict.candidate_id] = row
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{row['task']} {row['rule']}: {row['reason']}", file=sys.stderr, flush=True)

        originals = [
            Mutant(task, candidate, "none", "", "")
            for task, candidate in chosen(arguments, language)
        ]
        judge(originals)
        correct = [
            each
            for each in originals
            if rows[each.candidate.candidate_id]["status"] == Status.CORRECT
        ]
        mutants = drawn([each for each in map(mutants_of, correct)], limit, arguments.seed)
        judge(mutants)
    print(table([rows[each.candidate.candidate_id] for each in mutants]))
    return 0


def mutants_of(original: Mutant) -> list[Mutant]:
    """All mutants of an answer, each of them once."""
    made = {}
    for text in native_texts(original.candidate.code):
        for rule, before, after, mutated in changes(text):
            code = original.candidate.code.replace(text, mutated)
            name = stable_hash([original.task.task_id, code])
            candidate = original.candidate.model_copy(update={"candidate_id": name, "code": code})
            made.setdefault(name, Mutant(original.task, candidate, rule, before, after))
    return [*made.values()]


def native_texts(code: str) -> list[str]:
    """Literals of a module that hold C++ or CUDA functions and stand in it as they are."""
    literals = {
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return [each for each in sorted(literals) if "{" in each and code.count(each) == 1]


def changes(text: str) -> Iterator[tuple[str, str, str, str]]:
    """A rule, the line before and after, and the text with one change."""
    visible = blank(text)
    for rule, patterns in RULES.items():
        for pattern, instead in patterns:
            for match in re.finditer(pattern, visible):
                start = visible.rfind("\n", 0, match.start()) + 1
                end = visible.find("\n", match.end())
                if NOT_A_KERNEL.search(visible[start:end]) or not inside(visible, match.start()):
                    continue
                new = match.expand(instead)
                mutated = text[: match.start()] + new + text[match.end() :]
                line = mutated[start : mutated.find("\n", match.start() + len(new))]
                yield rule, text[start:end].strip(), line.strip(), mutated


def inside(visible: str, position: int) -> bool:
    """Whether a position is in a function's body."""
    return visible.count("{", 0, position) > visible.count("}", 0, position)


def drawn(by_answer: list[list[Mutant]], limit: int, seed: int) -> list[Mutant]:
    """One of each rule, then a second of each, and so on, from the answers in turn."""
    chance = random.Random(seed)
    places: dict[str, list[tuple[int, Mutant]]] = {rule: [] for rule in RULES}
    for mutants in by_answer:
        seen = Counter[str]()
        for mutant in chance.sample(mutants, len(mutants)):
            places[mutant.rule].append((seen[mutant.rule], mutant))
            seen[mutant.rule] += 1
    queues = [
        [each for _, each in sorted(made, key=lambda pair: pair[0])] for made in places.values()
    ]
    turns = (
        queue[turn]
        for turn in range(max(map(len, queues)))
        for queue in queues
        if turn < len(queue)
    )
    return [each for _, each in zip(range(limit), turns, strict=False)]


def row_of(mutant: Mutant, verdict: Verdict) -> dict[str, str]:
    return {
        "candidate": verdict.candidate_id,
        "task": verdict.task_id,
        "rule": mutant.rule,
        "before": mutant.before,
        "after": mutant.after,
        "status": verdict.status.value,
        "reason": verdict.reason.value,
        "detail": verdict.detail[:200],
    }


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: what became of each rule's mutants, then those that live."""
    lines = ["| rule | mutants | not built | ended | live |", "| --- | ---: | ---: | ---: | ---: |"]
    groups = {rule: [row for row in rows if row["rule"] == rule] for rule in RULES} | {"all": rows}
    for rule, own in groups.items():
        unbuilt = sum(row["status"] == Status.COMPILE_ERROR for row in own)
        live = sum(row["status"] == Status.CORRECT for row in own)
        lines.append(f"| {rule} | {len(own)} | {unbuilt} | {len(own) - unbuilt - live} | {live} |")
    reasons = Counter(row["reason"] for row in rows)
    lines += ["", "; ".join(f"{reason} {count}" for reason, count in reasons.most_common()), ""]
    for row in rows:
        if row["status"] == Status.CORRECT:
            lines.append(f"- {row['task']}, {row['rule']}: `{row['before']}` to `{row['after']}`")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
