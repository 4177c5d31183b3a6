"""The house rules that a reader relies on: which way imports go, who may use Prefect, and what
stays cheap to import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import pytest

import flows
from kernels_eval.extensions import GROUPS
from kernels_eval.languages import BUILT_IN
from kernels_eval.source.syntax import parse_source
from tests.support.cases import cases

CASES = cases("architecture")

ROOT = Path(flows.__file__).parent.parent
LAYERS = {"kernels_eval": 0, "tasks": 1, "flows": 2}
# what every stage may use; `sources` is the place of records
SHARED = {
    *("store", "keys", "tables", "files", "versions", "progress", "policy", "retry", "operators"),
    *("sources", "reporting", "scores", "samples", "models", "arl", "shares", "typed", "thoughts"),
}
HEAVY = ("torch", "ray", "trl", "vllm", "mlflow", "prefect", "transformers")
EXPERIMENTS = ROOT / "experiments"
DATA = (
    ROOT / "tasks" / "sources" / "bundled"
)  # programs handed to users and models, not modules of ours
FILES = sorted(
    path
    for layer in LAYERS
    for path in (ROOT / layer).rglob("*.py")
    if DATA / "tasks" not in path.parents
)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree, module):
    """Dotted names a module imports anywhere in it, functions included; `from a import b` gives
    a.b, so a submodule is seen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; use absolute names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports():
    """Every import of the three packages: the module, and what it imports."""
    for path in FILES:
        module = module_of(path)
        yield from ((module, imported) for imported in imports_of(parsed(path), module))


@cache
def parsed(path):
    return parse_source(path.read_text(encoding="utf-8"))


def wrong_way(module, imported):
    """Does this import go up the layers, or sideways from one stage to another?"""
    here, there = module.split("."), imported.split(".")
    if there[0] not in LAYERS:
        return False
    if LAYERS[there[0]] > LAYERS[here[0]]:
        return True
    if here[0] != "tasks" or there[0] != "tasks" or len(there) < 2:
        return False
    return there[1] not in SHARED and there[1] != here[1]


def called(tree):
    """Names of what is called, and of decorators."""
    nodes = list(ast.walk(tree))
    found = [node.func for node in nodes if isinstance(node, ast.Call)]
    found += [each for node in nodes for each in getattr(node, "decorator_list", ())]
    return {ast.unparse(each).split(".")[-1] for each in found}


def test_the_walk_sees_every_layer():
    seen = {module_of(path) for path in FILES}
    assert {
        "flows.pipeline",
        "tasks.store.snapshot",
        "tasks.training.trainer",
        "tasks.sources.bundled",
        "kernels_eval.roles",
    } <= seen


@pytest.mark.parametrize(
    "module, imported, wrong",
    CASES["the_rule_itself"],
)
def test_the_rule_itself(module, imported, wrong):
    assert wrong_way(module, imported) is wrong


def test_imports_go_one_way_and_stages_do_not_meet():
    assert [pair for pair in imports() if wrong_way(*pair)] == []


def private_names(tree):
    """Names with a leading underscore that a module imports, or takes of other objects than its
    own `self` and `cls`."""
    parts = {part for name in imports_of(tree, "an experiment") for part in name.split(".")}
    parts |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls")
    }
    of_tuples = {"_replace", "_asdict"}  # public, whatever their names say
    return sorted(name for name in parts - of_tuples if re.match(r"_(?!_)", name))


@pytest.mark.parametrize(
    "code, found",
    [
        ("from tasks.sources.files import _row", ["_row"]),
        ("import tasks._hidden.files", ["_hidden"]),
        ("from tasks.sources import files\nfiles._row()", ["_row"]),
        ("Sampler()._client", ["_client"]),
        ("self._client = Sampler.__name__", []),
        ("from __future__ import annotations\n_own()", []),
    ],
)
def test_the_search_for_private_names(code, found):
    assert private_names(parse_source(code)) == found


def test_nothing_of_the_core_imports_experiments():
    assert [pair for pair in imports() if pair[1].split(".")[0] == "experiments"] == []


def test_experiments_use_public_names_and_each_has_a_readme_and_a_test():
    modules = sorted(EXPERIMENTS.rglob("*.py"))
    assert EXPERIMENTS / "tritonbench" / "source.py" in modules
    found = {path.name: private_names(parsed(path)) for path in modules}
    assert {name: names for name, names in found.items() if names} == {}
    for folder in {path.parent for path in modules} - {EXPERIMENTS}:
        assert (folder / "README.md").is_file() and list(folder.glob("test_*.py")), folder


def test_every_entry_point_of_the_experiments_is_there():
    project = tomllib.loads((EXPERIMENTS / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["entry-points"]
    assert "tritonbench" in groups["concur.task_sources"] and set(groups) <= set(GROUPS)
    for places in groups.values():
        for place in places.values():
            module, _, name = place.partition(":")
            assert hasattr(import_module(module), name), place


def module_imports():
    """Which modules of the three packages each module imports, anywhere in it: in functions and
    under TYPE_CHECKING too."""
    known = {module_of(path) for path in FILES}
    return {
        module_of(path): {
            name if name in known else name.rpartition(".")[0]
            for name in imports_of(parsed(path), module_of(path))
            if name in known or name.rpartition(".")[0] in known
        }
        for path in FILES
    }


def circles(graph):
    """Groups of modules that import each other, directly or through others: what is left when
    modules that import nothing of the rest, and modules that nothing of the rest imports, are taken
    away one after the other."""
    rest = {name: set(found) - {name} for name, found in graph.items()}
    while True:
        imported = {name for found in rest.values() for name in found}
        ends = [name for name, found in rest.items() if not found & set(rest)]
        ends += [name for name in rest if name not in imported]
        if not ends:
            return sorted([name, *sorted(found & set(rest))] for name, found in rest.items())
        for name in set(ends):
            del rest[name]


@pytest.mark.parametrize(
    "graph, found",
    CASES["the_search_for_circles"],
)
def test_the_search_for_circles(graph, found):
    assert circles(graph) == found


def language_branches(tree):
    """Where code asks which language it has, instead of asking the language: by a member, or by a
    comparison with a name."""
    names = {*BUILT_IN}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("Language"):
            if node.attr.lower() in names:
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            said = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
            about = re.search(r"\b(language|backend|lang)\b", ast.unparse(node), re.IGNORECASE)
            if about and names & {each.value for each in said if isinstance(each.value, str)}:
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and "language" in ast.unparse(node.subject):
            yield ast.unparse(node.subject)


@pytest.mark.parametrize(
    "code, found",
    [
        ("candidate.language is Language.TRITON", True),
        ("{records.Language.CPP: 1}", True),
        ('request.language == "cpp"', True),
        ('self.language in ("cuda", "triton")', True),
        ("match self.language:\n case _: pass", True),
        ('device == "cuda"', False),
        ('Language("cpp")', False),
        ("a.language is b.language", False),
        ("language.needs_gpu", False),
    ],
)
def test_the_search_for_branches_on_a_language(code, found):
    assert bool(list(language_branches(parse_source(code)))) is found


def test_only_languages_know_their_names():
    found = {
        module_of(path): branches
        for path in FILES
        if ROOT / "kernels_eval" / "languages" not in path.parents
        if (branches := list(language_branches(parsed(path))))
    }
    assert found == {}


def names_bound_again(tree: ast.Module) -> list[str]:
    """Names, but for `_`, that assignments at the top of a module bind more than once."""
    targets: list[ast.expr] = []
    for statement in tree.body:
        targets += statement.targets if isinstance(statement, ast.Assign) else []
        targets += [statement.target] if isinstance(statement, ast.AnnAssign) else []
    bound = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
    return sorted({name for name in bound if name != "_" and bound.count(name) > 1})


@pytest.mark.parametrize(
    "code, found",
    [("A, B = 1, 2\nC = 3", []), ("A, B = 1, 2\nB: int = 3", ["B"]), ("_ = 1\n_ = 2", [])],
)
def test_the_search_for_names_bound_again(code, found):
    assert names_bound_again(parse_source(code)) == found


def test_no_constant_is_bound_again():
    """A second one takes the first one's place everywhere, and nothing says so."""
    found = {module_of(path): names for path in FILES if (names := names_bound_again(parsed(path)))}
    assert found == {}


def test_no_module_imports_itself_through_others():
    assert circles(module_imports()) == []


@pytest.mark.parametrize(
    "folder, never",
    CASES["the_trust_boundary_is_in_the_tree"],
)
def test_the_trust_boundary_is_in_the_tree(folder, never):
    """`candidate` alone runs beside candidates, `reference` runs the task, `judge` decides: they
    meet in messages, not in imports."""
    wrong = [
        f"{module} imports {name}"
        for module, imported in module_imports().items()
        for name in imported
        if module.startswith(f"kernels_eval.{folder}.")
        and name.startswith("kernels_eval.")
        and name.split(".")[1] in never
    ]
    assert wrong == []


def test_folders_are_removed_without_recursion_everywhere():
    """`shutil.rmtree` ends in a RecursionError where somebody left folders in folders."""
    recurses = {"rmtree", "TemporaryDirectory"}
    users = {module_of(path) for path in FILES if called(parsed(path)) & recurses}
    assert users == set()


def test_the_evaluator_knows_no_orchestrator_tracker_or_trainer():
    """The trust boundary stays small enough to read: Ray is the only framework it knows."""
    forbidden = {"prefect", "mlflow", "vllm", "trl", "peft", "openai"}
    found = {
        (module, imported.split(".")[0])
        for module, imported in imports()
        if module.startswith("kernels_eval")
    }
    assert [pair for pair in found if pair[1] in forbidden] == []
    assert any(name == "ray" for _, name in found)


def test_only_step_modules_hold_prefect_tasks_and_only_flows_hold_flows():
    makers = {module_of(path): called(parsed(path)) for path in FILES}
    users = prefect_users()
    tasks_in = {name for name, found in makers.items() if "stage_task" in found}
    tasks_in |= {name for name in users if "task" in makers[name]} - {"tasks.policy"}
    flows_in = {name for name in users if "flow" in makers[name]}
    assert all(name.endswith(".step") for name in tasks_in), tasks_in
    steps = ("sources", "synthesis", "verification", "training")
    assert {f"tasks.{stage}.step" for stage in steps} <= tasks_in
    assert flows_in and all(name.startswith("flows.") for name in flows_in), flows_in


def prefect_users():
    names = {module for module, imported in imports() if imported.split(".")[0] == "prefect"}
    return {module_of(path): path for path in FILES if module_of(path) in names}


def test_no_stage_module_outside_step_and_policy_needs_prefect():
    """Every stage runs from a plain call: only its `step` and the shared policy know who calls."""
    users = {name for name in prefect_users() if name.startswith("tasks.")}
    assert {name for name in users if not name.endswith("step")} == {"tasks.policy"}


def loaded_by(script):
    """Top-level modules that a fresh interpreter holds after `script`."""
    script += "\nimport json, sys; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module", ["flows.config", "flows.cli.main", "flows.doctor", "flows.launch"]
)
def test_what_the_command_imports_first_loads_nothing_heavy(module):
    loaded = loaded_by(f"import {module}")
    assert "kernels_eval" in loaded  # the list is real
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


TYPER = ("typer", "annotated_doc", "shellingham")


def test_help_loads_typer_and_nothing_else_that_is_installed():
    """`concur --help` answers in under half a second: measured, typer and our own commands take
    0.1 s, and pydantic, rich or YAML alone would double that."""
    script = "from flows.cli.main import main; main(['--help'], standalone_mode=False)"
    loaded = loaded_by(script) - loaded_by("pass")
    installed = {name for name in metadata.packages_distributions() if name in loaded}
    assert "typer" in loaded and installed <= {*TYPER, "flows", "kernels_eval"}, installed


def test_the_trusted_side_of_verification_imports_no_torch():
    """Every Ray worker and every driver imports these: torch would cost each of them seconds and
    hundreds of megabytes."""
    modules = ("judge.runner", "pool.pool", "pool.worker", "profile.profiler")
    loaded = loaded_by("\n".join(f"import kernels_eval.{name}" for name in modules))
    assert "kernels_eval" in loaded and "torch" not in loaded


def test_every_module_that_flows_config_loads_at_the_top_is_light():
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
