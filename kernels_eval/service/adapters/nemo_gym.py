"""NeMo Gym 0.4: a resources server whose /verify judges the response's text.

`verifier_metadata` of a row of data names the task. There is no missing reward in its answer, so a
fault of machine or task is answered with 503: the rollout fails, and nothing learns from it.
"""

from __future__ import annotations

from fastapi import HTTPException
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)

from kernels_eval.service.adapters.scoring import NoRewardError, shared_scorer


class KernelServerConfig(BaseResourcesServerConfig):
    recipe: str = "concur"
    url: str | None = None


class KernelVerifyRequest(BaseVerifyRequest):
    verifier_metadata: dict[str, object]


class KernelVerifyResponse(BaseVerifyResponse):
    correct: float
    rejected: float
    speedup: float


class KernelResourcesServer(SimpleResourcesServer):
    """Run it with `KernelResourcesServer.run_webserver()` in the server's app.py."""

    config: KernelServerConfig

    async def verify(self, body: KernelVerifyRequest) -> KernelVerifyResponse:
        scorer = shared_scorer(self.config.recipe, self.config.url)
        score = await scorer.score(body.verifier_metadata, body.response.output_text)
        try:
            earned = score.earned()
        except NoRewardError as error:
            raise HTTPException(503, str(error)) from error
        given = body.model_dump(exclude={"verifier_metadata"})
        return KernelVerifyResponse(**given, reward=earned, **score.facts)
