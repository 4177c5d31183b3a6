"""A whole line of small snapshots, curated by the real rule: what publishing and the difference of
two refreshes are tested on."""

from tasks.curation import stage
from tasks.curation.config import CurationConfig
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.decontamination.stage import run as choose
from tasks.samples import Samples
from tasks.store import Snapshot, fingerprint
from tasks.tables import CANDIDATES, TASKS, TRACE_FLAGS, VERDICTS, WORKLOADS
from tests.support.samples import FUSION


def sample(task, index, tokens, speedup, **changes):
    """One candidate and its verdict; no speedup: not correct."""
    return {
        "task": task,
        "index": index,
        "tokens": tokens,
        "speedup": speedup,
        "status": "correct" if speedup is not None else "incorrect",
        "reason": "ok" if speedup is not None else "wrong_output",
        "ops": FUSION,
        "generator": "org/writer",
        "reasoning": f"thought {index} about {task}",
        "code": f"class ModelNew:  # {task} {index}\n    pass\n",
        "key": "key",
        "id": f"{task.replace('/', '-')}-{index}",
        **changes,
    }


def line(
    root,
    samples,
    *,
    config=None,
    programs=None,
    source=None,
    synthesis=None,
    protocol=None,
    device="GPU X",
    rows_per_part=1000,
    chosen=False,
    workloads=None,
    flags=None,
):
    """Snapshots of tasks, candidates and verdicts under `root`, and what the rule takes of them;
    `chosen`: of tasks that were chosen among the source's, as in a run of the line."""
    unset = dict.fromkeys(("levels", "limit", "location"))
    source = source or {"source": "bundled", "split": "train", **unset}
    names = sorted({entry["task"] for entry in samples})
    code = {name: f"class Model:\n    name = {name!r}\n" for name in names} | (programs or {})
    known = {"entry_point": "Model", "init_form": "args", "source": source["source"]}
    tasks = [{"task_id": name, "name": name, "code": code[name], **known} for name in names]
    verdicts = [_verdict(entry, device) for entry in samples]
    synthesis = synthesis or {
        **{"sampler": "openai", "samples_per_task": 5, "model": "org/writer"},
        "base_url": "http://secret-host:8000/v1",
    }
    correct = sum(verdict["status"] == "correct" for verdict in verdicts)
    extra = {"device": device, "language": "cuda", "status_counts": {"correct": correct}}
    flagged = [
        {"candidate_id": entry["id"], "trace_flags": (flags or {}).get(entry["id"], [])}
        for entry in samples
    ]

    def kept(name, rows, schema, config, *upstream, **extra):
        above = [ref.fingerprint for ref in upstream]
        snapshot = Snapshot(str(root), name, fingerprint(name, [config, rows], above))
        if not snapshot.finished:
            for start in range(0, len(rows), rows_per_part):
                snapshot.append(rows[start : start + rows_per_part], schema)
            snapshot.publish(config=config, upstream=above, extra=extra)
        return snapshot.ref

    ref = kept("tasks", tasks, TASKS, source)
    if chosen:
        off = DecontaminationConfig(enabled=False), DeduplicationConfig(enabled=False)
        ref = choose(ref, None, *off)
    candidates = list(map(_candidate, samples))
    written = kept("synthesis", candidates, CANDIDATES, synthesis, ref, generator="org/writer")
    judged = kept(
        *("verification", verdicts, VERDICTS, {"eval": protocol or {"trials": 5}}),
        *(written, ref),
        **extra,
    )
    counted = None if workloads is None else kept("workloads", workloads, WORKLOADS, {}, ref)
    raised = (
        None if flags is None else kept("trace-flags", flagged, TRACE_FLAGS, {}, judged, written)
    )
    samples = Samples(
        tasks=ref, candidates=written, verdicts=judged, workloads=counted, flags=raised
    )
    return stage.run(samples, config or CurationConfig())


def _candidate(entry):
    answer = entry.get("answer", f"```python\n{entry['code']}```")
    written = f"<think>\n{entry['reasoning']}\n</think>\n\n{answer}"
    return {
        "candidate_id": entry["id"],
        "task_id": entry["task"],
        "language": "cuda",
        "generator": entry["generator"],
        "sampling": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 100, "seed": 3},
        "sample_index": entry["index"],
        "prompt_hash": "prompt",
        "response": entry.get("response", written),
        "separated_reasoning": entry.get("separated"),
        "reasoning": entry["reasoning"],
        "answer": answer,
        "code": entry["code"],
        "reasoning_tokens": entry["tokens"],
        "turn": 1,
    }


def _verdict(entry, device):
    timing, speedup = None, entry["speedup"]
    if speedup is not None:
        timing = {
            **{"reference_ms": speedup, "candidate_ms": 1.0, "clock_bound_ms": 1.0},
            **{"speedup": speedup, "speedup_lower": speedup * 0.9, "speedup_upper": speedup * 1.1},
            **{"pairs": 50, "calls_per_sample": 1, "drift": 0.0, "throttled": False},
        }
    return {
        "schema_version": 2,
        "candidate_id": entry["id"],
        "task_id": entry["task"],
        "language": "cuda",
        "level": entry.get("level", "confirm"),
        "status": entry["status"],
        "reason": entry["reason"],
        "timing": timing,
        "reference_operators": entry["ops"],
        "precision_class": "fp32",
        "flags": ["flag"],
        "device": device,
        "verdict_key": f"{entry['key']}-{entry['id']}",
    }
