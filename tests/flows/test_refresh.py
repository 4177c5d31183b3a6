"""What follows the training set in a refresh can be missing, and the refresh is finished all the
same: with a real Prefect."""

from pathlib import Path

import pytest

from flows.config import PipelineConfig
from tasks.curation import stage
from tasks.curation.config import CurationConfig
from tasks.tables import KERNEL_PROFILES
from tests.support.planted import planted
from tests.support.samples import finished, line_of, sample

pytestmark = pytest.mark.slow  # a Prefect server


def test_the_analysis_is_shown_and_its_failure_is_a_caution(prefect_home, tmp_path):
    from prefect import flow
    from prefect.artifacts import Artifact

    from flows.refresh import analysed
    from tasks.reporting.text import as_text
    from tasks.samples import Samples

    refs = planted(tmp_path, 100)
    samples = Samples(tasks=refs[0], verdicts=refs[0], candidates=refs[1])
    asked = flow(lambda: analysed(samples), name="analyse")

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


def test_sets_that_are_curated_again_know_the_profiles_of_the_first(prefect_home, tmp_path):
    from prefect import flow

    from flows.training_sets import make_training_sets

    line = line_of(tmp_path, [sample("a", 0, 10, 2.0), sample("b", 0, 10, 2.0)])
    profile = {"candidate_id": "a-0", "cause": "uncoalesced", "rewrote_bottleneck": True}
    empty = {"numbers": [], "operators": [], "kernels": [], "reference_operators": []}
    profiles = finished(tmp_path, "kernel-profiles", [empty | profile], KERNEL_PROFILES, "k")
    stage.run(line.model_copy(update={"profiles": profiles}), CurationConfig())

    config = PipelineConfig.model_validate(
        {"root": str(tmp_path), "curation": {"require_rewritten_bottleneck": True}}
    )
    again = flow(
        lambda: make_training_sets(config, None, ["min_length"], None), name="curate again"
    )
    (made,) = again()
    rows = made.open().read()
    assert rows.select("candidate_id", "bottleneck").rows() == [("a-0", "uncoalesced")]
