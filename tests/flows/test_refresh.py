"""What follows the training set in a refresh can be missing, and the refresh is finished all the
same: with a real Prefect."""

from pathlib import Path

import pytest

from flows.config import PipelineConfig
from tests.support.planted import QUICK, planted

pytestmark = pytest.mark.slow  # a Prefect server


def test_the_analysis_is_shown_and_its_failure_is_a_caution(prefect_home, tmp_path):
    from prefect import flow
    from prefect.artifacts import Artifact

    from flows.refresh import Samples, analysed
    from tasks.reporting.text import as_text

    config = PipelineConfig(root=str(tmp_path), analysis=QUICK)
    refs = planted(tmp_path, 100)
    samples = Samples(tasks=refs[0], verdicts=refs[0], candidates=refs[1])
    asked = flow(lambda: analysed(config.analysis, samples), name="analyse")

    analysis, cautions = asked()
    assert analysis is not None and cautions == ()
    shown = Artifact.get("observations")
    assert (
        shown is not None and str(Path(analysis.open().path) / "page" / "report.md") in shown.data
    )
    assert analysis.open().manifest["finding"][0].split(";")[0][:40] in shown.data

    (part,) = refs[1].open().parts()
    Path(part).write_bytes(
        b"PAR1 no longer a table PAR1"
    )  # a disk that forgets: neither unusable input nor a fault that we know
    (Path(analysis.open().path) / "manifest.json").unlink()
    analysis, cautions = asked()
    assert (
        analysis is None
        and len(cautions) == 1
        and "observations of this refresh are missing" in cautions[0]
    )
    shown = Artifact.get("observations")
    assert shown is not None and shown.data == as_text(cautions[0])  # as text, not as markup
