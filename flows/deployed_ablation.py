"""The deployment `ablations`: a form in, `flows.ablation.flow.ablate` inside."""

from __future__ import annotations

from prefect import flow

from flows import forms
from flows.ablation.flow import AblationResult, ablate
from flows.ablation.plan import AblationConfig
from flows.artifacts import link_mlflow
from flows.deployments import devices, prepared
from flows.forms import configuration, setting
from flows.naming import deployed_name
from flows.runtime.notices import NOTICES


@flow(name="weekly ablations", flow_run_name=deployed_name("compare strategies of"), **NOTICES)
def weekly_ablations(
    run: forms.RunForm = forms.ABLATION_RUN,
    sweep: forms.AblationForm = forms.ABLATION,
    advanced: forms.AdvancedForm = forms.ADVANCED,
) -> AblationResult:
    """Every strategy with every seed is curated, trained and benchmarked on the same samples, and
    compared."""
    config = prepared(configuration(run, advanced))
    asked = AblationConfig(
        profile=str(run.profile),
        overrides=(*run.settings(), *advanced.settings(), setting("root", config.root)),
        strategies=tuple(str(name) for name in sweep.strategies),
        sizes=(sweep.size or None,),
        seeds=tuple(range(sweep.seeds)),
        max_gpu_hours=sweep.max_gpu_hours or None,
    )
    with devices(config, None):
        result = ablate(asked)
    link_mlflow(config, result.mlflow_run, "comparison.html" if result.comparison else None)
    return result
