"""The house rules that a reader relies on: which way imports go, who may use Prefect, and what
stays cheap to import."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import flows

ROOT = Path(flows.__file__).parent.parent
LAYERS = {"kernels_eval": 0, "tasks": 1, "flows": 2}
SHARED = {
    "store",
    "tables",
    "files",
    "versions",
    "reporting",
    "progress",
    "policy",
    "operators",
    "sources",
}  # what every stage may use; `sources` is the place of records
HEAVY = ("torch", "ray", "trl", "vllm", "mlflow", "prefect", "transformers")
DATA = (
    ROOT / "tasks" / "sources" / "bundled"
)  # programs handed to users and models, not modules of ours
FILES = sorted(
    path
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*.py")
    if DATA / "tasks" not in path.parents
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, module: str) -> Iterator[str]:
    """Dotted names a module imports anywhere in it, functions included; `from a import b` gives
    a.b, so a submodule is seen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{module} imports relatively: the layers are told apart by absolute names"
            )
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def wrong_way(module: str, imported: str) -> bool:
    """Does this import go up the layers, or sideways from one stage to another?"""
    here, there = module.split("."), imported.split(".")
    if there[0] not in LAYERS:
        return False
    if LAYERS[there[0]] > LAYERS[here[0]]:
        return True
    if here[0] != "tasks" or there[0] != "tasks" or len(there) < 2:
        return False
    return there[1] not in SHARED and there[1] != here[1]


def decorators(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                found.add(ast.unparse(call).split(".")[-1])
    return found


def test_the_walk_sees_every_layer() -> None:
    seen = {module_of(path) for path in FILES}
    assert {
        "flows.pipeline",
        "tasks.store.snapshot",
        "tasks.training.trainer",
        "tasks.sources.bundled",
        "kernels_eval.child.main",
    } <= seen


@pytest.mark.parametrize(
    ("module", "imported", "wrong"),
    [
        ("kernels_eval.cluster.pool", "tasks.store.snapshot.Snapshot", True),
        ("tasks.policy", "flows.config.PipelineConfig", True),
        ("tasks.training.stage", "tasks.synthesis.prompts.render", True),
        ("tasks.sources.small_model", "tasks.training.trainer", True),
        ("tasks.training.stage", "tasks.store.snapshot.Snapshot", False),
        ("tasks.training.stage", "tasks.training.recipe", False),
        ("tasks.synthesis.stage", "tasks.sources.models.resolve_model", False),
        ("flows.train", "tasks.synthesis.prompts.render", False),
        ("kernels_eval.cluster.pool", "ray.exceptions", False),
    ],
)
def test_the_rule_itself(module: str, imported: str, wrong: bool) -> None:
    assert wrong_way(module, imported) is wrong


def test_imports_go_one_way_and_stages_do_not_meet() -> None:
    wrong = [
        f"{module_of(path)} imports {imported}"
        for path in FILES
        for imported in imports_of(parsed(path), module_of(path))
        if wrong_way(module_of(path), imported)
    ]
    assert wrong == []


def test_the_evaluator_knows_no_orchestrator_tracker_or_trainer() -> None:
    """The trust boundary stays small enough to read: Ray is the only framework it knows."""
    forbidden = {"prefect", "mlflow", "vllm", "trl", "peft", "openai"}
    found = {
        (module_of(path), imported.split(".")[0])
        for path in FILES
        if module_of(path).startswith("kernels_eval")
        for imported in imports_of(parsed(path), module_of(path))
    }
    assert [pair for pair in found if pair[1] in forbidden] == []
    assert any(name == "ray" for _, name in found)


def test_only_step_modules_hold_prefect_tasks_and_only_flows_hold_flows() -> None:
    tasks_in = {
        module_of(path)
        for path in FILES
        if "task" in decorators(parsed(path)) and imports_prefect(path)
    }
    flows_in = {
        module_of(path)
        for path in FILES
        if "flow" in decorators(parsed(path)) and imports_prefect(path)
    }
    assert tasks_in and all(
        module.startswith("tasks.") and module.endswith(".step") for module in tasks_in
    ), tasks_in
    assert {
        "tasks.sources.step",
        "tasks.synthesis.step",
        "tasks.verification.step",
        "tasks.training.step",
    } <= tasks_in
    assert flows_in and all(module.startswith("flows.") for module in flows_in), flows_in


def imports_prefect(path: Path) -> bool:
    return any(
        name.split(".")[0] == "prefect" for name in imports_of(parsed(path), module_of(path))
    )


def test_no_stage_module_outside_step_and_policy_needs_prefect() -> None:
    """Every stage runs from a plain call: only its `step` and the shared policy know who calls."""
    users = {
        module_of(path)
        for path in FILES
        if module_of(path).startswith("tasks.") and imports_prefect(path)
    }
    assert {name for name in users if not name.endswith(".step")} == {"tasks.policy"}


@pytest.mark.parametrize(
    "module", ["flows.config", "flows.cli.main", "flows.ops.doctor", "flows.launch"]
)
def test_what_the_command_imports_first_loads_nothing_heavy(module: str) -> None:
    script = (
        f"import json, sys, {module}; print(json.dumps(sorted({{name.split('.')[0] for name in"
        " sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "kernels_eval" in loaded  # the list is real
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


def test_the_trusted_side_of_verification_imports_no_torch() -> None:
    """Every Ray worker and every driver imports these: torch would cost each of them seconds and
    hundreds of megabytes."""
    script = (
        "import sys, kernels_eval.parent.runner, kernels_eval.cluster.pool,"
        " kernels_eval.cluster.worker; print('torch' in sys.modules, 'kernels_eval.cluster.pool' in"
        " sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_every_module_that_flows_config_loads_at_the_top_is_light() -> None:
    """The same rule by reading: a module with a config class imports no heavy package at its
    top."""
    wrong = []
    for path in FILES:
        tree = parsed(path)
        holds_config = any(
            isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Recipe"))
            for node in tree.body
        )
        top = {
            name.split(".")[0]
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imports_of(node, "")
        }
        wrong += [
            f"{module_of(path)} imports {name}"
            for name in top & {*HEAVY, "peft", "openai", "matplotlib", "scipy"}
            if holds_config
        ]
    assert wrong == []


def test_help_answers_in_half_a_second() -> None:
    """Best of five: the promise is about the command, not about what else the machine is doing."""
    command = [sys.executable, "-m", "flows.cli", "--help"]
    took = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        took.append(time.perf_counter() - started)
        assert done.returncode == 0 and "Usage:" in done.stdout, done.stderr
        assert all(name in done.stdout for name in ("verify", "doctor", "run"))
    assert min(took) < 0.5, took
