"""What the profile `proof` showed: models, differences, power of the tests, length as difficulty.

    python -m benchmarks.proof answer --root .concur --model .concur/models/second
    python -m benchmarks.proof models --root .concur
    python -m benchmarks.proof power --root .concur --repetitions 400
    python -m benchmarks.proof relation --repetitions 40

`answer` lets another base model answer the profile's benchmark tasks, and verifies that. `models`
and `power` read the answers that it, a run or an ablation verified under the root; `relation` needs
nothing. These three print Markdown tables.

`power` resamples real answers: two models of equal quality are drawn, task by task, from the
answers of all tuned models together (the null), or a share of one's answers from those of the base
model (a planted effect). It says how often the product's test calls them different. Repetitions
share the same answers, so it knows no spread between trainings.

`relation` writes answers of the teacher with a planted relation of length and correctness, and says
how often the analysis calls shorter reasoning more often correct. An answer counts as correct if no
fault was planted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks.scripted_teacher import planted, requests_of, show
from flows.ablation.branch import planned_answers
from flows.config import load_profile
from kernels_eval.records import Language
from tasks.analysis.config import ObservationConfig
from tasks.analysis.difficulty import difficulty
from tasks.analysis.findings import CORRECTNESS, findings
from tasks.analysis.observations import observe
from tasks.analysis.stage import joined
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.metrics import sign_flip_p
from tasks.benchmark.scoring import score
from tasks.benchmark.stage import Answers, answers_frame
from tasks.reporting.findings import Estimate
from tasks.sources import generated
from tasks.sources import stage as sources
from tasks.sources.generated.program import parse
from tasks.store import SnapshotRef
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.scripted.config import TeacherConfig
from tasks.synthesis.scripted.teacher import ScriptedSampler, size
from tasks.verification.stage import run as verify

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3)
RELATIONS = (-0.3, 0.0, 0.3)
LEVEL = 0.05
OTHERS = "proof"
"""Folder under the root: a file for each model that `answer` asked, with its verdicts' name."""


class Model(NamedTuple):
    """Verified answers, their rows as scoring reads them."""

    answers: Answers
    frame: pl.DataFrame


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["answer", "models", "power", "relation"])
    parser.add_argument("--root", default=".concur")
    parser.add_argument("--model", help="folder of the model that answers")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the profile"
    )
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--tasks", type=int, default=4000, help="programs that `relation` writes")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.action == "relation":
        relation(asked.tasks, asked.repetitions, asked.seed)
        return
    if asked.action == "answer":
        answer(asked.root, asked.model, asked.set)
        return
    models = found_models(asked.root)
    if asked.action == "models":
        report(models)
    else:
        power(models, asked.repetitions, asked.seed)


# -- models ----------------------------------------------------------------------------------------


def answer(root: str, model: str, changes: list[str]) -> None:
    """Keep what the model answers to the benchmark, verified, under its folder's name."""
    named = [f"root={root}", f"training.base_model={model}", *changes]
    config = load_profile("proof", named)
    suite = sources.run(config.benchmark.tasks, root)
    asked, answers = planned_answers(config, suite, "base")
    asked.run()
    verify(answers.candidates, suite, config.verification, config.language)
    place = Path(root) / OTHERS / f"{Path(model).name}.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(answers.verdicts.fingerprint)


def found_models(root: str) -> dict[str, Model]:
    """Base and tuned of the newest run, and the branches of ablations, by name."""
    found: dict[str, Answers] = {}
    runs = [json.loads(path.read_text()) for path in Path(root).glob("benchmark/*/manifest.json")]
    whole = [each for each in runs if len(each["upstream"]) == 2]
    newest = max(whole, key=lambda each: each["created_at"])
    for name, verdicts in zip(("base", "tuned"), newest["upstream"], strict=True):
        found[name] = _answers(root, name, verdicts)
    for path in sorted(Path(root).glob("ablations/*/branches/*.json")):
        branch = json.loads(path.read_text())["branch"]
        if branch["state"] == "done":
            name, judged = branch["name"], branch["answers"]["verdicts"]["fingerprint"]
            found[name] = _answers(root, name, judged)
    for path in sorted((Path(root) / OTHERS).glob("*.json")):
        found[path.stem] = _answers(root, path.stem, path.read_text())
    return {name: Model(each, answers_frame([each])) for name, each in found.items()}


def _answers(root: str, name: str, fingerprint: str) -> Answers:
    verdicts = SnapshotRef(root=root, stage="verification", fingerprint=fingerprint)
    of = verdicts.open().manifest["upstream"][0]
    candidates = SnapshotRef(root=root, stage="synthesis", fingerprint=of)
    return Answers(model=name, candidates=candidates, verdicts=verdicts)


def report(models: dict[str, Model]) -> None:
    frame = pl.concat([model.frame for model in models.values()], how="diagonal_relaxed")
    scores = [row for row in score(frame, ks=(1,), ps=(1.0,)) if row.track == "custom_kernel"]
    rows = []
    for name, model in models.items():
        candidates = model.answers.candidates.open().read(
            columns=["task_id", "code", "reasoning_tokens"]
        )
        own = {row.metric: row for row in scores if row.model == name}
        rows.append(
            {
                "model": name,
                "tasks": own["exec"].tasks,
                "values": [100 * (own[metric].value or 0) for metric in ("exec", "fast_1")],
                **{
                    column: _percent(own[metric].value, own[metric].lower, own[metric].upper)
                    for column, metric in (("Exec@1, %", "exec"), ("fast_1, %", "fast_1"))
                },
                "median speedup of the correct": model.frame.filter(status="correct")["timing"]
                .struct.field("speedup")
                .median(),
                "reasoning tokens, mean": candidates["reasoning_tokens"].mean(),
                "codes": candidates.select("task_id", "code").n_unique(),
            }
        )
    table = pl.DataFrame(rows).drop("values")
    show("Models", table.with_columns(pl.selectors.float().round(2)))
    show("Strategies, mean of the seeds (lowest to highest)", pl.DataFrame(_by_strategy(rows)))
    of_all_seeds = pl.col("model").str.replace(r"-seed\d+$", "")
    frame = frame.with_columns(of_all_seeds)
    names = frame["model"].unique(maintain_order=True).to_list()
    compared = compare_all(frame, pairs=_pairs(names))
    show(
        "Differences, paired by task, in points; answers of all seeds together",
        pl.DataFrame(
            {
                "model": row.model,
                "minus": row.baseline,
                "metric": row.metric,
                "difference": _percent(row.difference, row.lower, row.upper),
                "p": row.p,
                "p (Holm)": row.p_holm,
            }
            for row in compared
            if row.track == "custom_kernel"
        ).with_columns(pl.selectors.float().round(4)),
    )
    counts = frame.with_columns(verdict=pl.concat_str("status", "reason", separator="/"))
    table = counts.pivot("model", index="verdict", values="task_id", aggregate_function="len")
    show("What the verifier said, answers", table.fill_null(0).sort("base", descending=True))
    lengths({name: model for name, model in models.items() if "-seed" not in name})


def _by_strategy(rows: list[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """A row for each strategy and size of the branches among the models."""
    of = {row["model"]: row["model"].rpartition("-seed")[0] for row in rows}
    for name in dict.fromkeys(filter(None, of.values())):
        own = [row for row in rows if of[row["model"]] == name]
        found: dict[str, object] = {"strategy and size": name, "seeds": len(own)}
        for index, column in enumerate(("Exec@1, %", "fast_1, %")):
            values = [row["values"][index] for row in own]
            found[column] = f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        for column in ("median speedup of the correct", "reasoning tokens, mean"):
            found[column] = round(float(np.mean([row[column] for row in own])), 2)
        yield found


def _pairs(names: list[str]) -> list[tuple[str, str]]:
    """Every tuned model against base, and every other strategy against `random` of its size."""
    pairs = [("base", name) for name in names if name != "base"]
    for name in names:
        strategy, _, rest = name.partition("-")
        if rest and strategy != "random" and f"random-{rest}" in names:
            pairs.append((f"random-{rest}", name))
    return pairs


def _percent(value: float | None, lower: float | None, upper: float | None) -> str:
    if value is None:
        return "n/a"
    bounds = "" if lower is None or upper is None else f" ({100 * lower:.1f} to {100 * upper:.1f})"
    return f"{100 * value:.1f}{bounds}"


def lengths(models: dict[str, Model]) -> None:
    """ARL (mean reasoning length of a task) as difficulty. Families are compared within themselves:
    the family stands where the analysis has levels."""
    frames = {name: _with_family(model.answers) for name, model in models.items()}
    rows = []
    for name, frame in frames.items():
        own = difficulty(frame)
        rows.append(_row(name, "Exec, same answers", name, own.arl_exec))
        rows.append(_row(name, "ARL, other answers", name, own.reliability))
        if name == "base":
            continue
        shared = difficulty(frames["base"], frame).agreement
        assert shared
        rows.append(_row("base", "ARL", name, shared.spearman))
        crossed = difficulty(_crossed(frame, frames["base"]))
        rows.append(_row("base", "Exec", name, crossed.arl_exec))
    names = ["ARL of", "and", "of", "Spearman within families", "tasks"]
    show("ARL as difficulty", pl.DataFrame(rows, schema=names, orient="row"))


def _row(first: str, what: str, second: str, found: Estimate) -> tuple[str, str, str, str, int]:
    value = found.why_not or "n/a"
    if found.value is not None and found.lower is not None and found.upper is not None:
        value = f"{found.value:.2f} ({found.lower:.2f} to {found.upper:.2f})"
    return first, what, second, value, found.tasks


def _with_family(answers: Answers) -> pl.DataFrame:
    frame = joined(answers.verdicts.open(), answers.candidates.open())
    suite = answers.verdicts.open().manifest["upstream"][1]
    tasks = SnapshotRef(root=answers.verdicts.root, stage="tasks", fingerprint=suite).open()
    families = tasks.read(columns=["task_id", "family"])
    number = families.select("task_id", level=pl.col("family").rank("dense").cast(pl.Int64))
    return frame.join(number, on="task_id")


def _crossed(frame: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    """The first model's answers, each with the mean length of the second's on its task."""
    arl = second.group_by("task_id").agg(pl.col("reasoning_tokens").mean())
    return frame.drop("reasoning_tokens").join(arl, on="task_id")


# -- power -----------------------------------------------------------------------------------------


def power(models: dict[str, Model], repetitions: int, seed: int) -> None:
    right = {name: _right(model.frame) for name, model in models.items()}
    tasks = sorted(set.intersection(*(set(each) for each in right.values())))
    tuned = [np.concatenate([right[n][t] for n in right if n != "base"]) for t in tasks]
    base = [right["base"][task] for task in tasks]
    samples = min(map(len, base))
    draw = np.random.default_rng(seed)
    rows = []
    for share in SHARES:
        gaps = [b.mean() - t.mean() for b, t in zip(base, tuned, strict=True)]
        planted_effect = share * float(np.mean(gaps))
        found = []
        for number in range(repetitions):
            differences = [
                _mixed(t, b, share, samples, draw) - draw.choice(t, samples).mean()
                for t, b in zip(tuned, base, strict=True)
            ]
            found.append(sign_flip_p(differences, seed=number, resamples=999) < LEVEL)
        rows.append((f"{100 * planted_effect:.1f}", repetitions, f"{100 * np.mean(found):.1f}"))
    columns = ["planted difference in Exec@1, points", "repetitions", f"p < {LEVEL}, %"]
    title = f"Power of the paired test, {len(tasks)} tasks, {samples} answers each, one training"
    show(title, pl.DataFrame(rows, schema=columns, orient="row"))


def _right(frame: pl.DataFrame) -> dict[str, np.ndarray]:
    groups = frame.filter(pl.col("status") != "task_error").group_by("task_id")
    return {
        str(task): (part["status"] == "correct").to_numpy().astype(float)
        for (task,), part in groups
    }


def _mixed(
    tuned: np.ndarray, base: np.ndarray, share: float, samples: int, draw: np.random.Generator
) -> float:
    from_base = draw.random(samples) < share
    return float(
        np.where(from_base, draw.choice(base, samples), draw.choice(tuned, samples)).mean()
    )


# -- relation --------------------------------------------------------------------------------------


def relation(count: int, repetitions: int, seed: int) -> None:
    rows = []
    for planted_relation in RELATIONS:
        frame = pl.DataFrame(list(written(count, planted_relation)))
        names, said = frame["task_id"].unique(maintain_order=True), list[str]()
        pick = np.random.default_rng(seed)
        for _ in range(repetitions):
            chosen = pick.choice(len(names), 600, replace=False)
            part = frame.filter(pl.col("task_id").is_in(names.gather(chosen.tolist()).implode()))
            rows_of = findings(observe(part, ObservationConfig(permutations=199)))
            said.append(next(str(row.verdict) for row in rows_of if row.name == CORRECTNESS))
        text = ", ".join(f"{name} {number}" for name, number in Counter(said).most_common())
        rows.append((planted_relation, repetitions, text))
    columns = ["planted correlation of length and quality", "repetitions", "verdicts"]
    title = "Does the analysis see the planted relation? 600 tasks, 5 answers each"
    show(title, pl.DataFrame(rows, schema=columns, orient="row"))


def written(count: int, length_vs_correctness: float) -> Iterator[dict[str, object]]:
    faults = {name: each for name, each in TeacherConfig().faults.items() if name != "no_code"}
    config = TeacherConfig(length_vs_correctness=length_vs_correctness, faults=faults)
    tasks = generated.load(77, count, "train", "cpp")
    requests = requests_of(tasks, 5, Language.CPP, seed=0)
    for request, response in zip(requests, ScriptedSampler(config).sample(requests), strict=True):
        answer, program = parse_response(response.text), parse(request.task.code)
        assert program and answer.code and answer.reasoning
        fault = planted(program, Language.CPP, answer.code)[1]
        yield {
            "candidate_id": request.request_key,
            "task_id": request.task.task_id,
            "status": "correct" if fault == "none" else "incorrect",
            "reasoning_tokens": size(answer.reasoning),
            "speedup": 1.0,
            "sample_index": request.sample_index,
        }


if __name__ == "__main__":
    main()
