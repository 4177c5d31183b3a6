"""MLflow's pages after one ablation and no refresh, in a real browser: charts of its branches."""

import pytest

from tasks.tracking.config import page_of
from tasks.tracking.connection import SCORES, TITLES, Destination
from tasks.tracking.mlflow_sink import AblationSink
from tasks.tracking.records import RunRecord
from tests.support.browser import chromium
from tests.support.servers import mlflow_server

pytestmark = pytest.mark.browser
EXEC = {"concur": 0.25, "random": 0.125}


def record(name, **facts):
    return RunRecord(run_fingerprint=f"f-{name}", name=name, tags={"profile": "own"}, **facts)


def test_an_ablation_opens_on_a_chart_of_its_branches(tmp_path):
    with mlflow_server(tmp_path / "mlflow") as server, chromium(tmp_path / "shots") as browser:
        sinks = {}
        for other in ("earlier", "this"):
            sink = sinks[other] = AblationSink(Destination(server.url, "", "concur"))
            sink.open(record(f"{other}-ablation"))
            for strategy, value in EXEC.items():
                name = f"{other}-{strategy}-seed0"
                metrics = {"exec_at_1": value, "curated_rows": 3.0}
                sink.child(name, record(name, params={"strategy": strategy}, metrics=metrics))
        page = browser.page
        for view, others in ((sinks["this"].run_id, False), (SCORES, True)):
            page.goto("about:blank")
            page.goto(page_of(server.url, sinks["this"].experiment_id, "runs", view))
            page.locator(".js-plotly-plot").first.wait_for()
            chart = page.get_by_text(TITLES["exec_at_1"], exact=True).last
            assert chart.is_visible()
            text = page.inner_text("main")
            drawn = text[text.index("side by side") : text.index("Model metrics")]
            assert all(f"this-{strategy}-seed0" in drawn for strategy in EXEC)
            assert ("earlier-random-seed0" in drawn) is others
            assert "No charts" not in drawn
            browser.shot(view)
        assert (browser.page_errors, browser.outside) == ([], [])
