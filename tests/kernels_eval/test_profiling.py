"""Profiles of correct candidates: which finding follows from which numbers, what the tools print,
and a candidate profiled end to end on the CPU. A stand-in takes ncu's place where there is no
GPU."""

import math
import sys

import pytest

from kernels_eval.compile import cubins
from kernels_eval.profile import bottleneck, ncu, roofline
from kernels_eval.profile.bottleneck import RULES, Cause, Limit, findings
from kernels_eval.profile.ncu import CUDAFORGE, METRICS
from kernels_eval.profile.profiler import Profiler
from kernels_eval.profile.records import KernelProfile, OperatorTime
from kernels_eval.profile.roofline import sol_score
from kernels_eval.records import Language
from tests.support.cases import cases
from tests.support.kernels import AFFINE, QUICK, candidate, module, workplace

CASES = cases("profiling")
LOW, ELAPSED = CASES["low"], ".avg.pct_of_peak_sustained_elapsed"


def profile(metrics=None, *, operators=(), candidate_ms=1.0, kernel_us=1000.0, **fields):
    """A candidate of one kernel on a device that moves 1e12 bytes and computes 1e13 a second."""
    kernel = {"name": "own", "us": kernel_us, "calls": 1, "metrics": metrics or {}}
    kernel |= {name: fields.pop(name) for name in ("blocks_per_sm", "occupancy") if name in fields}
    known = {"reference_ms": 2.0, "flops": 10**6, "bytes_min": 10**6, "peak_flops": 1e13}
    known |= {"peak_bytes_per_s": 1e12, "candidate_ms": candidate_ms, "clock": "device"}
    spent = [{"name": name, "us": us, "calls": 1} for name, us in operators]
    return KernelProfile.model_validate(
        {"candidate_id": "c", "task_id": "t", "device": "d", **known, **fields}
        | {"kernels": [kernel], "operators": spent}
        | {"total_us": kernel_us + sum(us for _, us in operators)}
    )


@pytest.mark.parametrize("row", CASES["limits"])
def test_each_limit_is_named_by_its_numbers(row):
    facts = {name: row[name] for name in row.keys() - {"limit", "cause", "counters"}}
    given = profile(LOW | row["counters"] if "counters" in row else None, **facts)
    found = next(findings(given))
    assert (found.limit, found.cause) == (row["limit"], row["cause"])
    assert found.suggestion and found.numbers
    assert found.where == ("conv2d" if row["limit"] == "elsewhere" else "own")
    assert next(findings(given)) == found, "the same profile gives the same finding"


def test_every_rule_and_every_cause_can_be_found():
    assert {rule.cause for rule in RULES} == {None, *Cause}
    assert {rule.limit for rule in RULES} == set(Limit)
    assert RULES[-1].between == {}, "the last one always fires"


def test_what_the_rules_ask_of_ncu_is_among_its_metrics():
    names, table = set(METRICS), bottleneck._TABLE
    asked = [metric for metric, _ in table["shares"].values()]
    asked += [each for parts, whole in table["ratios"].values() for each in (*parts, whole)]
    asked += [each for parts in table["least"].values() for each in parts]
    assert len(asked) == 12 and set(asked) <= names


def test_a_number_that_was_not_measured_accuses_nobody():
    found = list(findings(profile(total_us=None, candidate_ms=None, reference_ms=None)))
    assert [one.limit for one in found] == [Limit.LATENCY]
    missing = KernelProfile(candidate_id="c", task_id="t", device="d", problem="it crashed")
    with pytest.raises(ValueError, match="it crashed"):
        next(findings(missing))


SM, MEMORY = f"sm__throughput{ELAPSED}", f"gpu__compute_memory_throughput{ELAPSED}"


@pytest.mark.parametrize("nothing", [{}, {MEMORY: math.nan}, {MEMORY: math.inf}])
def test_what_is_no_number_was_not_measured(nothing):
    found = list(findings(profile(nothing | {SM: 90.0})))
    assert found[0].limit is Limit.COMPUTE and found[-1].limit is Limit.LATENCY
    assert all(map(math.isfinite, found[-1].numbers.values()))
    assert next(findings(profile({SM: math.nan, MEMORY: 90.0}))).limit is Limit.MEMORY
    least = [
        f"smsp__sass_average_data_bytes_per_sector_mem_global_op_{x}.pct" for x in ("ld", "st")
    ]
    given = profile({least[0]: math.nan, least[1]: 20.0, MEMORY: 50.0})
    assert next(findings(given)).cause is Cause.UNCOALESCED
    page = f'"Kernel Name","{MEMORY}","{SM}"\n"own","nan","1,000.5"\n'
    assert ncu.metrics_in(page) == {"own": {SM: 1000.5}}


NAMED = [
    ("NVIDIA H100 80GB HBM3", 3.35e12),
    ("NVIDIA H100 PCIe", 2.0e12),
    ("NVIDIA A100-SXM4-40GB", 1.56e12),
    ("NVIDIA A100-SXM4-80GB", 2.04e12),
    ("NVIDIA GH200 480GB", None),
    ("NVIDIA RTX A1000", None),
    ("", None),
]


@pytest.mark.parametrize("name, bytes_per_s", NAMED)
def test_peaks_are_those_of_the_very_device(name, bytes_per_s):
    assert roofline.peak_bytes_per_s(name) == bytes_per_s


def test_the_most_decisive_finding_comes_first():
    spills = {"smsp__inst_executed.sum": 10.0, "smsp__inst_executed_op_local_ld.sum": 5.0}
    given = profile(LOW | spills, operators=[("mm", 9000.0)], blocks_per_sm=0.1)
    assert [one.cause or one.limit for one in findings(given)] == [
        *("elsewhere", "too_few_blocks", "spills", "latency")
    ]


def test_the_score_is_a_half_at_the_reference_and_one_at_the_speed_of_light():
    assert sol_score(2.0, 2.0, 0.5) == pytest.approx(0.5)
    assert sol_score(0.5, 2.0, 0.5) == 1.0 and sol_score(0.1, 2.0, 0.5) == 1.0
    assert sol_score(1.0, 2.0, 0.5) == pytest.approx(1 / (1 + 0.5 / 1.5))
    assert sol_score(8.0, 2.0, 0.5) == pytest.approx(1 / 6)
    assert sol_score(1.0, 0.5, 0.5) is None, "there is no way to go"
    given = profile(flops=5 * 10**9, bytes_min=10**8)
    assert given.least_ms == pytest.approx(0.5) and given.speed_of_light == pytest.approx(0.5)
    assert given.sol_score == pytest.approx(1 / (1 + 0.5 / 1.5))
    assert profile(flops=None, bytes_min=None).sol_score is None


def test_fp32_keeps_its_precision_in_three_products():
    assert roofline.peak_flops("NVIDIA H200", "fp32") == pytest.approx(9.89e14 / 6)
    assert roofline.peak_flops("NVIDIA H200", "bf16") == 9.89e14
    assert roofline.peak_bytes_per_s("NVIDIA H200") == 4.8e12
    assert roofline.peak_bytes_per_s("a card of tomorrow") is None


def test_the_bottleneck_is_rewritten_where_no_call_of_it_is_left():
    reference = [OperatorTime(name="add", us=1.0, calls=1), OperatorTime(name="mm", us=9, calls=1)]
    kept = profile(operators=[("mm", 9.0)], reference_operators=reference)
    assert kept.rewrote_bottleneck is False
    assert profile(operators=[("add", 1.0)], reference_operators=reference).rewrote_bottleneck
    assert profile().rewrote_bottleneck is None, "nobody knows where the reference's time goes"


DUMP = """Fatbin elf code:
================
arch = sm_90

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN12_GLOBAL__N_14tileILi256EEEvPf:
  REG:10 STACK:0 SHARED:2048 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function spilled:
  REG:32 STACK:72 SHARED:0 LOCAL:0 CONSTANT[0]:540 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_90
\t\tFunction : _ZN12_GLOBAL__N_14tileILi256EEEvPf
        /*0000*/                   LDC R1, c[0x0][0x28] ;   /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 EXIT ;                   /* 0x0000000000052919 */
\t\t..........
\t\tFunction : spilled
        /*0000*/                   LDG.E R5, [R2] ;         /* 0x0000000000057919 */
        /*0010*/                   STL [R1+0x4], R5 ;       /* 0x0000000000057919 */
        /*0020*/               @P0 LDL.LU R5, [R1+0x4] ;    /* 0x0000000000057919 */
        /*0030*/                   EXIT ;                   /* 0x0000000000057919 */
\t\t..........
"""


def test_the_resources_of_a_recorded_dump():
    found = cubins.resources_in(DUMP)
    (tile,) = (found[name] for name in found if cubins.named("tile", name))
    assert tile == cubins.Resources(10, 0, 2048, 0.0)
    assert found["spilled"] == cubins.Resources(32, 72, 0, 0.5)
    assert cubins.plain_name("void (anonymous namespace)::tile<256>(float*)") == "tile"


@pytest.mark.slow
def test_the_resources_of_a_real_library(tmp_path):
    import subprocess

    nvcc = cubins.tool_path("nvcc")
    if not (nvcc and cubins.cuobjdump()):
        pytest.skip("needs nvcc and cuobjdump")
    source, library = tmp_path / "k.cu", tmp_path / "k.so"
    source.write_text("__global__ void plain(float* x) { x[threadIdx.x] *= 2.0f; }\n")
    options = [nvcc, "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", str(source)]
    subprocess.run([*options, "-o", str(library)], check=True)
    ((name, found),) = cubins.resources_of(str(library)).items()
    assert cubins.named("plain", name) and found.registers > 0 and found.local_share == 0


def raw_page(*rows, names=("gpu__time_duration.sum", f"sm__throughput{ELAPSED}")):
    head = '"ID","Kernel Name","Block Size","Grid Size",'
    lines = [head + ",".join(f'"{name}"' for name in names), '"","","","","ns","%"']
    lines += [f'"{number}","{row}"' for number, row in enumerate(rows)]
    return "==PROF== Connected to process 7\n" + "\n".join(lines) + "\n"


AFFINE_ROW = 'affine","(256, 1, 1)","(16, 1, 1)","1,200","41.5'


def test_the_metrics_of_a_recorded_page():
    short = 'void tile<4>(float *)","(32, 1, 1)","(1, 1, 1)","900","10.0'
    long = 'void tile<4>(float *)","(32, 1, 1)","(9, 1, 1)","1,900","n/a'
    found = ncu.metrics_in(raw_page(AFFINE_ROW, short, long))
    assert found["affine"] == {"gpu__time_duration.sum": 1200, f"sm__throughput{ELAPSED}": 41.5}
    assert found["tile"] == {"gpu__time_duration.sum": 1900}, "the longest, without what it lacks"
    assert ncu.metrics_in("==WARNING== No kernels were profiled.\n") == {}


def test_the_command_names_the_kernels_and_the_metrics():
    asked = ncu.command("ncu", ["void (anonymous namespace)::tile<4>(float*)", "own"], ["x"])
    assert asked[asked.index("--kernel-name") + 1] == "regex:^(own|tile)$"
    assert asked[-1].split(",") == METRICS
    assert len(CUDAFORGE) == 24 and len(set(METRICS)) == len(METRICS)
    without = ncu.command("ncu", [], [METRICS[0]])
    assert METRICS[0] not in without[-1] and "--kernel-name" not in without


def test_counters_that_are_not_permitted_are_said_with_the_fix():
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in ncu.unavailable_reason(said)
    other = "==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n"
    assert ncu.unavailable_reason(other) == (
        "ncu says: Failed to initialize the profiler: LibraryNotLoaded"
    )
    assert ncu.unavailable_reason("==PROF== Disconnected") == ""


STAND_IN = """#!{python}
import subprocess, sys
sys.exit(print({page!r}) or subprocess.run(sys.argv[sys.argv.index({python!r}):]).returncode)
"""


@pytest.fixture(scope="module")
def judged(verify):
    """An honest candidate with its verdict, and a profiler that is warm."""
    with Profiler(QUICK, "cpu") as profiler:
        profiler._host = workplace()
        code = module("return ext.affine(x)")
        yield candidate(AFFINE, code), verify(AFFINE, code), profiler


def test_a_cpu_candidate_is_profiled_end_to_end(judged):
    found, verdict, profiler = judged
    made = profiler.profile(AFFINE, found, verdict, flops=8192, bytes_min=32768)
    assert made.problem is None and made.clock == "cpu" and made.operators == ()
    assert [kernel.name for kernel in made.kernels] == ["affine"] and made.kernel_share == 1.0
    assert made.kernels[0].calls == 1 and made.kernels[0].us > 0
    assert made.reference_ms == verdict.timing.reference_ms
    assert made.peak_flops > 1e8 and made.peak_bytes_per_s > 1e8 and made.counters
    assert made.sol_score is None or 0 < made.sol_score <= 1
    assert next(findings(made)).where == "affine"


@pytest.mark.slow
def test_a_kernel_beside_the_work_is_not_where_the_time_goes(judged):
    _, verdict, profiler = judged
    slow = "for _ in range(6):\n    y = torch.sin(x.repeat(20, 1))\nreturn ext.affine(x)"
    made = profiler.profile(AFFINE, candidate(AFFINE, module(slow)), verdict)
    found = next(findings(made))
    assert found.limit is Limit.ELSEWHERE and found.where in ("sin", "repeat")
    assert found.numbers["kernel_share"] == pytest.approx(made.kernel_share) and "sin" in {
        operator.name for operator in made.operators
    }


@pytest.mark.parametrize(
    "code, said",
    [
        (module("raise ValueError('not today')"), "not today"),
        (module("return ext.aborts(x)"), "crashed"),
    ],
)
def test_a_candidate_that_fails_costs_its_own_profile(judged, code, said):
    _, verdict, profiler = judged
    made = profiler.profile(AFFINE, candidate(AFFINE, code), verdict)
    assert said in made.problem and made.kernels == () and made.sol_score is None
    assert made.candidate_ms == verdict.timing.candidate_ms, "the verdict's numbers stay"


@pytest.mark.parametrize(
    "page, metrics, counters",
    [
        (raw_page(AFFINE_ROW), {f"sm__throughput{ELAPSED}": 41.5}, ""),
        pytest.param(
            *("==ERROR== ERR_NVGPUCTRPERM - no permission", {}, ncu.FORBIDDEN),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_metrics_come_through_the_confined_path(judged, monkeypatch, page, metrics, counters):
    """On the CPU: the child, its confinement, the program and the parsing are as on a GPU."""
    found, verdict, profiler = judged
    stand_in = profiler.server.base / "ncu"
    stand_in.write_text(STAND_IN.format(python=sys.executable, page=page))
    stand_in.chmod(0o755)
    monkeypatch.setattr(profiler, "ncu", str(stand_in))
    monkeypatch.setattr(profiler, "counters", "")
    asked = []
    run = profiler._run
    monkeypatch.setattr(profiler, "_run", lambda *them: asked.append(1) or run(*them))
    for _ in range(1 if metrics else 2):
        made = profiler.profile(AFFINE, found, verdict)
        assert made.problem is None and made.counters == counters
        assert made.kernels[0].metrics.items() >= metrics.items()
    assert len(asked) == 1, "a machine that permits none is asked once"


@pytest.mark.gpu
@pytest.mark.slow
def test_a_cuda_candidate_has_geometry_and_metrics():
    from kernels_eval.devices import gpu_arch
    from tests.kernels_eval.test_sanitizer import HONEST, ROWS, kernel
    from tests.support.kernels import verifying_on_gpu

    code = kernel(HONEST)
    with verifying_on_gpu(QUICK) as judge:
        verdict = judge(ROWS, code, language=Language.CUDA)
    with Profiler(QUICK, "cuda:0", cuda_arch=gpu_arch()) as profiler:
        made = profiler.profile(
            ROWS,
            candidate(ROWS, code, language=Language.CUDA),
            verdict,
            flops=8448,
            bytes_min=33924,
        )
    assert made.problem is None, made.problem
    (own,) = made.kernels
    assert own.name == "sum_kernel" and own.grid[0] == 33 and own.block[0] == 256
    assert own.registers and own.stack_bytes is not None
    assert bool(own.metrics) != bool(made.counters)
