"""The server of pages: what of a root it shows, to whom; and the links to it."""

import pytest
from starlette.testclient import TestClient

from flows.artifacts import linked
from flows.ops.pages import site
from flows.ops.places import ROOT_VARIABLE

LOGIN = "somebody:Passwort-1-2-3"
HERE = "http://127.0.0.1:4290"
SHOWN = ("trend.html", "view/index.html", "view/data/index.js", "curation/1a/composition.png")
HIDDEN = ("mlflow.db", "stack/logs/worker.log", "profiles/mine.yaml", "stack/ray-token", "view")


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = tmp_path / "root"
    for name in (*SHOWN, *HIDDEN[:-1]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"of {name}")
    (tmp_path / "outside.html").write_text("outside")
    (root / "away.html").symlink_to(tmp_path / "outside.html")
    monkeypatch.setenv(ROOT_VARIABLE, str(root))
    monkeypatch.setenv("CONCUR_PAGES_HOSTS", "127.0.0.1,gpu1.example.org")
    monkeypatch.delenv("CONCUR_PAGES_LOGIN", raising=False)
    return root


def test_pages_and_what_they_are_made_of_are_shown_and_nothing_else(root):
    client = TestClient(site(), base_url=HERE)
    for name in SHOWN:
        assert client.get(f"/{name}").text == f"of {name}"
    for name in (*HIDDEN, "", "away.html", "%2e%2e/outside.html", "nowhere.html"):
        assert client.get(f"/{name}").status_code == 404, name
    assert client.get("/health").text == "OK"


@pytest.mark.parametrize("host, status", [("gpu1.example.org", 200), ("evil.example", 400)])
def test_only_requests_that_name_this_machine_are_answered(root, host, status):
    client = TestClient(site(), base_url=f"http://{host}:4290")
    assert client.get("/trend.html").status_code == status


def test_a_stack_with_a_password_asks_for_it(root, monkeypatch):
    monkeypatch.setenv("CONCUR_PAGES_LOGIN", LOGIN)
    client = TestClient(site(), base_url=HERE)
    assert client.get("/health").status_code == 200
    for given in (None, ("somebody", "wrong"), ("somebody", "")):
        refused = client.get("/trend.html", auth=given)
        assert (refused.status_code, "of trend" in refused.text) == (401, False)
        assert refused.headers["www-authenticate"].startswith("Basic")
    assert client.get("/trend.html", auth=tuple(LOGIN.split(":"))).text == "of trend.html"


def test_a_link_is_one_only_where_the_page_is_served(root, monkeypatch):
    page = root / "a b" / "page.html"
    monkeypatch.delenv("CONCUR_PAGES_URL", raising=False)
    assert linked("Trend", page) == f"Trend: `{page}`"
    monkeypatch.setenv("CONCUR_PAGES_URL", HERE)
    monkeypatch.setenv("CONCUR_ROOT", str(root))
    assert linked("Trend", page) == f"[Trend]({HERE}/a%20b/page.html)"
    assert linked("Trend", str(page)) == linked("Trend", page)
    assert linked("Trend", "/elsewhere/page.html") == "Trend: `/elsewhere/page.html`"
