"""The documentation: the site builds without a broken link, the reference is complete, and every
command in it is typed.

A command of a page is in exactly one class: typed here as it stands, alone or after others (RUN,
TABLES, TURNS, FILLED, OPTIONS, SHELL), or in a clone by tests/flows/test_docs_typed.py: SLOW, or
REFUSED where a laptop lacks a device or a service, which the refusal names. All are parsed as far
as can be: unknown commands, options, keys, targets, markers and files are failures.
"""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import polars as pl
import pytest
import typer
import yaml
from click.testing import CliRunner

from flows.cli.main import main
from flows.config import PipelineConfig, load_profile
from flows.morning.history import entered
from kernels_eval.source.syntax import parse_source
from tasks.store import SnapshotRef
from tests.support import commands as support
from tests.support.browser import chromium
from tests.support.curated import line, sample
from tests.support.doc_commands import (
    PAGES,
    ROOT,
    Command,
    UsageError,
    check,
    commands,
    fences,
    parse_concur,
)
from tests.support.hub_server import FakeHub
from tests.support.reader import write_what_pages_say
from tests.support.samples import frame
from tests.support.samples import sample as verified

CONCUR = ".venv/bin/concur "
TYPED = yaml.safe_load((ROOT / "tests/data/doc_commands.yaml").read_text(encoding="utf-8"))
RUN, TABLES, TURNS = TYPED["run"], TYPED["tables"], TYPED["turns"]
FILLED, OPTIONS, SHELL = (TYPED[name] for name in ("filled", "options", "shell"))
LINE, SLOW, REFUSED = TYPED["line"], TYPED["slow"], TYPED["refused"]
HERE = RUN | TABLES
GROUPS = [HERE, FILLED, OPTIONS, SHELL, LINE, *TURNS, *SLOW.values(), *REFUSED.values()]
TYPED_HERE = {text for group in GROUPS for text in group}
ALL = list(commands())
PROGRAM = """class Model:
    name = {!r}
def get_inputs(): return []
def get_init_inputs(): return []
"""


def is_typed(command):
    # they read snapshots: typed after the refresh
    return command.text in TYPED_HERE or command.text.startswith(".venv/bin/python -c")


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_every_command_is_typed(command):
    assert is_typed(command), f"{command.text!r}: say in {[*TYPED]} what becomes of it"
    check(command)


def test_nothing_is_typed_that_no_page_says():
    said = {command.text for command in ALL}
    assert said >= TYPED_HERE, TYPED_HERE - said
    assert len(said) > 60


def test_what_is_refused_succeeds_in_no_other_place():
    refused = {text for group in REFUSED.values() for text in group}
    succeeding = {text for group in GROUPS if group not in REFUSED.values() for text in group}
    assert refused and not refused & succeeding


def test_what_is_wrong_is_seen():
    """The check itself: each of these would be a broken page."""
    for words in (
        ["run", "--profil", "local"],
        ["runn"],
        ["verify", "task.py"],
        ["curate", "--size"],
        ["verify-batch", "c.parquet"],
    ):
        with pytest.raises(UsageError):
            parse_concur(words)
    for words, key in (
        (["run", "--set", "verification.worker=2"], "verification.workers"),
        (["run", "--profile", "lokal"], "local"),
    ):
        with pytest.raises(Exception, match=key):
            parse_concur(words)
    for text in (
        "make tset",
        ".venv/bin/python -m pytest -m gpus",
        ".venv/bin/python -m benchmarks.tritonbench --operator x",
    ):
        with pytest.raises(AssertionError):
            check(Command("here", text, text.split()))


def test_commands_named_in_passing_have_the_options_they_are_named_with():
    seen = 0
    for page in {fence.page for fence in fences()}:
        text = page.read_text(encoding="utf-8")
        for span in re.findall(r"`(?:\.venv/bin/)?concur ([a-z][\w-]*[^`\n]*)`", text):
            name, *words = span.split()
            if name == "line":  # the flow `concur line`, as Prefect shows it
                continue
            assert name in main.commands, f"{page.name}: concur {name}"
            known = {option for found in main.commands[name].params for option in found.opts}
            named = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert named <= known | {"--help"}, f"{page.name}: concur {span}"
            seen += 1
    assert seen > 20


def node_of_adapter(node):
    found = getattr(node, "module", None) or ""
    return found.startswith("kernels_eval.service.adapters.")


@pytest.mark.parametrize(
    "fence",
    [fence for fence in fences() if fence.language in ("yaml", "python")],
    ids=lambda fence: fence.place,
)
def test_snippets_are_what_they_look_like(fence, tmp_path):
    if fence.language == "python":
        for node in ast.walk(parse_source(fence.text)):
            package = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0]
            if node_of_adapter(node):
                continue  # over a trainer: run by tests/kernels_eval/test_reward_pages.py
            if package in ("kernels_eval", "tasks", "flows"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        return
    documents = list(yaml.safe_load_all(fence.text))
    keys = set(documents[0]) if isinstance(documents[0], dict) else set()
    if 2 * len(keys & set(PipelineConfig.model_fields)) > len(
        keys
    ):  # a profile, or part of one; others are of other tools
        (tmp_path / "mine.yaml").write_text(fence.text, encoding="utf-8")
        load_profile(str(tmp_path / "mine.yaml"))


# -- commands that are typed -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory as a reader has it after a refresh, with the files that the pages tell to
    write."""
    place = tmp_path_factory.mktemp("reader")
    samples = [
        sample(f"t/{task}", index, 50 + 40 * index, 1.0 + task + index, parent=None)
        for task in range(6)
        for index in range(3)
    ]
    samples.append(sample("t/0", 9, 5, None))
    programs = {each["task"]: PROGRAM.format(each["task"]) for each in samples}
    curated = line(place / ".concur", samples, programs=programs)
    snapshots = {"curated": curated}
    stages = {"candidates": "synthesis", "tasks": "tasks", "verdicts": "verification"}
    for name, stage in stages.items():
        (folder,) = (place / ".concur" / stage).iterdir()
        ref = SnapshotRef(root=curated.root, stage=stage, fingerprint=folder.name)
        ref.open().read().write_parquet(place / f"{name}.parquet")
        snapshots[name] = ref
    with entered(curated.root, "local", "cpp", "concur") as entry:
        entry.ends("finished", snapshots=snapshots)
    rows = [
        verified(f"t{task}", index, 100, 0.5 + index) for task in range(4) for index in range(2)
    ]
    (place / "verified").mkdir()
    frame(*rows).write_parquet(place / "verified" / "verdicts.parquet")
    frame(*rows).select("candidate_id", "task_id", "generator", "sample_index").write_parquet(
        place / "answers.parquet"
    )
    write_records_of_others(place)
    write_what_pages_say(place)
    return place


def write_records_of_others(place):
    """A run of KernelBench, verdicts of two GPUs, and tables to import."""
    run = place / "runs" / "qwq"
    run.mkdir(parents=True)
    entry = {"sample_id": 0, "compiled": True, "correctness": True, "metadata": {}, "runtime": 1.0}
    (run / "eval_results.json").write_text(json.dumps({"3": [{**entry, "ref_runtime": 2.0}]}))
    (run / "level_1_problem_3_sample_0_kernel.py").touch()  # judged without a worker
    problem = {"level": 1, "problem_id": 3, "name": "3_x", "code": PROGRAM.format("3")}
    pl.DataFrame([problem]).write_parquet(place / "kernelbench.parquet")
    (run / "generation_config.yaml").write_text("model_name: Qwen/QwQ-32B\n")
    for name, device in {"on-a100": "NVIDIA A100", "on-h100": "NVIDIA H100 80GB HBM3"}.items():
        rows = [
            verified(f"t{task}", 0, 100, 2.0 + task)
            | {"device": device, "verdict_key": f"{device}{task}", "reason": "ok", "code": "x = 1"}
            for task in range(2)
        ]
        (place / name).mkdir()
        pl.DataFrame(rows).write_parquet(place / name / "verdicts.parquet")
    program = PROGRAM.format("imported")
    answer = "```python\nclass ModelNew:\n    pass\n```"
    asked = {"role": "user", "content": f"```python\n{program}```"}
    chat = [asked, {"role": "assistant", "content": answer}]
    row = {"uuid": 1, "entry_point": "Model", "original_python_code": program, "messages": chat}
    rounds = {"num_rounds": 1, "final_speedup": 1.5, "best_round": 1}
    pl.DataFrame([row | rounds]).write_parquet(place / "drkernel-coldstart-8k.parquet")
    row = {"prompt": program, "output": answer, "generator": "m", "is_hack": 0}
    (place / "table.jsonl").write_text(json.dumps(row) + "\n")


def typed(words):
    """What `concur` prints, which must succeed."""
    done = CliRunner().invoke(main, shlex.split(words))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A copy of that directory, in which the test runs."""
    shutil.copytree(place, tmp_path / "reader")
    monkeypatch.chdir(tmp_path / "reader")
    return tmp_path / "reader"


@pytest.mark.parametrize(
    "text",
    # test_cli has a doctor, who takes seconds
    [pytest.param(text, marks=[pytest.mark.slow] * ("concur doctor" in text)) for text in HERE],
)
def test_a_command_does_what_its_page_says(text, here, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert HERE[text] in typed(text.removeprefix(CONCUR)).replace("\n", " ")
    assert len(opened) == ("--open" in text)


@pytest.mark.parametrize("turn", TURNS, ids=lambda turn: next(iter(turn)))
def test_commands_that_read_what_the_one_before_wrote(turn, here, monkeypatch):
    pushed = FakeHub()
    monkeypatch.setattr("tasks.publishing.hub._api", lambda token: pushed)
    monkeypatch.setenv("HF_TOKEN", "of-no-hub")
    for text, said in turn.items():
        assert said in typed(text.removeprefix(CONCUR)).replace("\n", " ")
        if "--out" in text:
            assert Path(re.search(r"--out (\S+)", text)[1]).exists()
    assert ("you/kernels" in pushed.repos) == ("--push" in text)


def test_placeholders_can_be_filled_in(here):
    typed("publish --out kernels")
    for text, values in FILLED.items():
        for name, value in values.items():
            text = text.replace(name, value)
        assert values["said"] in typed(text.removeprefix(CONCUR)).replace("\n", " ")


@pytest.mark.parametrize("text", OPTIONS)
def test_options_that_a_page_lists_are_taken_from_the_command_line(text):
    assert OPTIONS[text] in " ".join(typed(f"config show --profile paper {text}").split())


def test_what_pages_tell_to_type_into_a_shell(here):
    for name in ("tasks/sources/bundled/tasks", "deployments"):
        shutil.copytree(ROOT / name, here / name)
    script = "".join(f"{text}\n{check} || exit 1\n" for text, check in SHELL.items())
    env = {"HOME": str(here / "home"), "PATH": os.environ["PATH"]}
    words = ["bash", "-ex", "-c", script]
    done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_is_there(name):
    assert typed(f"{name} --help").startswith(f"Usage: concur {name}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_line_of_the_pages_in_one_directory(tmp_path):
    """A real refresh, then every command that works on what it leaves, typed into a shell as it
    stands."""
    write_what_pages_say(tmp_path)
    small = f'test "$1" = run && set -- "$@" {TYPED["small"]}'
    shims = {
        # -P: modules in this directory are no libraries for the installed command either
        "concur": f'{small}; exec {sys.executable} -P -m flows.cli "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    (tmp_path / ".concur-endpoint").symlink_to(".concur")  # no endpoint answers here
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, script in shims.items():
        (tmp_path / ".venv" / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    code = (ROOT / "tasks/sources/bundled/tasks/softmax_rows.py").read_text(encoding="utf-8")
    (tmp_path / "task.py").write_text(code)
    answer = (
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n       "
        " return x\n"
    )
    pl.DataFrame({"task_id": ["user/scaled_relu"], "code": [answer]}).write_parquet(
        tmp_path / "candidates.parquet"
    )
    readers = dict.fromkeys(
        command.text for command in ALL if is_typed(command) and command.text not in TYPED_HERE
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["BROWSER"] = "true"  # the program of that name
    for text in [*LINE, *readers, *RUN]:
        with (tmp_path / "log").open("wb") as log:
            shell = subprocess.Popen(
                ["bash", "-c", text],
                cwd=tmp_path,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            status = shell.wait(timeout=900)
        finally:
            with suppress(ProcessLookupError):  # it left nothing behind
                os.killpg(shell.pid, signal.SIGKILL)
        assert status == 0, (text, (tmp_path / "log").read_text(errors="replace")[-3000:])


# -- the site --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    built = tmp_path_factory.mktemp("site")
    words = [sys.executable, str(ROOT / "docs/hooks/build.py"), str(built / "site")]
    done = support.run(words, support.environment())
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return built / "site"


@pytest.mark.parametrize(
    "text, told",
    [
        ("[x](nowhere.md)", "page does not exist"),
        pytest.param("[x](index.md#nowhere)", "anchor does not exist", marks=pytest.mark.slow),
        pytest.param("::: kernels_eval.nothing", "kernels_eval.nothing", marks=pytest.mark.slow),
    ],
)
def test_a_link_an_anchor_or_a_reference_that_leads_nowhere_ends_the_build(text, told, tmp_path):
    """The check of the site's strictness: our configuration, with one page."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Page\n\n{text}\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config = {key: config[key] for key in ("site_name", "strict", "plugins")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and told in done.stdout + done.stderr


def test_the_site_builds_strictly_and_holds_every_page(site):
    for page in ROOT.glob("docs/**/*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page
    for name in ("cli", "configuration", "profiles", "tables"):
        assert (site / "reference" / f"{name}.html").is_file()


@pytest.mark.parametrize("place, form", [("mkdocs.yml", ": {}\n"), ("docs/index.md", "]({})")])
def test_navigation_and_index_name_every_page(place, form):
    text = (ROOT / place).read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/*/**/*.md")]
    pages += hook("reference").pages()
    assert [page for page in pages if form.format(page) not in text] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT], ids=lambda page: page.name
)
def test_links_of_pages_outside_of_the_site_lead_somewhere(page):
    links = hook("repository").links(page.name, page.read_text(encoding="utf-8"))
    found = [target for _, target, _ in links]
    assert found and [target for target in found if not (ROOT / target).exists()] == []


def test_links_lead_to_files_of_a_clone_in_which_no_site_was_built():
    """What is generated has a page that says how to read it there."""
    tracked = support.run(["git", "ls-files"], support.environment()).stdout.split("\n")
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            found = os.path.relpath((page.parent / target).resolve(), ROOT)
            if not any(name == found or name.startswith(f"{found}/") for name in tracked):
                dead.append((page.name, target))
    assert dead == []


def test_the_site_asks_nothing_of_another_machine(site):
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(https?:[^\"> ]+)", text)
        kinds = "stylesheet|icon|preconnect|preload"
        link = rf"<link\b[^>]*\brel=\"?(?:{kinds})[^>]*\bhref=\"?(https?:[^\"> ]+)"
        loaded += re.findall(link, text)
        loaded += re.findall(r"(?:@import|url\()\s*[\"']?(https?:[^\"') ]+)", text)
        assert not loaded, (page, loaded)


def test_the_reference_names_every_command_option_and_key(site):
    cli = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        assert f"concur {name}<" in cli, name
        for option in (
            found for found in command.params if isinstance(found, typer.core.TyperOption)
        ):
            assert f"<code>{option.opts[0]}</code>" in cli, (name, option.opts)
    keys = (site / "reference" / "configuration.html").read_text(encoding="utf-8")

    def names(model, found):
        for name, field in model.model_fields.items():
            found.add(name)
            if hasattr(field.annotation, "model_fields"):
                names(field.annotation, found)
        return found

    missing = {name for name in names(PipelineConfig, set()) if f"<code>{name}</code>" not in keys}
    assert not missing


def test_every_column_has_its_meaning_and_no_meaning_is_left_over():
    """The build itself raises for a column without one; this asks for the other direction, and that
    a nameless key is refused."""
    reference = hook("reference")
    for stage, (_, schema, said) in reference.tables().items():
        assert set(reference.columns_of(schema)) == set(said), stage
    assert sum(len(keys) for _, _, keys in reference.sections()) > 150


def test_a_key_without_a_description_is_refused(monkeypatch):
    reference = hook("reference")
    schema = PipelineConfig.model_json_schema()
    del schema["properties"]["root"]["description"]
    monkeypatch.setattr(PipelineConfig, "model_json_schema", lambda: schema)
    with pytest.raises(reference.Undescribed, match="root"):
        list(reference.sections())


def hook(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs/hooks")  # as the build runs: a script in this folder
        return importlib.import_module(name)


@pytest.mark.browser
def test_the_site_read_from_the_disk_in_a_browser(site, tmp_path):
    """No request leaves, nothing is wider than the screen, and search finds."""
    pages = ("index", "how-to/verify-a-table", "reference/cli", "reference/configuration")
    with chromium(tmp_path) as browser:
        page = browser.page
        for width in (1200, 400):
            page.set_viewport_size({"width": width, "height": 900})
            for name in pages:
                page.goto((site / f"{name}.html").as_uri())
                page.wait_for_load_state("networkidle")
                wide = "document.documentElement.scrollWidth <= innerWidth"
                assert page.evaluate(wide), (name, width)
        page.set_viewport_size({"width": 1200, "height": 900})
        page.goto((site / "index.html").as_uri())
        page.wait_for_load_state("networkidle")
        page.click(".md-search__button")
        page.keyboard.type("speedup interval")
        page.get_by_text(re.compile(r"^[1-9]\d* results?$")).wait_for()
        assert browser.outside == []
