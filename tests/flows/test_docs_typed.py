"""Commands of the pages that take minutes, typed as they stand into a clone that the pages' own
lines installed, and what they print: first verdicts, packages, verdicts of others, an
endpoint, the whole pipeline, ablations, the service, the servers, a cluster. What needs a device
or a service that a laptop lacks is typed, too, and must name it."""

import json
import re
import shutil
from urllib.error import HTTPError

import polars as pl
import pytest
import yaml

from flows.stack.layout import Layout
from kernels_eval.service.client import VerifierClient
from kernels_eval.service.schema import State
from tasks.store.lookup import newest_first
from tests.flows.test_exchange import write_trace_set
from tests.kernels_eval.test_service_real import until_healthy
from tests.support import chat_server
from tests.support.commands import ROOT
from tests.support.doc_commands import fences
from tests.support.night import ENDED, PrefectClient, request_json
from tests.support.reader import Reader, cloned, give_ports, write_what_pages_say
from tests.support.servers import two_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
TYPED = yaml.safe_load((ROOT / "tests/data/doc_commands.yaml").read_text(encoding="utf-8"))
SLOW, REFUSED = TYPED["slow"], TYPED["refused"]
WRONG = "import torch\nclass ModelNew(torch.nn.Module):\n    forward = lambda self, x: x\n"
RELU = '''import torch
from torch.utils.cpp_extension import load_inline

SOURCE = """
torch::Tensor scaled(torch::Tensor x, double scale) {
    auto out = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) {
        const float value = x.data_ptr<float>()[i];
        out.data_ptr<float>()[i] = (value > 0 ? value : 0) * scale;
    }
    return out;
}
"""
extension = load_inline("scaled", cpp_sources=SOURCE, functions=["scaled"])


class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return extension.scaled(x, self.scale)
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A reader in a clone that the first pages installed and upgraded."""
    with cloned(tmp_path_factory.mktemp("pages")) as reader:
        origin = reader.folder.parent / "origin"
        (origin / "CHANGELOG.md").write_text((origin / "CHANGELOG.md").read_text() + "- More.\n")
        reader.type("git -C ../origin commit -qam more")
        reader.type_all(SLOW["install"])
        reader.ports = give_ports(reader)
        write_what_pages_say(reader.folder)
        yield reader


@pytest.fixture
def clone(installed):
    """A new shell in that clone."""
    return Reader(installed.folder, dict(installed.variables))


@pytest.fixture
def beside(clone, tmp_path):
    """The reader in a folder of their own, with two tasks."""
    (tmp_path / "here").mkdir()
    reader = clone.beside(tmp_path / "here")
    softmax = clone.folder / "tasks/sources/bundled/tasks/softmax_rows.py"
    for name in ("task.py", "mytasks/softmax.py"):
        shutil.copy(softmax, reader.folder / name)
    return reader


def of_page(name):
    return [fence for fence in fences() if fence.page == ROOT / name]


def form(text):
    """Without figures, and without flags, which a busy machine raises."""
    masked = re.sub(r"cached|[\d.]+(?:e[+-]\d+)?(?: s)?", "N", text)
    return [line for line in masked.splitlines() if not line.startswith("  flag ")]


@pytest.mark.parametrize(("name", "least"), [("README.md", 2.0), ("docs/tutorial.md", 0.0)])
def test_the_first_verdict_is_what_the_page_shows(beside, name, least):
    page = of_page(name)
    (example,) = (fence.text for fence in page if fence.title == "candidate.py")
    (shown,) = (fence.text for fence in page if fence.text.startswith("correct (ok)"))
    (lines,) = (fence.text for fence in page if "verify task.py candidate.py" in fence.text)
    (beside.folder / "candidate.py").write_text(example)
    (beside.folder / "tasks").symlink_to(ROOT / "tasks")
    *_, printed = [beside.type(line) for line in lines.splitlines()]
    assert SLOW["first"][lines.splitlines()[-1]] in " ".join(printed.split())
    verdict = printed[printed.index("correct (ok)") :]
    assert form(verdict) == form(shown)
    assert float(re.search(r"speedup ([\d.]+)", verdict)[1]) >= least


def test_kernels_of_a_table_become_packages(beside):
    folder = beside.folder
    (example,) = (each.text for each in of_page("docs/tutorial.md") if each.title == "candidate.py")
    (folder / "candidate.py").write_text(example)
    right = {"candidate_id": "softmax", "task_id": "user/softmax", "code": example}
    wrong = {"candidate_id": "relu", "task_id": "user/scaled_relu", "code": WRONG}
    pl.DataFrame([right, wrong]).write_parquet(folder / "candidates.parquet")
    pl.DataFrame([right]).write_parquet(folder / "answers.parquet")
    for text, said in SLOW["kernels"].items():
        for out in ("softmax-kernel", *(["verified"] if "TASKS" in text else [])):
            shutil.rmtree(folder / out, ignore_errors=True)
        beside.type_all({text: said}, TASKS="mytasks")
        if "package" in text:
            (certificate,) = folder.glob("softmax-kernel/build/*/certificate.json")
            assert json.loads(certificate.read_text())["verdict"]["status"] == "correct"
    (row,) = pl.read_parquet(folder / "verified/verdicts.parquet").to_dicts()
    assert row["timing"]["compiled"]


def test_solutions_of_another_suite(beside):
    write_trace_set(beside.folder / "flashinfer-trace")
    beside.type_all(SLOW["suites"])
    traces = beside.folder.glob("traces/traces/**/*.jsonl")
    told = [json.loads(line) for path in traces for line in path.read_text().splitlines()]
    found = sorted(each["evaluation"]["status"] for each in told)
    assert found == ["INCORRECT_NUMERICAL", "PASSED"]
    assert list(beside.folder.glob("problems/**/definition.json"))


def test_own_tasks_and_an_endpoint_become_a_training_set(beside):
    reasoning = "Each element is its own: one loop, which takes the larger of it and zero."
    answer = chat_server.completion(f"```python\n{RELU}```", reasoning_content=reasoning)
    (beside.folder / "mytasks/softmax.py").unlink()
    profile = beside.folder / "mine.yaml"
    with chat_server.serving(lambda number, body: (200, answer)) as server:
        profile.write_text(profile.read_text().replace("http://127.0.0.1:8000/v1", server.url))
        (beside.folder / ".concur-endpoint").symlink_to(".concur-mine")
        beside.type_all(SLOW["endpoint"])
    (curated,) = newest_first(str(beside.folder / ".concur-mine"), "curation")
    assert curated.manifest["rows"] == 1


def test_the_service_answers_as_its_page_says(beside, installed):
    port = str(installed.ports[-1])
    url = f"http://127.0.0.1:{port}"
    for text, said in SLOW["services"].items():
        if "--host" in text:
            beside.type_all({"export CONCUR_SERVE_TOKEN=$(openssl rand -hex 32)": ""})
        token = beside.variables.get("CONCUR_SERVE_TOKEN")
        client = VerifierClient(url, token=token, timeout_s=500)
        with beside.running(text.replace("8700", port)):
            assert until_healthy(client)["tasks"] == (2 if "mytasks" in text else 0)
            assert said.replace("PORT", port) in (beside.folder / "server.log").read_text()
            if "--port" in text:
                ask_as_the_page_does(beside, client, port)
            if token:
                with pytest.raises(HTTPError, match="401"):
                    request_json(f"{url}/v1/tasks")


def ask_as_the_page_does(reader, client, port):
    for text, said in SLOW["requests"].items():
        printed = reader.type(text.replace("8700", port))
        assert said in printed
        (asked,) = json.loads(printed[printed.index("{") :])["evaluations"]
        answered = client.result(asked["id"], 60)
        assert answered.state is State.DONE and answered.verdict.task_id == "user/softmax"


def test_the_servers_from_up_to_down(clone):
    layout = Layout(clone.folder / ".concur")
    clone.type_all(SLOW["start"])
    prefect = PrefectClient(clone.variables["PREFECT_API_URL"])
    clone.type_all(SLOW["deploy"])
    declared = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    deployed = {each["name"] for each in prefect.ask("deployments/filter", {})}
    assert deployed == {each["name"] for each in declared}

    (run,) = prefect.ask("flow_runs/filter", {})
    ended = until(lambda: ended_state(prefect, run["id"]), "the end of the run", 1800, every_s=1)
    assert ended["type"] == "COMPLETED", ended
    assert len(prefect.artifacts("morning-report")) == 1
    clone.type_all(SLOW["after_a_run"])

    nightly = "deployments/name/nightly%20refresh/nightly"
    (schedule,) = prefect.ask(nightly)["schedules"]
    assert not schedule["active"]
    clone.type_all(SLOW["schedule"], SCHEDULE_ID=schedule["id"])
    assert prefect.ask(nightly)["schedules"][0]["active"]

    tell = clone.folder / "deployments/automations/tell.yaml"
    zeros = "00000000-0000-0000-0000-000000000000"
    block = notification_block(prefect)
    tell.write_text(tell.read_text(encoding="utf-8").replace(zeros, block), encoding="utf-8")
    clone.type_all(SLOW["automations"])
    acts = [act for each in prefect.ask("automations/filter", {}) for act in each["actions"]]
    assert [act["block_document_id"] for act in acts if "block_document_id" in act] == 3 * [block]

    clone.type_all(SLOW["down"])
    assert not layout.processes() and not layout.sockets.exists()


def notification_block(prefect):
    """The id of a webhook, as a person makes one in the UI."""
    kind = prefect.ask("block_types/slug/webhook")
    body = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}}
    schema = prefect.ask("block_schemas/filter", body)[0]
    body = {
        "name": "tell",
        "block_type_id": kind["id"],
        "block_schema_id": schema["id"],
        "data": {"url": "http://127.0.0.1:9/"},
    }
    return prefect.ask("block_documents/", body)["id"]


def ended_state(prefect, run):
    state = prefect.state(run)
    return state if state["type"] in ENDED else None


def write_tables(folder):
    """Tasks and candidates of a table, and those of an imported set."""
    (folder / "drkernel").mkdir()
    task = {"task_id": "user/softmax", "name": "softmax", "code": (folder / "task.py").read_text()}
    answer = {"candidate_id": "relu", "task_id": "user/softmax", "code": WRONG}
    for place, language in ((folder, "cuda"), (folder / "drkernel", "triton")):
        answers = "candidates" if place == folder else "answers"
        pl.DataFrame([task]).write_parquet(place / "tasks.parquet")
        pl.DataFrame([answer | {"language": language}]).write_parquet(place / f"{answers}.parquet")


def test_a_cluster(beside):
    write_tables(beside.folder)
    port = str(two_ports())
    beside.type("export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef")
    beside.type_all(SLOW["cluster"], **{"10.0.0.5": "127.0.0.1", "6379": port})
    listed = beside.type(f"RAY_ADDRESS=127.0.0.1:{port} .venv/bin/ray status")
    assert listed.count("1 node_") == 2
    beside.refuse_all(REFUSED["cluster"])


def test_the_whole_pipeline_and_what_pages_do_with_its_outcome(clone):
    root = clone.folder / ".concur"
    try:
        clone.type_all(SLOW["pipeline"])
        curated = newest_first(str(root), "curation")[0].ref.fingerprint
        for text, said in SLOW["adapter"].items():
            clone.type_all({text: said}, **{"3f0c2a": curated[:6]})
            shutil.rmtree(clone.folder / "merged-model", ignore_errors=True)
        clone.refuse_all(REFUSED["adapter"])
        clone.type_all(SLOW["ablations"])
    finally:
        shutil.rmtree(root)


def test_dry_runs_of_the_tests(clone):
    clone.type("export MAKEFLAGS=-n PYTEST_ADDOPTS=--markers")
    clone.type_all(SLOW["dry"])


def test_what_needs_a_gpu_says_so(beside):
    write_tables(beside.folder)
    beside.refuse_all(REFUSED["gpu"])


def test_what_needs_a_package_index(clone, tmp_path):
    stamp = clone.folder / ".venv/.installed"
    stamp.unlink()
    del clone.variables["PIP_NO_BUILD_ISOLATION"]
    try:
        clone.refuse_all(REFUSED["index"], **{"/opt": str(tmp_path)})
    finally:
        stamp.touch()


def test_what_needs_vllm(beside):
    if shutil.which("vllm"):
        pytest.skip("vLLM is here: tests/tasks/test_vllm.py parses these commands")
    beside.refuse_all(REFUSED["vllm"])


@pytest.mark.parametrize("program", ["docker", "docker compose", "kubectl", "systemctl"])
def test_what_needs_a_service_is_understood_by_its_program(clone, tmp_path, program):
    """A program refuses words that it does not know before it looks for its service."""
    if not shutil.which(program.split()[0]):
        pytest.skip(f"needs {program}")
    clone.type(f"export HOME={tmp_path}")
    if program == "docker compose":
        clone = with_secrets(clone)
    if program == "systemctl":
        for text in (text for text in TYPED["shell"] if ".config/systemd" in text):
            clone.type(text)
    clone.refuse_all(REFUSED[program], REGISTRY="registry.example.org")


def with_secrets(clone):
    """The reader in the folder of compose, whose secrets are filled in."""
    reader = Reader(clone.folder / "deployments/compose", clone.variables)
    if "Docker Compose" not in reader.type("docker compose version || true"):
        pytest.skip("needs docker's compose plugin")
    secrets = (reader.folder / ".env.example").read_text(encoding="utf-8")
    (reader.folder / ".env").write_text(secrets.replace("=\n", "=letters-and-more\n"))
    return reader
