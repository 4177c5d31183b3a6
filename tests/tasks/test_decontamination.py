"""Decontamination and deduplication: each level finds what it is for, and nothing else. References
are traced as in a run, in the sandbox."""

from functools import cache
from itertools import groupby

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask
from tasks.decontamination.config import LEVELS, DecontaminationConfig, DeduplicationConfig
from tasks.decontamination.decontamination import decontaminate
from tasks.decontamination.deduplication import deduplicate_samples, deduplicate_tasks
from tasks.decontamination.kernels import program_key
from tasks.decontamination.matching import Index, fingerprints
from tasks.workload.measure import Measurer
from tests.support.cases import cases
from tests.support.planted_tasks.changes import PLANTED, kernelbook_form, near_misses
from tests.support.planted_tasks.forms import forms, written

CASES = cases("decontamination")
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


BENCHMARK, UNRELATED = (
    {
        name: parts if isinstance(parts, str) else task(**parts)
        for name, parts in CASES[kind].items()
    }
    for kind in ("benchmark", "unrelated")
)


@pytest.fixture(scope="module")
def trace():
    """The graph of a task's reference by its code, None where it cannot be run."""
    with Measurer() as measurer:

        @cache
        def traced(code, entry_point="Model"):
            form = "args_kwargs" if "return [[" in code else "args"
            asked = {"entry_point": entry_point, "init_form": form}
            found = measurer.measure(KernelTask(task_id="t", name="t", code=code, **asked))
            graph = found.graph
            return graph and graph.model_dump(mode="json")

        yield traced


@pytest.fixture(scope="module")
def frame(trace):
    def made(tasks, **entry_points):
        rows = [
            {"task_id": name, "code": code, "graph": trace(code, entry_points.get(name, "Model"))}
            for name, code in tasks.items()
        ]
        schema = {"task_id": pl.String, "code": pl.String}
        return pl.DataFrame(rows or None, schema_overrides=schema, schema=None if rows else schema)

    return made


@pytest.fixture(scope="module")
def found(frame):
    def removed(tasks, known=BENCHMARK):
        return decontaminate(frame(tasks), frame(known), DecontaminationConfig())

    return removed


def levels(result):
    return result.removed["level"].to_list()


# -- what the traced graph sees --------------------------------------------------------------------

ALIKE = {task: list(rows) for task, rows in groupby(forms(), key=lambda form: form.task)}
APART = {"nn.GELU(approximate='tanh')", "F.gelu(x, approximate='tanh')"}
"""Forms that PyTorch does not take apart into what the task writes out."""
ACTIVATIONS = ("relu", "leaky relu", "sigmoid", "softmax", "swish", "softplus", "elu", "hard tanh")


def check_forms(trace, tasks):
    digests = {}
    for task in tasks:
        graphs = [trace(form.code) for form in ALIKE[task] if form.text not in APART]
        assert len({graph["shapes"] for graph in graphs}) == 1, task
        digests[task] = graphs[0]["shapes"]
    assert len(set(digests.values())) == len(digests), "each is another task"


def test_an_activation_is_one_task_as_a_module_and_as_a_function(trace):
    check_forms(trace, ACTIVATIONS)


@pytest.mark.slow
def test_all_of_level_1_is_the_same_in_every_form_and_window(trace):
    check_forms(trace, ALIKE)


def test_a_form_is_found_at_other_sizes(found):
    known = {"relu": written("torch.relu(x)", {"x": "torch.rand(4096, 8192)"}, {})}
    other = {"t": written("nn.ReLU()", {"x": "torch.rand(3, 7)"}, {})}
    assert levels(found(other, known)) == ["shapes"]


def test_layers_in_a_list_are_layers(trace):
    append = "layers.append(nn.Linear(width, width)); layers.append(nn.ReLU())"
    layers = ["layers = []", f"for i in range(2): {append}", "self.net = nn.Sequential(*layers)"]
    stacked = task(layers, ["return self.net(x)"])
    plain = task(
        ["self.a = nn.Linear(width, width)", "self.b = nn.Linear(width, width)"],
        ["return F.relu(self.b(F.relu(self.a(x))))"],
    )
    assert trace(stacked) == trace(plain)
    assert trace(stacked)["operators"] == ["addmm", "relu", "addmm", "relu"]


@pytest.mark.parametrize("name", CASES["same"])
def test_a_program_written_otherwise_is_the_same(trace, name):
    assert trace(changed(CASES["same"][name]))["normalised"] == trace(CASES["task"])["normalised"]


@pytest.mark.parametrize("name", CASES["other"])
def test_another_program_is_another(trace, name):
    one, other = trace(CASES["task"]), trace(changed(CASES["other"][name]))
    assert one["normalised"] != other["normalised"] and one["shapes"] != other["shapes"]


def changed(replacements):
    code = CASES["task"]
    for old, new in replacements:
        assert old in code
        code = code.replace(old, new)
    return code


# -- levels ----------------------------------------------------------------------------------------


def test_unrelated_tasks_are_kept_and_one_that_cannot_be_run_is_named(found):
    result = found(UNRELATED)
    assert result.removed.is_empty()
    assert result.kept == tuple(sorted(UNRELATED))
    assert result.untraced == ("train/no Python",)


@pytest.mark.parametrize("change", PLANTED)
def test_planted_contamination_is_found_at_its_level(found, change):
    wanted, make = PLANTED[change]
    name = "bench/activation" if change == "in place" else "bench/attention"
    code = make(BENCHMARK[name])
    result = found({"train/planted": code} | UNRELATED)
    row = result.removed.row(0, named=True)
    assert result.removed.height == 1
    assert (row["task_id"], row["benchmark_task_id"]) == ("train/planted", name)
    assert row["level"] == wanted
    assert (row["similarity"] == 1.0) == (row["level"] != "near")


NEAR_MISSES = list(near_misses())


@pytest.mark.slow
@pytest.mark.parametrize("name, code, near", NEAR_MISSES, ids=[m[0] for m in NEAR_MISSES])
def test_kernelbooks_form_of_a_task_is_that_task_and_that_of_a_near_miss_is_not(
    found, name, code, near
):
    assert levels(found({"t": kernelbook_form(code)}, {"b": code})) == ["normalised"]
    assert levels(found({"t": near}, {"b": code})) == []
    assert levels(found({"t": kernelbook_form(near)}, {"b": code})) == []


def test_operators_without_their_numbers_count_from_three_on(found):
    known = {
        "two": task([], ["return torch.softmax(torch.relu(x), dim=1)"]),
        "three": task([], ["return torch.softmax(torch.relu(x), dim=1).exp()"]),
    }
    other = {name: code.replace("dim=1", "dim=0") for name, code in known.items()}
    result = found(other, known)
    assert dict(result.removed.select("task_id", "level").iter_rows()) == {"three": "operators"}


def test_a_copy_is_found_at_every_level(frame):
    (copy,) = fingerprints(frame({"bench": BENCHMARK["bench/attention"]}))
    for start, level in enumerate(LEVELS):
        index = Index(LEVELS[start:])
        index.add(copy)
        assert index.find(copy).level == level


def test_the_report_counts_every_level_and_shows_ids_not_code(found):
    result = found({f"train/{i}": BENCHMARK["bench/mlp"] for i in range(5)} | UNRELATED)
    assert result.counts == {"exact": 5, "normalised": 0, "shapes": 0, "operators": 0, "near": 0}
    assert [row["task_id"] for row in result.examples(2)["exact"]] == ["train/0", "train/1"]
    text = result.markdown()
    assert f"5 of {5 + len(UNRELATED)} training tasks are left out" in text
    assert "train/0 = bench/mlp" in text and "1 could not be run" in text
    assert "nn.Linear" not in text


def test_entry_points_of_their_own_are_compared(frame):
    code = BENCHMARK["bench/attention"].replace("class Model", "class Scores")
    rows = frame({"scores": code}, scores="Scores")
    result = decontaminate(rows, frame(BENCHMARK), DecontaminationConfig())
    assert levels(result) == ["normalised"]


def test_switched_off_everything_is_kept_and_no_benchmark_is_needed(frame):
    known, none = frame(BENCHMARK), frame({})
    result = decontaminate(known, none, DecontaminationConfig(enabled=False))
    assert result.kept == tuple(sorted(BENCHMARK)) and result.removed.is_empty()
    with pytest.raises(UsageError, match="no benchmark task"):
        decontaminate(known, none, DecontaminationConfig())
    with pytest.raises(UsageError, match="no column code"):
        decontaminate(known.drop("code"), known, DecontaminationConfig())


@pytest.fixture(scope="module")
def planted(frame):
    made = {f"train/{name}": make(BENCHMARK["bench/norm"]) for name, (_, make) in PLANTED.items()}
    return frame({**UNRELATED, **{name: code for name, code in made.items() if code}})


@settings(max_examples=10, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_the_order_of_rows_never_matters(frame, planted, random):
    known, config = frame(BENCHMARK), DecontaminationConfig()
    orders = [random.sample(range(rows.height), rows.height) for rows in (planted, known)]
    shuffled = decontaminate(planted[orders[0]], known[orders[1]], config)
    plain = decontaminate(planted, known, config)
    assert shuffled.kept == plain.kept and shuffled.removed.equals(plain.removed)
    assert {*plain.kept, *plain.removed["task_id"]} == set(planted["task_id"])


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(5)))
def test_of_equal_tasks_the_smallest_id_stays_whatever_the_order(frame, order):
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


def test_other_sizes_are_no_duplicates(frame):
    code = BENCHMARK["bench/attention"]
    tasks = frame({"a": code, "b": PLANTED["shapes"][1](code)})
    assert deduplicate_tasks(tasks, DeduplicationConfig()).kept == ("a", "b")
    assert deduplicate_tasks(tasks, DeduplicationConfig(enabled=False)).kept == ("a", "b")


# -- kernels ---------------------------------------------------------------------------------------

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
        "s8": ("t", KERNEL.replace("class", "# a comment\nclass")),
        "s9": ("t", "no Python ("),
        "s0": ("t", renamed.replace("\n\n\n", "\n\n")),
    }
    samples = pl.DataFrame(
        [(name, *row) for name, row in rows.items()],
        schema=["candidate_id", "task_id", "code"],
        orient="row",
    )
    result = deduplicate_samples(samples, DeduplicationConfig())
    assert result.kept == ("s0", "s4", "s5", "s6", "s7", "s9")
    assert result.removed.select("id", "level", "equals").rows() == [
        ("s1", "normalised", "s0"),
        ("s2", "exact", "s0"),
        ("s3", "normalised", "s0"),
        ("s8", "normalised", "s0"),
    ]
    shuffled = deduplicate_samples(
        samples.sample(fraction=1, shuffle=True, seed=3), DeduplicationConfig()
    )
    assert shuffled.kept == result.kept and shuffled.removed.equals(result.removed)


NATIVE = '''
import torch
from torch.utils.cpp_extension import load_inline

source = r"""
#include <torch/extension.h>
#define TWICE(x) \\
    (2 * (x))
#ifdef FAST
// quick
#endif
namespace { __device__ inline float grow(float v) { return TWICE(v) + 1e-3f; } }
__global__ void __launch_bounds__(256) scale(float* x, int n) {
    int i = threadIdx.x; /* the element */
    if (i < n && x[i] > 0.5f) x[i] = grow(x[i]);
}
torch::Tensor run(torch::Tensor x) { scale<<<1, 256>>>(x.data_ptr<float>(), 8); return x; }
"""
extension = load_inline(name="scale_v1", cpp_sources="torch::Tensor run(torch::Tensor x);",
                        cuda_sources=source, functions=["run"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.relu(extension.run(x))
'''
SAME = {
    "the name of the extension": [("scale_v1", "scale_v2")],
    "the name given by place": [('name="scale_v1"', '"b"')],
    "a comment in the source": [("/* the element */", "// another remark\n")],
    "a comment at its head": [("#include", "// version 2: the same\n#include")],
    "a blank line in it": [("{\n    int i", "{\n\n\n    int  i")],
    "blanks between tokens": [("i < n && x[i] > 0.5f", "i<n&&x[i]>0.5f")],
    "a line end of Windows": [("\n    int", "\r\n    int")],
    "a spliced line": [("TWICE(x) \\\n    (2", "TWICE(x) (2")],
    "a kernel's name": [("scale(", "stretch("), ("scale<<<", "stretch<<<")],
    "a device function's name": [("grow(", "f(")],
    "the bound function's name": [("run", "forward_cuda")],
    "a comment of Python": [("class ModelNew", "# best so far\nclass ModelNew")],
    "a docstring": [("    def forward", '    """Fast."""\n\n    def forward')],
}
OTHER = {
    "a number": [("1e-3f", "2e-3f")],
    "a condition": [("> 0.5f", ">= 0.5f")],
    "an operator": [("i < n && x", "i < n & x")],
    "a function of the library": [("grow(x[i])", "expf(x[i])")],
    "a launch": [("<<<1, 256>>>", "<<<1, 128>>>")],
    "what is called of torch": [("torch.relu", "torch.sigmoid")],
    "a directive": [("#ifdef FAST", "#ifndef FAST")],
    "a flag": [("functions=[", 'extra_cuda_cflags=["-O1"], functions=[')],
    "the end of a directive": [("#endif\nnamespace", "#endif namespace")],
}


def replaced(code, pairs):
    for old, new in pairs:
        assert old in code, old
        code = code.replace(old, new)
    return code


@pytest.mark.parametrize("case", [*SAME, *OTHER])
def test_what_makes_another_kernel(case):
    """Comments, blanks and names do not, in native sources either; everything else does."""
    other = replaced(NATIVE, SAME.get(case) or OTHER[case])
    assert (program_key(NATIVE) == program_key(other)) is (case in SAME)


def test_the_name_of_an_extension_may_be_a_variable():
    kernel = replaced(
        NATIVE, [('name="scale_v1"', "name=NAME"), ("source =", 'NAME = "a"\nsource =')]
    )
    assert program_key(kernel) == program_key(replaced(kernel, [('"a"', '"b"')]))


def test_a_function_of_torch_is_no_native_function_of_that_name():
    kernel = replaced(NATIVE, [("run", "relu")])
    assert program_key(kernel) == program_key(NATIVE)
    assert program_key(replaced(kernel, [("torch.relu", "torch.gelu")])) != program_key(kernel)


@pytest.mark.parametrize("text", ["(" * 50_000, "a(){" * 20_000, "}" * 50_000, "a() b " * 20_000])
def test_a_hostile_source_is_read_in_linear_time(text):
    code = f"source = {text + ';'!r}\nclass ModelNew:\n    pass\n    x = 1\n"
    assert program_key(code) == program_key(code + "# the same\n")
