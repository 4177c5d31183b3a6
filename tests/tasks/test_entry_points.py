"""Extensions are found by name, and one that cannot be used says what to do."""

import re
import tomllib
from pathlib import Path
from random import Random
from types import FunctionType

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.extensions import known_names, load_extension, require_known
from kernels_eval.records import KernelTask, Language
from tasks.search.config import SearchConfig
from tasks.search.population import START, Member, Population
from tasks.sources.config import BUILT_IN, GROUP, TasksConfig
from tasks.sources.stage import load_tasks
from tasks.synthesis import config as synthesis_config
from tasks.synthesis import samplers
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import Sampler
from tasks.synthesis.samplers import make_sampler, sampler_class
from tasks.synthesis.stage import Synthesis
from tests.support.installed import install
from tests.support.requests import tasks_snapshot

CODE = """
from kernels_eval.records import KernelTask

NUMBER = 7


def load(config):
    size = config.options["size"]
    return [KernelTask(task_id=f"mine/{n}", name="x", code=f"n = {n}") for n in range(size)]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"mine": "mine:load", "number": "mine:NUMBER", "gone": "mine:gone"}
    install(tmp_path, "mine", CODE, GROUP, entries)


def test_a_task_source_of_another_package_is_configured_by_its_name(site):
    config = TasksConfig(source="mine", limit=2, options={"size": 3})
    assert [task.task_id for task in load_tasks(config)] == ["mine/0", "mine/1"]
    assert {*BUILT_IN, "mine"} <= {*known_names(GROUP, BUILT_IN)}


@pytest.mark.parametrize("source", [*BUILT_IN, "mine"])
def test_known_names_are_taken_without_loading_anything(site, source):
    assert require_known(GROUP, source, BUILT_IN) == source


@pytest.mark.parametrize(
    "name, message",
    [
        ("absent", r"no task source 'absent'; known are bundled, .*mine.*\(correct .*install"),
        (
            "number",
            r"'number' of concur-mine cannot be used: it is no function \(correct its entry",
        ),
        ("gone", r"'gone' of concur-mine cannot be used: module 'mine' has no attribute 'gone'"),
    ],
)
def test_what_cannot_be_used_says_why(site, name, message):
    with pytest.raises(UsageError, match=message):
        load_extension(GROUP, name, FunctionType, BUILT_IN)


def test_an_unknown_name_is_refused_by_the_configuration():
    with pytest.raises(UsageError, match="no task source 'kernelbok'; known are bundled"):
        TasksConfig(source="kernelbok")


OPERATOR = """
def swap(code, language, draw, options):
    return code.replace("a", options["letter"]), f"a -> {options['letter']} on {language}"
"""


def test_a_search_operator_of_another_package_proposes_candidates(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "letters", OPERATOR, "concur.search_operators", {"letters": "letters:swap"})
    config = SearchConfig(operators=("letters",), options={"letter": "b"}, batch=1)
    task = KernelTask(task_id="t", name="t", code="x")
    population = Population(task, Language("cpp"), config)
    population.add(Member("c", "code a", 0, START, speedup=1.0))
    (plan,) = population.plans(1)
    assert (plan.code, plan.change) == ("code b", "a -> b on cpp")
    assert (plan.operator, plan.parents[0].code) == ("letters", "code a")


def test_an_unknown_search_operator_is_refused_by_the_configuration():
    with pytest.raises(UsageError, match="no search operator 'crossing'; known are parameters"):
        SearchConfig(operators=("crossing",))


SAMPLER = """
from tasks.synthesis.sampler import Response, Sampler


class Echo(Sampler):
    generator = "echo"

    @classmethod
    def from_config(cls, config, root, adapter=None):
        return cls()

    def prompt(self, task, prompt):
        return f"{prompt}# for {task.name}"

    def sample(self, requests):
        for request in requests:
            yield Response(request_key=request.request_key, text=request.prompt)


NO_SAMPLER = dict
"""


def test_every_built_in_sampler_has_a_class():
    assert tuple(samplers.CLASSES) == synthesis_config.BUILT_IN
    assert all(issubclass(sampler_class(name), Sampler) for name in samplers.CLASSES)


def test_a_sampler_of_another_package_changes_the_prompt_and_answers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    entries = {"echo": "echo:Echo", "dict": "echo:NO_SAMPLER"}
    install(tmp_path, "echo", SAMPLER, "concur.samplers", entries)
    tasks = tasks_snapshot(tmp_path / "root", 2)
    config = SynthesisConfig(sampler="echo", samples_per_task=1, options={"any": "thing"})
    rows = Synthesis(tasks, config, Language("cpp")).run().open().read()
    assert set(rows["generator"]) == {"echo"} and len(rows) == 2
    assert sorted(text[-8:] for text in rows["response"]) == ["# for t0", "# for t1"]
    with pytest.raises(UsageError, match="'dict' is no subclass of tasks.synthesis.sampler"):
        make_sampler(SynthesisConfig(sampler="dict"), "")


PAGE = Path(__file__).parents[2] / "docs/how-to/extend.md"


def blocks():
    """The files of the page, by name."""
    found = re.findall(r'```\w+ title="([^"]+)"\n(.*?)\n```', PAGE.read_text(), re.DOTALL)
    return dict(found)


def test_the_examples_of_the_page_work(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tomllib.loads(blocks()["pyproject.toml"])
    groups = package["project"]["entry-points"]
    modules = {place.partition(":")[0] for entries in groups.values() for place in entries.values()}
    assert set(package["tool"]["setuptools"]["py-modules"]) == modules
    for group, entries in groups.items():
        for name, place in entries.items():
            module = place.partition(":")[0]
            install(tmp_path, module, blocks()[f"{module}.py"], group, {name: place})
    config = TasksConfig(source="one_shape", options={"widths": [8, 16]})
    assert [task.task_id for task in load_tasks(config)] == ["relu/8", "relu/16"]
    asked = {"model": "m", "base_url": "http://127.0.0.1:1/v1"}
    sampler = make_sampler(SynthesisConfig(sampler="polite", **asked), "")
    assert sampler.generator == "m" and "colleague" in sampler.prompt(None, "a prompt")
    change = load_extension("concur.search_operators", "double", FunctionType)
    code, words = change("TILE = 16", "cuda", Random(0), {})
    assert (code, words) == ("TILE = 32", "TILE 16 -> 32")
    assert change("x = 1", "cuda", Random(0), {}) is None
