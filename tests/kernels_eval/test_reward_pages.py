"""The pages on rewards: their examples run, against the trainer or its protocol, and their table of
recipes is that of the code."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import kernels_eval
from kernels_eval.rewards import RECIPES, discounted, recipe_of, reward
from kernels_eval.service.adapters.scoring import shared_scorer
from tests.support.recorded_service import recorded_service, verdict_of
from tests.support.trainer_protocols import provide_verifiers

PAGES = Path(kernels_eval.__file__).parents[1] / "docs" / "how-to" / "rewards"
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(page):
    """(language, title, text) of each fence of a page."""
    return FENCE.findall((PAGES / page).read_text(encoding="utf-8"))


def example(page, title=None):
    found = [
        text for kind, name, text in fences(page) if kind == "python" and title in (None, name)
    ]
    return found[0]


@pytest.fixture
def service(monkeypatch, tmp_path):
    with recorded_service() as running:
        monkeypatch.setenv("CONCUR_SERVE_URL", running.url)
        monkeypatch.chdir(tmp_path)
        shared_scorer.cache_clear()
        (tmp_path / "answer.md").write_text("fast")
        yield running


def run(text, page, monkeypatch, **names):
    """Run an example as a module; adapters over a protocol are forgotten afterwards."""
    adapters = "kernels_eval.service.adapters."
    for name in [name for name in sys.modules if name.startswith(adapters)]:
        if name != f"{adapters}scoring":
            monkeypatch.delitem(sys.modules, name)
    space = {"__name__": "example", **names}
    exec(compile(text, page, "exec"), space)
    for name in [name for name in sys.modules if name.startswith(adapters)]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return space


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_examples_are_short(page):
    found = [text for kind, _, text in fences(page) if kind == "python"]
    assert found
    assert all(text.count("\n") <= 25 for text in found)


def test_the_table_names_every_recipe_and_its_numbers():
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert set(rows) == set(RECIPES)
    for name, recipe in RECIPES.items():
        numbers = [n for n in recipe.model_dump().values() if isinstance(n, float)]
        said = [abs(float(n)) for n in re.findall(r"\d+(?:\.\d+)?", rows[name])]
        neutral = {0.0, 1.0}
        missing = [n for n in numbers if abs(n) not in {*said, *neutral} and 1 + n not in said]
        assert not missing, f"{name}: {missing}"


def test_the_first_example_gives_returns(monkeypatch):
    verdicts = [verdict_of(0.5), verdict_of(2.0), verdict_of("reference_failed"), verdict_of(2.0)]
    space = run(example("index.md"), "index.md", monkeypatch, verdicts=verdicts)
    assert space["rewards"] == pytest.approx([0.8, 2.3, None, 2.3])
    assert space["returns"] == [None, None, None, pytest.approx(2.3)]
    assert space["returns"] == discounted(space["rewards"], 0.4)


def test_the_recipe_of_the_page_loads(tmp_path):
    ((_, title, text),) = [fence for fence in fences("index.md") if fence[0] == "yaml"]
    (tmp_path / title).write_text(text)
    recipe = recipe_of(tmp_path / title)
    assert recipe == recipe_of(yaml.safe_load(text))
    assert reward(verdict_of("harness_tampering"), recipe) == -3.0


def test_verls_example_prints_a_score(service, monkeypatch, capsys):
    run(example("verl.md"), "verl.md", monkeypatch)
    assert capsys.readouterr().out.split() == ["2.3", "2.0"]
    assert service.requests[0].language == "cpp"
    said = " ".join(text for kind, _, text in fences("verl.md") if kind == "text")
    module = run(example("verl.md"), "verl.md", monkeypatch)
    assert "name=compute_score" in said
    assert callable(module["compute_score"])


def test_verifiers_example_reads_the_row_of_its_page(service, monkeypatch, capsys, tmp_path):
    provide_verifiers(monkeypatch)
    (row,) = [text for kind, _, text in fences("verifiers.md") if kind == "json"]
    (tmp_path / "tasks.jsonl").write_text(row)
    run(example("verifiers.md", "kernels.py"), "verifiers.md", monkeypatch)
    assert capsys.readouterr().out == "level1/1 Write a C++ kernel for ...\n"


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(), ("fault",)])
def test_trls_example_trains_one_step(service, monkeypatch, tmp_path, faults):
    """With a tiny model, whose answers hold no code. Where a machine fails for every second
    answer, the reward that TRL logs is the mean of the others."""
    pytest.importorskip("trl")
    from tests.support.training import tiny_model

    model = str(tiny_model(tmp_path / "model"))
    service.outcomes = ["slow", *faults]
    text = example("trl.md").replace("Qwen/Qwen3-0.6B", model)
    text = text.replace('report_to="none"', 'report_to="none", use_cpu=True, logging_steps=1')
    text = text.replace('Scorer("concur")', 'Scorer("kevin")')
    space = run(text, "trl.md", monkeypatch)
    logged = space["trainer"].state.log_history[0]
    assert len(service.requests) == 4
    assert {request.task_id for request in service.requests} == {"level1/1"}
    assert logged["reward"] == pytest.approx(0.8)
    assert logged["correct"] == pytest.approx(0.5 if faults else 1.0)
