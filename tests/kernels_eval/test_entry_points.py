"""Extensions are found by name, and one that cannot be used says what to do."""

from types import FunctionType

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.extensions import known_names, load_extension, require_known
from tasks.sources.config import BUILT_IN, GROUP, TasksConfig
from tasks.sources.stage import load_tasks
from tests.support.installed import install

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
