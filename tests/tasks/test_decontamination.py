"""Decontamination and deduplication: each level finds what it is for, and nothing else."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planted import PLANTED, kernelbook_form, kernelbook_sizes, near_misses
from kernels_eval.errors import UsageError
from tasks.decontamination.config import LEVELS, DecontaminationConfig, DeduplicationConfig
from tasks.decontamination.decontamination import compare, decontaminate
from tasks.decontamination.deduplication import deduplicate_samples, deduplicate_tasks
from tasks.decontamination.fingerprints import fingerprints
from tests.support.cases import cases

SHARED = "shared/data/kernelbench.parquet"
HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n"


def task(layers, forward, size=64, parameters="width, depth", inputs="[width, depth]"):
    """A task in KernelBench form: `layers` are the statements of `__init__`, `forward` those of
    `forward`."""
    lines = [
        f"class Model(nn.Module):\n    def __init__(self, {parameters}):\n       "
        " super().__init__()"
    ]
    lines += [f"        {line}" for line in layers]
    lines += ["\n    def forward(self, x):", *(f"        {line}" for line in forward)]
    lines += [
        f"\nwidth = {size}\ndepth = {size // 2}\n\ndef get_inputs():\n    return [torch.rand(16,"
        " width)]"
    ]
    lines += [f"\ndef get_init_inputs():\n    return {inputs}\n"]
    return HEAD + "\n".join(lines)


CASES = cases("decontamination")
BENCHMARK, UNRELATED = (
    {
        name: parts if isinstance(parts, str) else task(**parts)
        for name, parts in CASES[kind].items()
    }
    for kind in ("benchmark", "unrelated")
)


def frame(tasks):
    return pl.DataFrame(
        {"task_id": list(tasks), "code": list(tasks.values())},
        schema={"task_id": pl.String, "code": pl.String},
    )


def found(tasks, **settings):
    return decontaminate(frame(tasks), frame(BENCHMARK), DecontaminationConfig(**settings))


def test_unrelated_tasks_are_kept_and_one_that_does_not_parse_is_named():
    result = found(UNRELATED)
    assert result.removed.is_empty()
    assert result.kept == tuple(sorted(UNRELATED))
    assert result.unparsed == ("train/no Python",)


@pytest.mark.parametrize("change", PLANTED)
def test_planted_contamination_is_found_at_its_level(change):
    wanted, make = PLANTED[change]
    code = make(BENCHMARK["bench/attention"])
    result = found({"train/planted": code} | UNRELATED)
    row = result.removed.row(0, named=True)
    assert result.removed.height == 1
    assert (row["task_id"], row["benchmark_task_id"]) == ("train/planted", "bench/attention")
    earlier = {
        "split": "normalised",
        "split, other shapes": "shapes",
    }  # a temporary is inlined before the operators are looked at
    assert row["level"] == earlier.get(change, wanted)
    assert (row["similarity"] == 1.0) == (row["level"] != "near")


NEAR_MISSES = list(near_misses())
INSEPARABLE = {
    "largest value and its place",
    "difference the other way round",
    "quotient the other way round",
    "first and second transposed",
}
"""Near misses that are found: their operators are the same ones on inputs of the same shapes."""


@pytest.mark.parametrize("name, code, near", NEAR_MISSES, ids=[m[0] for m in NEAR_MISSES])
def test_kernelbooks_form_of_a_task_is_that_task_and_that_of_a_near_miss_is_not(name, code, near):
    def level(task, known):
        config = DecontaminationConfig()
        return decontaminate(frame({"t": task}), frame({"b": known}), config).removed["level"]

    assert level(kernelbook_form(code), code).to_list() == ["normalised"]
    assert level(kernelbook_sizes(code), code).to_list() in (["shapes"], ["operators"])
    same = level(near, code).to_list() + level(kernelbook_form(near), code).to_list()
    assert same == (["operators"] * 2 if name in INSEPARABLE else [])
    assert level(kernelbook_sizes(near), code).is_empty() or name == "quotient the other way round"


KERNELBENCH = next(
    (path for root in Path(__file__).parents if (path := root / SHARED).is_file()), None
)


@pytest.mark.slow
@pytest.mark.skipif(KERNELBENCH is None, reason=f"no {SHARED} above the checkout")
def test_kernelbooks_form_of_kernelbench_is_found():
    rows = pl.read_parquet(KERNELBENCH).filter(pl.col("level") <= 2)
    names = rows.select(pl.format("{}/{}", "level", "problem_id")).to_series()
    known = fingerprints(frame(dict(zip(names, rows["code"], strict=True))))
    missed = {}
    for change in ("KernelBook's form", "KernelBook's form and sizes"):
        codes = map(PLANTED[change][1], rows["code"])
        planted = frame({n: code for n, code in zip(names, codes, strict=True) if code})
        assert planted.height == 197
        missed[change] = compare(fingerprints(planted), known, DecontaminationConfig()).kept
    assert missed == {"KernelBook's form": (), "KernelBook's form and sizes": ()}


def test_a_short_sequence_counts_only_with_the_same_input_sizes():
    module = task(["self.act = nn.ReLU()"], ["return self.act(x)"], 4096, "*args", "[]")
    other = {"train/relu": module.replace("4096", "4095")}
    assert found({"train/relu": module}).counts["operators"] == 1
    assert found(other).removed.is_empty()
    assert found(other, min_operators=1).counts["operators"] == 1


def test_a_task_is_reported_at_the_first_of_the_levels_that_are_asked_for():
    code = {"train/copy": BENCHMARK["bench/attention"]}
    for i, level in enumerate(LEVELS):
        result = found(code, levels=LEVELS[i:][::-1])
        assert result.removed["level"].to_list() == [level]
        assert result.levels == LEVELS[i:]


def test_the_report_counts_every_level_and_shows_ids_not_code():
    result = found({f"train/{i}": BENCHMARK["bench/mlp"] for i in range(5)} | UNRELATED)
    assert result.counts == {"exact": 5, "normalised": 0, "shapes": 0, "operators": 0, "near": 0}
    assert [row["task_id"] for row in result.examples(2)["exact"]] == ["train/0", "train/1"]
    text = result.markdown()
    assert "5 of 11 training tasks are left out" in text
    assert "train/0 = bench/mlp" in text and "1 do not parse" in text and "nn.Linear" not in text


def test_entry_points_of_their_own_are_compared():
    code = BENCHMARK["bench/attention"].replace("class Model", "class Scores")
    rows = frame({"train/scores": code}).with_columns(entry_point=pl.lit("Scores"))
    result = decontaminate(rows, frame(BENCHMARK), DecontaminationConfig())
    assert result.removed["level"].to_list() == ["normalised"]


def test_switched_off_everything_is_kept_and_no_benchmark_is_needed():
    result = decontaminate(frame(BENCHMARK), frame({}), DecontaminationConfig(enabled=False))
    assert result.kept == tuple(sorted(BENCHMARK)) and result.removed.is_empty()
    with pytest.raises(UsageError, match="no benchmark task"):
        decontaminate(frame(BENCHMARK), frame({}), DecontaminationConfig())
    with pytest.raises(UsageError, match="no column code"):
        decontaminate(frame(BENCHMARK).drop("code"), frame(BENCHMARK), DecontaminationConfig())


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False))
@pytest.mark.slow
def test_the_order_of_rows_never_matters(random):
    planted = {
        f"train/{name}": make(BENCHMARK["bench/norm"]) for name, (_, make) in PLANTED.items()
    }
    tasks = frame({**UNRELATED, **{name: code or "" for name, code in planted.items()}})
    known, config = frame(BENCHMARK), DecontaminationConfig()
    orders = [random.sample(range(rows.height), rows.height) for rows in (tasks, known)]
    shuffled = decontaminate(tasks[orders[0]], known[orders[1]], config)
    plain = decontaminate(tasks, known, config)
    assert shuffled.kept == plain.kept and shuffled.removed.equals(plain.removed)
    assert {*plain.kept, *plain.removed["task_id"]} == set(tasks["task_id"])


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(5)))
def test_of_equal_tasks_the_smallest_id_stays_whatever_the_order(order):
    code = BENCHMARK["bench/attention"]
    same, other = (PLANTED[name][1](code) for name in ("renamed", "shapes"))
    tasks = frame({"b": code, "a": same, "c": code, "d": other, "e": BENCHMARK["bench/mlp"]})
    result = deduplicate_tasks(tasks[order], DeduplicationConfig())
    assert result.kept == ("a", "d", "e")
    assert result.removed.select("id", "level", "equals").rows() == [
        ("b", "normalised", "a"),
        ("c", "normalised", "a"),
    ]
    again = deduplicate_tasks(
        tasks.filter(pl.col("task_id").is_in(result.kept)), DeduplicationConfig()
    )
    assert again.kept == result.kept and again.removed.is_empty()


def test_other_sizes_are_duplicates_only_where_asked_for():
    code = BENCHMARK["bench/attention"]
    tasks = frame({"a": code, "b": PLANTED["shapes"][1](code)})
    assert deduplicate_tasks(tasks, DeduplicationConfig()).kept == ("a", "b")
    assert deduplicate_tasks(tasks, DeduplicationConfig(levels=("exact", "shapes"))).kept == ("a",)
    assert deduplicate_tasks(tasks, DeduplicationConfig(enabled=False)).kept == ("a", "b")


KERNEL = '''
import torch
from torch.utils.cpp_extension import load_inline

source = """
__global__ void scale(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2.0f; }
"""
module = load_inline(name="scale", cpp_sources="", cuda_sources=source, functions=["scale"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.scale(x)
'''


def test_equal_kernels_of_one_task_are_one_sample():
    renamed = KERNEL.replace("module", "library").replace(" source", " text")
    renamed = renamed.replace("\nsource", "\ntext").replace("=source", "=text")
    rows = {
        "s1": ("t", KERNEL),
        "s2": ("t", KERNEL + "\n"),
        "s3": ("t", renamed),
        "s4": ("t", KERNEL.replace("2.0f", "3.0f")),
        "s5": ("other", KERNEL),
        "s6": ("t", None),
        "s7": ("t", None),
        "s0": ("t", renamed.replace("\n\n\n", "\n\n")),
    }
    samples = pl.DataFrame(
        [(name, *row) for name, row in rows.items()],
        schema=["candidate_id", "task_id", "code"],
        orient="row",
    )
    result = deduplicate_samples(samples, DeduplicationConfig())
    assert result.kept == ("s0", "s4", "s5", "s6", "s7")
    assert result.removed.select("id", "level", "equals").rows() == [
        ("s1", "normalised", "s0"),
        ("s2", "exact", "s0"),
        ("s3", "normalised", "s0"),
    ]
    shuffled = deduplicate_samples(
        samples.sample(fraction=1, shuffle=True, seed=3), DeduplicationConfig()
    )
    assert shuffled.kept == result.kept and shuffled.removed.equals(result.removed)
