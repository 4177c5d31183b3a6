"""Commands of the pages that take minutes, typed as they stand into a clone that the pages' own
lines installed, and what they print: first verdicts, the servers, a cluster's head."""

import re
import shutil

import pytest
import yaml

from flows.stack.layout import Layout
from tests.support.commands import ROOT
from tests.support.doc_commands import fences
from tests.support.night import ENDED, PrefectClient
from tests.support.reader import cloned, give_ports, write_what_pages_say
from tests.support.servers import two_ports
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]
TYPED = yaml.safe_load((ROOT / "tests/data/doc_commands.yaml").read_text(encoding="utf-8"))
SLOW = TYPED["slow"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
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

    clone.type_all(SLOW["automations"])

    clone.type_all(SLOW["down"])
    assert not layout.processes() and not layout.sockets.exists()


def ended_state(prefect, run):
    state = prefect.state(run)
    return state if state["type"] in ENDED else None


def test_the_head_of_a_cluster(beside):
    port = str(two_ports())
    beside.type("export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=0123456789abcdef0123456789abcdef")
    beside.type_all(SLOW["cluster"], **{"6379": port})
    assert "1 node_" in beside.type(f"RAY_ADDRESS=127.0.0.1:{port} .venv/bin/ray status")
