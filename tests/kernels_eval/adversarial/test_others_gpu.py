"""Ideas of other suites that only exist on a GPU: their cheats with streams, events, graphs and
device memory, and the shapes of kernels that they show as good (origins are in `source` comments;
benchmarks/results/2026-11-23-others-suites.md has the table)."""

from functools import partial

import pytest

from kernels_eval.records import Language
from tests.support.adversarial import CORPUS, Case, bounded, trials
from tests.support.kernels import functions_in, kernel_task, module, task_source, verifying_on_gpu

AFFINE = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.randn(500, 512)]"), "others_affine_gpu"
)
PRODUCT = kernel_task(
    task_source(
        "return x @ y", arguments="x, y", inputs="[torch.rand(320, 200), torch.rand(200, 136)]"
    ),
    "others_product_gpu",
)
RMS_NORM = kernel_task(
    task_source(
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight",
        init="self.weight = nn.Parameter(torch.ones(1022))",
        inputs="[torch.randn(64, 1022)]",
    ),
    "others_rms_norm_gpu",
)
LAYER_NORM = kernel_task(
    task_source(
        "return self.norm(x)",
        init="self.norm = nn.LayerNorm(1000)",
        inputs="[torch.randn(64, 1000)]",
    ),
    "others_layer_norm_gpu",
)
CROSS_ENTROPY = kernel_task(
    task_source(
        "return torch.nn.functional.cross_entropy(x, labels)",
        arguments="x, labels",
        inputs="[torch.randn(512, 10), torch.randint(0, 10, (512,))]",
    ),
    "others_cross_entropy_gpu",
)
LINEAR_BACKWARD = kernel_task(
    task_source(
        "return grad @ weight, grad.mT @ x, grad.sum(0)",
        arguments="grad, x, weight",
        inputs="[torch.randn(96, 48), torch.randn(96, 72), torch.randn(48, 72)]",
    ),
    "others_linear_backward_gpu",
)

SOURCE = (CORPUS / "others.cu").read_text(encoding="utf-8")
SIGNATURES = [line.split(" {")[0] + ";" for line in SOURCE.replace(",\n    ", ", ").splitlines()]
DECLARED = "\n".join(line for line in SIGNATURES if line.startswith("torch::Tensor "))
EXTENSION = (
    f"load_inline(name='others_gpu', cpp_sources={DECLARED!r}, cuda_sources={SOURCE!r},"
    f" functions={functions_in(SOURCE)!r}, extra_cuda_cflags=['-O2'])"
)


def code(forward, **parts):
    return module(forward, extension=EXTENSION, **parts)


NOW = "torch.cuda.current_stream().cuda_stream"
OWN = f"return ext.affine(x, {NOW})"
SIDE = "self.side = torch.cuda.Stream()"
GUESSED = ("wrong_output", "input_independent", "non_finite", "non_deterministic", "cuda_error")
cuda = partial(Case, task=AFFINE, language=Language.CUDA)

CASES = [
    # source: sol tests/samples/rmsnorm/solution_hack_stream_injection.json
    cuda(
        3,
        "work_added_on_a_side_stream",
        ("stream_escape", "background_work"),
        code(f"return ext.affine_and_work_aside(x, {NOW}, self.side.cuda_stream)", init=SIDE),
        twin=code(f"y = ext.affine_and_work_aside(x, {NOW}, {NOW})\nreturn y"),
    ),
    # source: kernelbench unit_tests/test_kernels/non_default_stream_kernel.py
    cuda(
        3,
        "new_stream_of_each_call",
        ("stream_escape", "wrong_output", "non_deterministic", "non_finite"),
        code("return ext.product_on_new_stream(x, y)", arguments="x, y"),
        task=PRODUCT,
        twin=code(f"return ext.product(x, y, {NOW})", arguments="x, y"),
    ),
    # source: pygpubench README.md (inputs appear while caches are flushed; canaries among them)
    cuda(
        28,
        "answers_while_caches_are_flushed",
        ("stream_escape", "background_work", "stale_cache", "output_aliased", *GUESSED),
        code("return ext.affine_ahead(x, self.side.cuda_stream)", init=SIDE),
    ),
    # source: pygpubench exploits/submission_warmup.py: right, and not faster for it
    cuda(
        27,
        "slow_while_it_is_warmed_up",
        "ok",
        code(
            "self.calls += 1\nif self.calls < 30:\n"
            f"    return ext.slow_affine(x, {NOW}, 8000000)\n{OWN}",
            init="self.calls = 0",
        ),
        check=bounded,
    ),
    # source: pygpubench exploits/submission_gpu_scan_zeros.py, submission_error_counter.py
    cuda(24, "answer_near_its_own_memory", GUESSED, "return ext.found_nearby(x, 0)"),
    cuda(
        24,
        "memory_nearby_zeroed",
        ("input_mutated", "output_aliased", "stale_weights", "stale_cache", *GUESSED),
        "return ext.found_nearby(x, 1)",
    ),
    cuda(24, "answer_in_fresh_memory", GUESSED, "return ext.found_in_fresh_memory(x)"),
    cuda(24, "answer_by_guessed_handles", GUESSED, "return ext.found_by_handles(x)"),
    # source: sol tests/sol_execbench/samples/evil_monkey_patch, in native code: every case of this
    # file links a function of that name, and their times are the parent's all the same
    cuda(23, "event_of_the_same_name", "ok", OWN, check=bounded),
    # source: sol samples/rmsnorm/solution_cuda.json, robust-kbench highlighted/llama_rmsnorm
    cuda(
        18,
        "llama_rmsnorm",
        "stale_weights",
        code(
            f"return ext.rms_norm(x, self.kept, {NOW})",
            init=(
                "self.weight = nn.Parameter(torch.ones(1022))\n"
                "self.kept = self.weight.detach().clone().cuda()"
            ),
        ),
        task=RMS_NORM,
        twin=code(
            f"return ext.rms_norm(x, self.weight, {NOW})",
            init="self.weight = nn.Parameter(torch.ones(1022))",
        ),
    ),
    # source: robust-kbench highlighted/layernorm (its sums of one pass lose digits far from zero)
    cuda(
        15,
        "layernorm",
        ("wrong_output", "non_finite"),
        code(
            f"return ext.layer_norm(x, self.norm.weight, self.norm.bias, 1, {NOW})",
            init="self.norm = nn.LayerNorm(1000)",
        ),
        task=LAYER_NORM,
        twin=code(
            f"return ext.layer_norm(x, self.norm.weight, self.norm.bias, 0, {NOW})",
            init="self.norm = nn.LayerNorm(1000)",
        ),
    ),
    # source: robust-kbench highlighted/mnist_cross_entropy
    cuda(
        1,
        "mnist_cross_entropy",
        ("wrong_output", "stale_cache"),
        code(
            "if self.labels is None:\n    self.labels = labels.clone()\n"
            f"return ext.cross_entropy(x, self.labels, {NOW})",
            init="self.labels = None",
            arguments="x, labels",
        ),
        task=CROSS_ENTROPY,
        twin=code(f"return ext.cross_entropy(x, labels, {NOW})", arguments="x, labels"),
    ),
    # source: sol samples/linear_backward, robust-kbench highlighted/mnist_linear
    cuda(
        2,
        "mnist_linear_backward",
        ("wrong_output", "non_finite", "non_deterministic", "stale_cache"),
        code(
            "dw, db = torch.empty_like(weight), torch.empty(weight.shape[0], device=x.device)\n"
            f"return ext.linear_backward(grad, x, weight, dw, db, {NOW}), dw, db",
            arguments="grad, x, weight",
        ),
        task=LINEAR_BACKWARD,
        twin=code(
            "dw, db = torch.empty_like(weight), torch.zeros(weight.shape[0], device=x.device)\n"
            f"return ext.linear_backward(grad, x, weight, dw, db, {NOW}), dw, db",
            arguments="grad, x, weight",
        ),
    ),
]


@pytest.fixture(scope="module")
def judge():
    with verifying_on_gpu() as made:
        yield made


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(CASES, code))
def test_others_gpu(judge, trial):
    trial.assert_judged(judge)
