"""What changes libraries after they are linked: found by name, kept apart by key, and refused as a
failed build."""

import re
from pathlib import Path

import pytest

from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.transforms import BuildTransform
from kernels_eval.config import BuildConfig, EvalConfig
from kernels_eval.errors import UsageError
from kernels_eval.judge.prepare import confined_builder
from kernels_eval.records import Reason, stable_hash
from kernels_eval.source.spec import ExtensionSpec
from tests.support.installed import install

PAGE = Path(__file__).parents[2] / "docs/how-to/extend.md"
SPEC = ExtensionSpec(
    name="scale_ext",
    cpp_sources=("at::Tensor scale(at::Tensor x) { return x.mul(2); }",),
    functions=("scale",),
)


def refuses(library, spec, tool):
    raise UsageError("there is nothing to swap")


def fails(library, spec, tool):
    tool(["/bin/sh", "-c", "echo the tool fails >&2; exit 3"])


def appends(library, spec, tool):
    with library.open("ab") as file:
        file.write(tool(["echo", spec.name]).encode())


def built(change, version=1):
    transforms = {change.__name__: BuildTransform(change, version)}
    return Builder(BuildConfig(), transforms=transforms).build(SPEC)


def test_the_example_of_the_page_changes_the_library(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (code,) = re.findall(r'title="stripped.py"\n(.*?)\n```', PAGE.read_text(), re.DOTALL)
    install(
        tmp_path, "stripped", code, "concur.build_transforms", {"stripped": "stripped:STRIPPED"}
    )
    config = EvalConfig.model_validate({"build": {"transforms": ["stripped"]}})
    plain = confined_builder(EvalConfig()).build(SPEC)
    stripped = confined_builder(config).build(SPEC)
    assert plain.ok and stripped.ok, stripped.log
    assert Path(stripped.path).stat().st_size < Path(plain.path).stat().st_size
    assert confined_builder(config).build(SPEC).cached
    assert stable_hash(config.model_dump()) != stable_hash(EvalConfig().model_dump())


def test_a_library_is_changed_once_for_each_version():
    first, second = built(appends), built(appends, version=2)
    assert first.path != second.path and built(appends).path == first.path
    assert Path(first.path).read_bytes().endswith(b"scale_ext\n")


@pytest.mark.parametrize(
    "change, said", [(refuses, "there is nothing to swap"), (fails, "the tool fails")]
)
def test_what_cannot_be_changed_is_a_failed_build(change, said, monkeypatch):
    monkeypatch.setattr(Builder, "is_certain", lambda *_: True)  # no second build, a minute each
    build = built(change)
    assert (build.ok, build.reason) == (False, Reason.BUILD_FAILED)
    assert said in build.log


def test_an_unknown_name_is_refused_by_the_configuration():
    with pytest.raises(UsageError, match="no build transform 'absent'"):
        BuildConfig(transforms=("absent",))
