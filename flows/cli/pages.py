"""Pages of commands whose data are more than a person reads: the headline first, counts before
rows. `--json` has everything."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.cli.render import Json, clean_line, in_units, label, render
from kernels_eval.flags import FLAGS
from kernels_eval.grouping import grouped
from kernels_eval.installation import command_name
from tasks.progress import duration
from tasks.reporting.choice import choice_of
from tasks.reporting.text import SHORT_ID, interval, p_value, plural, printable

ROW_COLUMNS = 8
"""Most columns of a snapshot's rows that are shown, of those that tell the rows apart."""
QUIET = frozenset({"schema_version", "language", "verdict_key", "log_tail", "phases"})
"""Columns that say little of a row."""
LONGEST_COUNTS = 12
MOST_REFRESHES = 5
ENDS = ("name", "run_name", "began_at", "ending")
WIDTH = 100
MORE = "--json prints the whole manifest, the types of the columns and every value of these rows."

MORE_OF_LIST = (
    "--stage STAGE lists all of a stage; `concur show FINGERPRINT --root {root}` shows one.\n"
    "--json has all snapshots and refreshes."
)
MEANS = (
    "means over tasks. exec: the share of right samples; fast_p: of right ones with speedup above p"
)
MORE_OF_SETS = "--json has each set's configuration."


def of_shown(data: Json) -> str:
    """The page of a snapshot, or of a candidate's verdict."""
    return of_verdict(data["verdict"]) if "verdict" in data else of_snapshot(data)


def of_verdict(row: Json) -> str:
    """Which candidate it is, its verdict as `concur verify` prints it, and its kernel."""
    from flows.cli.verdict import render
    from kernels_eval.records import Verdict

    known = {name: value for name, value in row.items() if name in Verdict.model_fields}
    name = row.get("given_id") or row["candidate_id"][:SHORT_ID]
    verdict = Verdict.model_validate(known)
    lines = [clean_line(f"{name} of {verdict.task_id}"), render(verdict, name)]
    if code := row.get("code"):
        lines += ["", *map(printable, code.expandtabs(4).splitlines())]
    return "\n".join(lines)


def of_snapshot(data: Json) -> str:
    """What a snapshot holds, its rows, and the names of its columns."""
    manifest: Mapping[str, Any] = data["manifest"] or {}
    stage, fingerprint = data["path"].rsplit("/", 2)[-2:]
    if not data["finished"]:
        headline = f"{stage} {fingerprint[:SHORT_ID]} is unfinished"
    else:
        took = f", made in {duration(manifest['seconds'])}" if manifest.get("seconds") else ""
        of = [manifest[name] for name in ("language", "device") if manifest.get(name)]
        headline = f"{stage} {fingerprint[:SHORT_ID]}: {plural(manifest['rows'], 'row')}"
        headline = ", ".join([headline, *of]) + took
    counts = {
        name: dict(list(value.items())[:LONGEST_COUNTS])
        for name, value in manifest.items()
        if name.endswith("_counts") and value
    }
    about = {"made_at": manifest.get("created_at"), **counts, "path": data["path"]}
    about["choice"] = choice_of(manifest)
    about["upstream"] = manifest.get("upstream")
    rows = _brief(data["rows"])
    columns = textwrap.wrap(f"columns: {', '.join(map(label, data['columns']))}", WIDTH)
    more = len(rows) < manifest.get("rows", 0)
    title = f"rows ({len(rows)} of {manifest['rows']:,}, --rows N for more)" if more else "rows"
    body = render({name: value for name, value in about.items() if value} | {title: rows})
    return "\n".join([clean_line(headline), "", body, "", *columns, "", MORE])


def _brief(rows: Sequence[Json]) -> list[Json]:
    """The rows with the same few columns: those whose every value fits a line."""
    plain = [{"speedup": (row.get("timing") or {}).get("speedup")} | row for row in rows]
    first = ("given_id", "candidate_id", "task_id", "status", "reason", "speedup")
    every = dict.fromkeys((*first, *(plain[0] if plain else ())))
    names = [name for name in every if name not in QUIET]
    names = [name for name in names if _fits_a_line([row.get(name) for row in plain])]
    return [{name: row.get(name) for name in names[:ROW_COLUMNS]} for row in plain]


def _fits_a_line(values: Sequence[Any]) -> bool:
    known = [value for value in values if value not in (None, "")]
    nested = any(isinstance(value, Mapping | list) for value in known)
    return bool(known) and not nested and "\n" not in "".join(map(str, known))


def of_list(data: Json) -> str:
    """Each stage's newest and unfinished snapshots, or all of the only stage, and the refreshes."""
    stages = grouped((each["stage"], each) for each in data["snapshots"])
    whole = len(stages) == 1
    rows = [
        {"stage": stage, "snapshots": None if whole else len(found)}
        | {"fingerprint" if whole else "newest": each["fingerprint"][:SHORT_ID]}
        | {"rows": each["rows"], "age": _age(each)}
        | {"size": in_units(each["bytes"])}
        | {"state": each["level"] if each["finished"] else "unfinished"}
        for stage, found in stages.items()
        for each in found
        if whole or each is found[-1] or not each["finished"]
    ]
    begun = _only(data["refreshes"][-MOST_REFRESHES:], *ENDS)
    told = render({"root": data["root"], "snapshots": rows, "newest_refreshes": begun})
    return f"{told}\n\n{MORE_OF_LIST.format(root=shlex.quote(data['root']))}"


def _age(snapshot: Json) -> str:
    changed = datetime.fromisoformat(snapshot["changed_at"])
    return duration((datetime.now(UTC) - changed).total_seconds())


def of_gc(data: Json) -> str:
    """What goes, each with its reason, and what stays by reason."""
    went, found = "gone" if data["deleted"] else "would go", data["snapshots"]
    go = [
        {"stage": each["stage"], "fingerprint": each["fingerprint"][:SHORT_ID]}
        | {"size": in_units(each["bytes"]), "why": each["reason"]}
        for each in found
        if not each["stays"]
    ]
    stay = Counter(each["reason"] for each in found if each["stays"])
    headline = (
        f"{plural(len(go), 'snapshot')} {went} ({in_units(data['freed_bytes'])}),"
        f" {stay.total():,} stay ({in_units(data['kept_bytes'])})"
    )
    stays = [{"why": reason, "snapshots": count} for reason, count in stay.items()]
    last = ["", "--delete removes them."] if go and not data["deleted"] else []
    return "\n".join([_page(headline, {went: go, "stays": stays}), *last])


def of_analysis(data: Json) -> str:
    """What was found, without the tables: the report has them."""
    return render({name: data[name] for name in data if name not in ("bins", "thirds", "findings")})


def of_doctor(data: Json) -> str:
    """What runs here, what stops the rest, and every check."""
    checks: list[Json] = data["checks"]
    told, above = {}, list[str]()
    for work, ready in data["runs"].items():
        stops = [each for each in checks if each["work"] == work and not each["ok"]]
        lines = [f"{each['name']}: {each['fix']}" for each in stops]
        first = [f"first what {above[0]} needs"] if above else []
        told[work] = "yes" if ready else ["no", *(lines or first)]
        above += [] if ready else [work]
    missing = {each["name"]: each["fix"] for each in checks if each["fix"] and not each["work"]}
    found = [
        {"name": each["name"], "found": each["found"], "ok": _answer(each)}
        | {"needed_for": each["work"] or "optional"}
        for each in checks
    ]
    return render({"profile": data["profile"], **told, "checks": found, "optional_fixes": missing})


def _answer(check: Json) -> str:
    unknown = check["found"].startswith("unknown")
    return "unknown" if unknown else "yes" if check["ok"] else "no"


def of_batch(data: Json) -> str:
    """What became of a table of candidates, and where it is."""
    correct = data["statuses"].get("correct", 0)
    headline = (
        f"{plural(data['candidates'], 'candidate')} of {plural(data['tasks'], 'task')}"
        f" ({data['language']}, {data['device']}): {correct:,} correct"
    )
    speedup, fastest = data["speedup"], data["correct"]
    unstable = speedup["unstable"]
    wrong: list[Json] = data["not_correct"]
    place = shlex.quote(str(Path(data["verdicts"]).parent))
    more = f" (the fastest {len(fastest)} of {correct:,})" if len(fastest) < correct else ""
    shown = {
        "left_out": data.get("left_out"),
        "statuses": data["statuses"],
        "reasons": {
            status: counts for status, counts in data["reasons"].items() if status != "correct"
        },
        "faster_than_the_reference": f"{speedup['above_1']:,} of {speedup['timed']:,} timed",
        "unstable": unstable and f"{unstable:,} of {speedup['timed']:,} timed: {FLAGS['unstable']}",
        f"correct{more}": [_of_batch(row) | _times(row) for row in fastest],
        "not_correct": [_of_batch(row) | _only([row], "reason", "detail")[0] for row in wrong],
        "quarantined": data["quarantined"],
        **{name: data[name] for name in ("this_run", "verdicts", "summary")},
        "one_of_them": f"{command_name()} show ID --root {place}",
        "all_of_it": f"{command_name()} view {place}",
        "judged_again": "the same command with another --out; with this one verdicts stay",
    }
    return _page(headline, shown)


def _of_batch(row: Json) -> Json:
    """Names of a candidate: the user's own, and that of its snapshots."""
    return {
        "task": row["task_id"],
        "candidate": row["given_id"],
        "id": row["candidate_id"][:SHORT_ID],
    }


def _times(row: Json) -> Json:
    ends = (row["speedup"], row["speedup_lower"], row["speedup_upper"])
    said = "not timed" if row["speedup"] is None else interval(*ends, ".2x")
    return {
        "speedup": f"{said}, unstable" if row["unstable"] else said,
        "time_in_own_kernels": interval(row["custom_kernel_time_share"], form=".1%"),
    }


def of_scores(data: Json) -> str:
    """Scores without the rows of a k above the samples: the notes, last, say why they are empty.
    Tracks with the same scores are one row."""
    rows = [_of_score(row) for row in data["scores"]]
    least = min((row["k"] for row in rows), default=None)
    shown: list[Json] = []
    for row in rows:
        if row["k"] != least and row["exec"]["value"] is None:
            continue
        ordered = {name: row[name] for name in ("model", "group", "track", "k")} | row
        same = next((each for each in shown if each | {"track": ""} == row | {"track": ""}), None)
        if same:
            same["track"] = f"{same['track']} and {row['track']} alike"
        else:
            shown.append(ordered)
    about = {name: data[name] for name in data if name not in ("notes", "degenerate_tasks")}
    about["degenerate_tasks"] = data["degenerate_tasks"] or None
    told = about | {"shares": MEANS, "scores": shown}
    return "\n\n".join([render(told), render({"notes": data["notes"]})])


def _of_score(row: Json) -> Json:
    """A row of scores with the number of its right samples, without what says nothing."""
    from tasks.benchmark.score_table import NONE_THERE

    samples = f"{row['right']:,} right of {plural(row['samples'], 'sample')}"
    quiet = {"degenerate": NONE_THERE, "missing": 0, "baseline": "eager", "right": row["right"]}
    kept = {name: value for name, value in row.items() if quiet.get(name, ...) != value}
    return kept | {"samples": samples}


def of_morning(data: Json) -> str:
    """What is new, what to do, what failed."""
    from flows.morning.text import ERROR_ROW, confirmed

    errors = [each | {"candidate": each["candidate_id"][:SHORT_ID]} for each in data["errors"]]
    told = {
        "to_do": data["next_steps"],
        "what_came": data["changes"],
        "training_set": data["choice"],
        "verdicts": data["status_counts"],
        "new_verdicts": data["new_status_counts"],
        "why_new_ones_failed": data["reason_counts"],
        "confirmed": confirmed(data["confirmation"]),
        "errors_of_new_ones": _only(errors, *ERROR_ROW),
        "refreshes_that_did_not_end": _only(data["unfinished"], *ENDS, "error"),
        "error": data["refresh"]["error"],
        "cautions": data["cautions"],
    }
    return _page(f"{data['title']}: {data['headline']}", told)


SET_COLUMNS = (
    *("strategy", "size", "samples", "tasks", "criterion_counts", "composition"),
    *("median_reasoning_tokens", "median_speedup", "file", "problem"),
)


def of_sets(data: Json) -> str:
    """A row for each training set, what the sets are made of, or why a candidate is in one."""
    if "explanations" in data:
        return render(data)
    sets: list[Json] = data["sets"]
    choices = {
        f"{each['strategy']}{f'-{size}' if (size := each['size']) else ''}": choice_of(each)
        for each in sets
        if each["samples"]
    }
    tables = {"sets": _only(sets, *SET_COLUMNS), "source": data["source"]}
    return "\n".join([render(tables), "", render(choices), "", MORE_OF_SETS])


def of_ablation(data: Json) -> str:
    """Which strategy won, and what became of the branches."""
    branches: list[Json] = data["branches"]
    done = sum(branch["state"] == "done" for branch in branches)
    took = duration(data["seconds"])
    headline = f"{data['name']}: {done:,} of {len(branches):,} branches done in {took}"
    shown = {
        "finding": data.get("finding"),
        "strategies": [_strategy(row) for row in data["strategies"]],
        "branches": _only(branches, "name", "state", "rows", "loss_last", "error"),
    }
    places = ("cautions", "comparison", "directory", "mlflow_run", "mlflow_page", "start_mlflow")
    shown |= {name: data[name] for name in places}
    return _page(headline, shown)


def _strategy(row: Json) -> Json:
    def of(name: str, form: str = "%") -> str:
        lower, upper = (row.get(f"{name}_{end}") for end in ("lower", "upper"))
        return interval(row.get(name), lower, upper, f".1{form}")

    against = row.get("baseline")
    return {
        "strategy": row["name"],
        "seeds": row["seeds"],
        "rows": row["rows"],
        "Exec@1": of("exec_at_1"),
        "fast_1@1": of("fast_1_at_1"),
        "points of Exec@1": f"{of('difference', 'p')} against {against}" if against else None,
        "p, corrected": p_value(row.get("p_holm")),
    }


def _only(rows: Sequence[Mapping[str, Any]], *names: str) -> list[Json]:
    """The rows with these values alone, those that a row has."""
    return [{name: row[name] for name in names if name in row} for row in rows]


def _page(headline: str, shown: Json) -> str:
    """The headline above all that has a value."""
    body = render({name: value for name, value in shown.items() if value})
    return "\n".join([clean_line(headline), "", body.removeprefix("\n")])
