"""How long a night takes on 8 H200 and on 8 H100 of 80 GB, computed from measured figures.

    python -m benchmarks.night                                  # Markdown, half a minute
    python -m benchmarks.night --responses candidates.parquet   # lengths of recorded answers
    python -m benchmarks.night --json

`night.toml` has every figure with its range and source. Each is drawn from a triangle over its
range, independently of the others: an interval says what is not known, not how nights differ. Rates
are the product's own formulas, and `benchmarks.replicas` simulates what answers of different
lengths cost. Stages are added up, since flows/pipeline.py runs one after the other: servers stop
before verification starts. Does not know of faults, retries, or what FP8 does to answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from benchmarks.decoding import H200, Card, decoding
from benchmarks.replicas import UTILIZATION, Service, Values, answer_lengths, simulate
from benchmarks.training_subject import SHAPES, counted_flops
from tasks.synthesis import sizing
from tasks.training.acceleration.batching import balanced_epochs, busy_share
from tasks.training.telemetry import TrainingFlops

TABLE = Path(__file__).with_suffix(".toml")
INPUTS = tomllib.loads(TABLE.read_text(encoding="utf-8"))
MODES: Values = {name: each["range"][len(each["range"]) // 2] for name, each in INPUTS.items()}
GPUS, HELD_OUT, CHECKPOINT_STEPS = 8, 0.02, 20
SCENARIOS = {"whole": 1.0, "refresh": 0.1}
"""Share of the tasks that are new."""
GOALS_H = {"whole": 11.0, "refresh": 1.25}
"""On 8 H200."""
LIKELY = 0.5
CHARACTERS_PER_TOKEN = 3.6
"""Of recorded QwQ-32B responses."""
DATA_SET = ("synthesis", "verification", "curation")
FP8 = ("--quantization", "fp8")
FP8_CACHE = (*FP8, "--kv-cache-dtype", "fp8")
H100 = Card(
    name="NVIDIA H100 80GB",
    memory_bytes=int(MODES["h100_memory_mib"]) << 20,
    bytes_per_s=MODES["h100_bytes_per_s"],
)
BF16 = Service("H200, bf16", "h200", H200, 1)
BOTH_FP8 = Service("H200, FP8 weights and cache", "h200", H200, 1, FP8_CACHE)
SERVICES = (
    BF16,
    Service("H200, bf16, 2 a replica", "h200", H200, 2),
    Service("H200, FP8 weights", "h200", H200, 1, FP8),
    BOTH_FP8,
    Service("H100, bf16, 2 a replica", "h100", H100, 2),
    Service("H100, FP8 weights and cache", "h100", H100, 1, FP8_CACHE),
)
Lengths = Sequence[Sequence[float]]


def written_s(values: Values, service: Service, answers: float, tokens: float) -> float:
    """Seconds to write so many answers with all slots full."""
    rate = service.decoding(values, tokens).tokens_per_s * values["decoding"]
    prefill_s = values["prompt_tokens"] * values["prefill_share"] / values["prefill_per_s"]
    return answers * (tokens / rate + prefill_s) * service.gpus / GPUS


def verification_s(values: Values, card: str, answers: float) -> tuple[float, float]:
    """Seconds that the devices and that the builders need: both work at once, the larger counts.
    Every answer with code is screened, and what is kept confirmed."""
    coded, builders = answers * values["with_code"], values["cores"] - GPUS
    device_s = coded * values["device_s"] + answers * values["confirmed"] * values["confirm_s"]
    slower = values["device_h100"] if card == "h100" else 1
    built_s = coded * values["build_core_s"] / builders
    return device_s * slower / GPUS / values["device_busy"], built_s


def trained_s(
    values: Values, card: str, flops: TrainingFlops, busy: float, workers: int = GPUS
) -> float:
    """Seconds of training; `busy` is the share of time in which workers compute."""
    row = values["prompt_tokens"] + values["curated_share"] * values["answer_tokens"]
    needed = row * (flops.per_token + row * values["answer_spread"] * flops.per_pair)
    rows = values["rows"] * (1 - HELD_OUT) * values["epochs"]
    speed = values["training_h100"] if card == "h100" else 1
    rate = values["accelerated_flops"] * values["workers_ratio"] * speed * workers * busy
    saved = rows / GPUS / CHECKPOINT_STEPS
    return rows * needed / rate + saved * values["checkpoint_s"] + values["training_start_s"]


class Night(NamedTuple):
    """What all draws share: FLOPs; busy shares by the order of rows; and for each service and
    number of answers the seconds beyond `written_s`, by the mean answer's tokens."""

    flops: TrainingFlops
    busy: Values
    tails: dict[tuple[str, int], float]

    def stages_s(self, values: Values, service: Service, share: float) -> Values:
        """Seconds of each stage, and sums. The whole answers the suite with two models; a refresh
        finds the base model's answers, and trains on the whole set again."""
        tasks = round(values["tasks"] * share)
        answers, suite = tasks * int(values["answers_per_task"]), int(values["suite_answers"])
        faster, start_s = values["decoding"] / MODES["decoding"], values["server_start_s"]

        def asked_s(count: int, tokens: float) -> float:
            tail_s = self.tails[service.name, count] * tokens / faster
            return written_s(values, service, count, tokens) + tail_s

        suite_s = asked_s(suite, values["suite_tokens"])
        judged_s = max(verification_s(values, service.card, suite))
        slower = [values["lora_serving"], *([1.0] if share == 1 else [])]
        flagged_s = answers * values["correct"] * values["flag_s"]
        counted_s = (tasks * values["workload_s"] + flagged_s) / values["jobs"]
        found = {
            "synthesis": asked_s(answers, values["answer_tokens"]) + start_s,
            "verification": max(verification_s(values, service.card, answers)),
            "curation": counted_s + values["fixed_s"],
            "training": trained_s(values, service.card, self.flops, self.busy["balanced"]),
            "benchmark": sum(suite_s / one + start_s + judged_s for one in slower),
        }
        data_set = sum(found[name] for name in DATA_SET)
        return found | {"data set": data_set, "all": sum(found.values())}


def prepared(recorded: Lengths = ()) -> tuple[Night, list[list[str]]]:
    """The night at the most likely values, and the rows of the table of orders."""
    tails, orders = dict[tuple[str, int], float](), list[list[str]]()
    sizes = [(round(MODES["tasks"] * share), "answer_tokens") for share in SCENARIOS.values()]
    sizes += [(round(MODES["suite_answers"] / MODES["answers_per_task"]), "suite_tokens")]
    for service in SERVICES:
        for tasks, mean in sizes:
            lengths, known = answer_lengths(tasks, MODES[mean], 0, MODES, recorded)
            slots = service.decoding(MODES, MODES[mean]).sequences
            ranks: dict[str, Sequence[float]] = {"as asked": [0] * len(lengths)}
            if service.card == "h200" and mean == "answer_tokens":
                ranks |= {"by earlier lengths": known, "longest first": lengths}
            for order, rank in ranks.items():
                rows = sorted(range(len(lengths)), key=[-each for each in rank].__getitem__)
                tail = simulate([lengths[row] for row in rows], service, MODES, slots, GPUS)
                if order == "as asked":
                    full_s = written_s(MODES, service, len(lengths), MODES[mean])
                    tails[service.name, len(lengths)] = (tail.wall_s - full_s) / MODES[mean]
                idle_s = [tail.wall_s - tail.idle_from_s, tail.saved_s(0.01), tail.saved_s(0.02)]
                idle_s += [tail.saved_s(0.02) - 0.02 * tail.wall_s]
                cells = [service.name, f"{len(lengths):,}", order, f"{tail.wall_s / 60:.0f}"]
                orders.append([*cells, *(f"{each / 60:.1f}" for each in idle_s)])
    flops = counted_flops(SHAPES["qwq"])
    return Night(flops, busy_shares(flops, recorded), tails), orders


def busy_shares(flops: TrainingFlops, recorded: Lengths = ()) -> Values:
    """Of 8 workers with one row each a pass, by the order of rows; mean of the epochs."""
    mean, rows = MODES["answer_tokens"] * MODES["curated_share"], MODES["rows"] * (1 - HELD_OUT)
    drawn = answer_lengths(round(rows), mean, 1, MODES, recorded)[0]
    lengths = [round(MODES["prompt_tokens"]) + each for each in drawn[:: len(drawn) // round(rows)]]
    costs = [flops.row(length) for length in lengths]
    orders = balanced_epochs(lengths, rows_per_step=GPUS, epochs=int(MODES["epochs"]), seed=0)
    shares = [busy_share([costs[row] for row in order], GPUS) for order in orders]
    return {"random": busy_share(costs, GPUS), "balanced": statistics.fmean(shares)}


def draws(count: int, seed: int) -> list[Values]:
    """All inputs, so many times."""
    generator, ends = random.Random(seed), {name: each["range"] for name, each in INPUTS.items()}
    return [
        {name: generator.triangular(e[0], e[-1], MODES[name]) for name, e in ends.items()}
        for _ in range(count)
    ]


def interval(values: Sequence[float]) -> list[float]:
    """Median, 5th and 95th percentile."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [statistics.median(values), cuts[0], cuts[-1]]


def estimate(night: Night, values: list[Values]) -> list[dict[str, Any]]:
    """For each service and scenario: hours of each stage (median, 5 %, 95 %); the chance of the
    goal; what inputs move the total most, alone at their lowest and highest value."""
    found = []
    for service in SERVICES:
        for scenario, share in SCENARIOS.items():
            goal_h = GOALS_H[scenario]
            runs = [night.stages_s(each, service, share) for each in values]
            hours = {name: [run[name] / 3600 for run in runs] for name in runs[0]}
            met = {
                name: statistics.fmean([value <= goal_h for value in hours[name]])
                for name in ("data set", "all")
            }
            ends = {
                name: [
                    night.stages_s(MODES | {name: each["range"][end]}, service, share)["all"]
                    for end in (0, -1)
                ]
                for name, each in INPUTS.items()
                if len(each["range"]) > 1
            }
            base_s = night.stages_s(MODES, service, share)["all"]
            moves = {name: [(end - base_s) / 3600 for end in both] for name, both in ends.items()}
            most = sorted(moves.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
            about = {"service": service.name, "scenario": scenario, "goal_h": goal_h, "met": met}
            intervals = {name: interval(each) for name, each in hours.items()}
            found.append({**about, "hours": intervals, "moves_h": dict(most[:5])})
    return found


# -- the page --------------------------------------------------------------------------------------


def ranged(value: Sequence[float]) -> str:
    digits = 1 if value[0] >= 1 else 2
    return f"{value[0]:.{digits}f} ({value[1]:.{digits}f} to {value[2]:.{digits}f})"


def table(title: str, head: str, rows: Sequence[Sequence[str]]) -> str:
    """Markdown under a heading; `head` names the columns."""
    names = head.split(", ")
    lines = ["| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *rows)]
    return "\n".join([f"## {title}", "", *lines, ""])


def slot_rows(recorded: Lengths) -> list[list[str]]:
    """What the number of slots does, for the answers of a refresh on H200: as concur's server
    derives it from the mean prompt, as it would from the longest, and as
    docs/how-to/eight-gpus.md counts (4,100)."""
    tasks, mean = round(MODES["tasks"] * SCENARIOS["refresh"]), MODES["answer_tokens"]
    lengths, limit, rows = answer_lengths(tasks, mean, 0, MODES, recorded)[0], "token_limit", []
    for service in (BF16, BOTH_FP8):
        known = {
            what + f", {MODES[name]:,.0f}": sizing.num_seqs(
                service.shape, service.room_bytes, int(MODES[name]), int(MODES[limit])
            )
            for what, name in (
                ("concur's server: mean prompt", "prompt_tokens"),
                ("longest prompt", "longest_known"),
                ("longest prompt", "longest_prompt"),
            )
        }
        known["slot_share of those that fit"] = service.decoding(MODES, mean).sequences
        known["all that fit on average"] = service.decoding(MODES, mean, 1.0).sequences
        of = (service.shape, service.gpu, service.gpus, UTILIZATION)
        known["contexts of 4,100"] = decoding(*of, 600, 7000).sequences
        for what, slots in known.items():
            tail = simulate(lengths, service, MODES, slots, GPUS)
            cells = [service.name, what, str(slots), f"{sum(lengths) / tail.wall_s / GPUS:,.0f}"]
            rows.append([*cells, f"{tail.wall_s / 60:.0f}", f"{tail.preempted:,}"])
    return rows


def training_rows(night: Night, values: list[Values]) -> list[list[str]]:
    kinds: list[tuple[str, float, Values, int]] = [
        ("rows in random order", night.busy["random"], {}, GPUS),
        ("balanced rows (profile `paper`)", night.busy["balanced"], {}, GPUS),
        ("the same at `workers_ratio` 1", night.busy["balanced"], {"workers_ratio": 1}, GPUS),
        ("one accelerated H200, seven idle", 1.0, {"workers_ratio": 1}, 1),
    ]
    return [
        [what, f"{busy:.2f}", ranged([each / 3600 for each in interval(spent)])]
        for what, busy, change, workers in kinds
        for spent in [[trained_s(v | change, "h200", night.flops, busy, workers) for v in values]]
    ]


def sentences(found: list[dict[str, Any]]) -> str:
    lines = []
    for each in found:
        stages = {name: each["hours"][name][0] for name in list(each["hours"])[:5]}
        most = max(stages, key=lambda name: stages[name])
        line = f"- {each['service']}, {each['scenario']}: {most} takes"
        line += f" {stages[most] / sum(stages.values()):.0%} of the time."
        if each["service"].startswith("H200"):
            whole, part = each["met"]["all"], each["met"]["data set"]
            line += f" Goal of {each['goal_h']:g} h: {'met' if whole >= LIKELY else 'missed'};"
            line += f" {whole:.0%} of the draws meet it, {part:.0%} with the data set alone."
        lines.append(line)
    devices_s, builders_s = verification_s(MODES, "h200", 1.0)
    return "\n".join(
        [
            *lines,
            "- Idle: the cores while answers are written and a model is trained; in verification"
            f" the builders for {1 - builders_s / devices_s:.0%} of the time, since GPUs decide. So"
            " building while answers are written would save nothing.",
            "- What FP8 costs in quality is not known: its speed was measured with dummy weights.",
            "",
        ]
    )


def page(night: Night, orders: list[list[str]], values: list[Values], recorded: Lengths) -> str:
    """Markdown."""
    found = estimate(night, values)
    names = list(found[0]["hours"])
    hours = [
        [each["service"], each["scenario"], *(ranged(each["hours"][name]) for name in names)]
        for each in found
    ]
    moves = [
        [each["service"], each["scenario"], f"{name} {low:+.2f}, {high:+.2f}"]
        for each in found
        if each["service"].startswith("H200")
        for name, (low, high) in each["moves_h"].items()
    ]
    inputs = [
        [
            f"`{name}`",
            " / ".join(f"{value:,g}" for value in each["range"]),
            each["unit"],
            each["kind"] + ("" if each["kind"] in ("measured", "counted") else ", not measured"),
            "; ".join([each["source"], *(f"[page]({page})" for page in each.get("pages", ()))]),
        ]
        for name, each in INPUTS.items()
    ]
    ends = "service, answers, order, minutes, partly idle, saved without the last 1 %, without 2 %"
    return "\n".join(
        [
            table("Hours", f"service, scenario, {', '.join(names)}", hours),
            sentences(found),
            table("Long answers", f"{ends}, beyond 2 % of the minutes", orders),
            table("Slots", "service, by, slots, tokens/s, minutes, preempted", slot_rows(recorded)),
            table("Training", "on 8 H200, busy share, hours", training_rows(night, values)),
            table("What moves the total, hours", "service, scenario, lowest and highest", moves),
            table("Inputs", "input, range, unit, kind, source", inputs),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", help="table with level, problem_id and response")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    recorded: list[list[float]] = []
    if arguments.responses:
        tokens = pl.col("response").str.len_chars() / CHARACTERS_PER_TOKEN
        frame = pl.read_parquet(arguments.responses).with_columns(tokens=tokens)
        by_task = frame.group_by("level", "problem_id", maintain_order=True)
        recorded = by_task.agg("tokens")["tokens"].to_list()
    night, orders = prepared(recorded)
    values = draws(arguments.draws, arguments.seed)
    if arguments.json:
        nights = estimate(night, values)
        print(json.dumps({"nights": nights, "long_answers": orders, "inputs": INPUTS}, indent=1))
    else:
        print(page(night, orders, values, recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
