"""A language is one object: what is stored of it, and one more of a package that the verifier has
never seen (the one of docs/how-to/extend.md)."""

import copy
import os
import pickle
import re
import tomllib
from importlib import invalidate_caches
from pathlib import Path

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.evaluator import Evaluator
from kernels_eval.languages import BUILT_IN, GROUP, Language, languages_of, registered
from kernels_eval.records import Candidate, Reason, stable_hash
from tasks.synthesis.prompts import EXAMPLE_TASK, render
from tests.support.installed import install
from tests.support.kernels import QUICK, kernel_task

PAGE = Path(__file__).parents[2] / "docs/how-to/extend.md"
TASK = kernel_task(EXAMPLE_TASK.replace("512, 2048", "33, 64").replace("[2048]", "[64]"), "bias")


def blocks(title):
    (found,) = re.findall(rf'```\w+ title="{title}"\n(.*?)\n```', PAGE.read_text(), re.DOTALL)
    return found


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that this process, and the verifier's, import from."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    registered.cache_clear()
    invalidate_caches()
    yield folder
    registered.cache_clear()


@pytest.fixture
def plain_c(site):
    project = tomllib.loads(blocks("pyproject.toml"))["project"]
    install(site, "plain_c", blocks("plain_c.py"), GROUP, project["entry-points"][GROUP])
    return Language("plain_c")


def candidate(code, language):
    return Candidate(
        candidate_id=stable_hash(code),
        task_id=TASK.task_id,
        language=language,
        generator="test",
        code=code,
    )


def test_the_names_that_snapshots_hold_are_the_languages():
    assert list(Language) == list(BUILT_IN)
    for name in BUILT_IN:
        language = Language(name)
        assert language is Language(name) and language == name and f"{language}" == name
        assert pickle.loads(pickle.dumps(language)) is copy.deepcopy(language) is language
        read = candidate("x = 1", name)
        assert read.language is language
        assert read.model_dump()["language"] is language
        assert type(read.model_dump(mode="json")["language"]) is str
        assert Candidate.model_validate_json(read.model_dump_json()) == read
    with pytest.raises(ValueError, match="no language 'rust': languages are cuda, triton"):
        candidate("x = 1", "rust")


def test_one_more_language_is_known_everywhere(plain_c):
    assert list(Language) == [*BUILT_IN, "plain_c"]
    assert languages_of(plain_c.example) == (plain_c,)
    prompt = render(TASK, plain_c)
    assert plain_c.means in prompt and plain_c.example in prompt
    assert plain_c.doctor() == "needs no package"
    assert Candidate.model_json_schema()["properties"]["language"]["enum"][-1] == "plain_c"


def test_a_language_that_cannot_be_imported_is_named(site):
    install(site, "broken", "import nothing_of_that_name", GROUP, {"broken": "broken:LANGUAGE"})
    assert Language("cpp") == "cpp"
    with pytest.raises(UsageError, match="'broken' of concur-broken cannot be used: No module"):
        list(Language)


RIGHT_TAIL = "x, self.bias, residual, out, x.numel() // features, features)"


@pytest.mark.slow
def test_kernels_of_another_package_s_language_are_judged(plain_c, tmp_path):
    right = plain_c.example
    assert right.count(RIGHT_TAIL) == 1
    idle = right.replace(f"kernels.bias_relu_add({RIGHT_TAIL}", "pass")
    by_torch = "return torch.relu(x + self.bias) + residual"
    sources = {
        right: Reason.OK,
        right.replace(" + residual[i];", " - residual[i];"): Reason.WRONG_OUTPUT,
        right.replace("float v = x[i]", "float v = y[i]"): Reason.BUILD_FAILED,
        idle.replace("return out", by_torch): Reason.NO_CUSTOM_KERNEL,
        right.replace("return out", by_torch): Reason.NO_CUSTOM_KERNEL,
    }
    assert len(sources) == 5
    with Evaluator(plain_c, QUICK, cache=tmp_path) as verify:
        for code, reason in sources.items():
            verdict = verify(TASK, candidate(code, "plain_c"))
            assert verdict.reason is reason, verdict
            if code is right:
                assert verdict.timing and verdict.custom_kernels == ("bias_relu_add",)
                assert verdict.custom_kernel_time_share > 0
            if reason is Reason.BUILD_FAILED:
                assert "CompileError" in verdict.detail and "error:" in verdict.detail


@pytest.mark.slow
def test_what_was_compiled_outlives_its_process_for_the_same_source_alone(
    plain_c, tmp_path, monkeypatch
):
    right = plain_c.example
    with Evaluator(plain_c, QUICK, cache=tmp_path / "cache") as verify:
        assert verify(TASK, candidate(right, "plain_c")).reason is Reason.OK
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "cc").write_text("#!/bin/sh\necho no compiler: error >&2\nexit 1\n")
    (tools / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    with Evaluator(plain_c, QUICK, cache=tmp_path / "cache") as verify:
        assert verify(TASK, candidate(right, "plain_c")).reason is Reason.OK
        other = candidate(right.replace("bias_relu_add", "another_name"), "plain_c")
        assert verify(TASK, other).reason is not Reason.OK
