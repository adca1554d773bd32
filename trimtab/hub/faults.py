"""Converts errors of the hub and the network to trimtab's errors with a remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from huggingface_hub import errors as hf

from trimtab.facts.errors import HubError, ResourceError, TrimtabError

_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@contextlib.contextmanager
def translated_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Convert errors of huggingface_hub and the network to `HubError`."""
    try:
        yield
    except (TrimtabError, hf.OfflineModeIsEnabled):  # the caller handles offline mode
        raise
    # hf.HTTPError is the base class of the HTTP library that huggingface_hub uses.
    except (hf.HTTPError, hf.EntryNotFoundError, hf.HFValidationError, OSError) as error:
        raise explain(error, repo_id, revision) from error


def explain(error: Exception, repo_id: str, revision: str | None) -> TrimtabError:
    """The error for the user, with its remedy."""
    if isinstance(error, hf.HFValidationError):
        return HubError(f"{repo_id!r} is not a hub id", "write it as owner/name, or name a local path")
    if isinstance(error, hf.GatedRepoError):
        return HubError(f"{repo_id} is gated", f"accept its conditions on its page on the hub, then {_LOGIN}")
    if isinstance(error, hf.RevisionNotFoundError):
        return HubError(f"{repo_id} has no revision {revision!r}", "name a branch, a tag or a commit of it")
    if isinstance(error, hf.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return explain(error.__cause__, repo_id, revision)
    if isinstance(error, hf.HfHubHTTPError) and error.response is not None:
        return _explain_status(error, error.response.status_code, repo_id)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"no space left while downloading {repo_id}",
            "free some space, or set HF_HUB_CACHE to another disk",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return ResourceError(
            f"the hub's cache cannot be written ({error})", "set HF_HUB_CACHE to a writable folder"
        )
    reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return HubError(
        f"the hub could not be reached for {repo_id} ({reason[0][:160]})",
        "check the network, name a local folder, or work offline with HF_HUB_OFFLINE=1 if it was downloaded before",
    )


def _explain_status(error: hf.HfHubHTTPError, status: int, repo_id: str) -> HubError:
    if isinstance(error, hf.RepositoryNotFoundError):
        return HubError(
            f"{repo_id} is not on the hub, or it is private and no token with access to it was given",
            f"check the id; for a private one {_LOGIN}",
        )
    if isinstance(error, hf.DisabledRepoError):
        return HubError(f"{repo_id} was disabled on the hub", "use another model or dataset")
    if status == 401:
        return HubError(f"the hub refused the token for {repo_id}", _LOGIN)
    if status == 403:
        return HubError(
            f"the token may not read {repo_id}", "ask its owner for access, or set HF_TOKEN to another token"
        )
    if status == 404:
        return HubError(f"a file of {repo_id} is not on the hub", "check the id and the revision")
    if status == 429:
        return HubError(
            "the hub refuses further requests for now (status 429)",
            f"wait a few minutes; for a higher limit, {_LOGIN}",
        )
    return HubError(f"the hub returned status {status} for {repo_id}", "try again later")
