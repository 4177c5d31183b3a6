"""Push published folders to the Hugging Face hub, with the revision as a tag.

Guarantees: nothing is sent from changed folders, twice, or to public repositories unless asked; the
token is in no message, log or record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.records import Record
from tasks.publishing.config import DATA, PUBLICATION, README
from tasks.publishing.publish import Published, is_whole, read_publication

TOKEN_ENV = "HF_TOKEN"
CONTENT = (f"{DATA}/*", README, PUBLICATION)
"""What a publication may hold. Other files of the repository (a `.gitattributes`) stay."""


class Pushed(Record):
    """A push's destination. `sent` is False where the revision was there."""

    repo_id: str
    tag: str
    url: str
    private: bool
    sent: bool


def push_to_hub(folder: Path, repo_id: str, *, private: bool = True) -> Pushed:
    """Upload a published folder as data set `repo_id` ("owner/name") and tag the commit with its
    revision.

    Raises UsageError for a foreign or changed folder, without a token in $HF_TOKEN, where the hub
    refuses, or for a public repository with `private`; EvalError where the hub does not answer.
    """
    published = read_publication(folder)
    if not is_whole(folder, published):
        raise UsageError(
            f"files of {folder} have changed since they were published",
            "publish into another folder and push that",
        )
    token = os.environ.get(TOKEN_ENV, "").strip()
    if not token:
        raise UsageError(
            f"there is no token for the hub in {TOKEN_ENV}",
            f"export {TOKEN_ENV}=... a token that may write to {repo_id}",
        )
    with _answers(repo_id, token):
        api = _api(token)
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        is_private = bool(api.repo_info(repo_id, repo_type="dataset").private)
        if private and not is_private:
            raise UsageError(
                f"{repo_id} is public",
                "push with --public if that is meant, or name another repository",
            )
        url = f"{api.endpoint}/datasets/{repo_id}/tree/{published.tag}"
        there = published.tag in {
            ref.name for ref in api.list_repo_refs(repo_id, repo_type="dataset").tags
        }
        if not there:
            _send(api, folder, repo_id, published)
    return Pushed(repo_id=repo_id, tag=published.tag, url=url, private=is_private, sent=not there)


def _send(api: Any, folder: Path, repo_id: str, published: Published) -> None:
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        repo_type="dataset",
        commit_message=published.tag,
        allow_patterns=[PUBLICATION, *published.files],
        delete_patterns=list(CONTENT),
    )
    api.create_tag(
        repo_id,
        tag=published.tag,
        tag_message=f"curated {published.curated}",
        revision=commit.oid,
        repo_type="dataset",
        exist_ok=True,
    )


def _api(token: str) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=token)


@contextmanager
def _answers(repo_id: str, token: str) -> Iterator[None]:
    """Turn hub and network errors into UsageError or EvalError, without the token."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except (HFValidationError, OfflineModeIsEnabled, HfHubHTTPError, HTTPError, OSError) as error:
        cause = cause_of(error).replace(token, "***")
        if isinstance(error, HFValidationError):
            problem = f"{repo_id!r} is no repository of the hub: {cause}"
            raise UsageError(problem, "name it owner/name") from None
        if isinstance(error, OfflineModeIsEnabled):
            raise UsageError("the hub is switched off here", "unset HF_HUB_OFFLINE") from None
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            problem = f"the hub refuses {repo_id} ({status}): {cause}"
            raise UsageError(problem, "use a token that may write to it") from None
        raise EvalError(
            f"the hub does not answer for {repo_id}: {cause}",
            "check the network; the same push again adds what is missing",
        ) from None
