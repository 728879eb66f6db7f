"""Download what serving needs of a repository into huggingface_hub's cache, and find it there.

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE and resumes an interrupted
download. A file whose contents do not have the hash that the hub lists is refused and removed. No
file of a repository is executed.
"""

from __future__ import annotations

import errno
import glob
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from motet_shared.errors import ConfigError

from .progress import Report, progress_bar
from .reference import HubReference
from .retry import retried
from .selection import select_files

_CHUNK = 1 << 20  # bytes hashed at a time
_SHA256, _SHA1 = 64, 40  # hexadecimal digits
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def find_cached(reference: HubReference) -> Path | None:
    """Return the folder (or GGUF file) of a completely downloaded model, else None.

    Makes no connection.
    """
    try:
        paths = _cached_paths(reference, reference.revision)
        folder = _snapshot(reference, paths, local_files_only=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None
    return _served_path(reference, folder)


def pull(reference: HubReference, report: Report | None = None) -> Path:
    """Download the files that serving needs, and return the folder (or GGUF file).

    Cached files are not downloaded again. `report` is called with the progress; without it
    huggingface_hub draws bars. Raises ConfigError with the reason and the remedy if the
    repository cannot be read, contains nothing to serve, or arrives damaged.
    """
    with explained(reference):
        paths = retried(lambda: _list_files(reference))
        known = find_cached(reference)
        folder = retried(lambda: _snapshot(reference, paths, report, local_files_only=False))
        if known is None:
            _verify(reference, folder)
    return _served_path(reference, folder)


def remove(reference: HubReference) -> int:
    """Delete a repository's files from the cache; return the number of freed bytes.

    Without a revision all revisions are deleted. Raises ConfigError if none is cached.
    """
    repositories = [repo for repo in _repositories() if repo.repo_id == reference.repository]
    commits = [
        revision.commit_hash
        for repo in repositories
        for revision in repo.revisions
        if reference.revision in (None, revision.commit_hash, *revision.refs)
    ]
    if not commits:
        raise ConfigError(f"{reference}: is not in the cache; `motet models` lists cached models")
    strategy = hub.scan_cache_dir().delete_revisions(*commits)
    strategy.execute()
    return strategy.expected_freed_size


def cached_models() -> list[tuple[str, int]]:
    """Return name and bytes of each model repository in the cache, sorted by name."""
    return sorted((repo.repo_id, repo.size_on_disk) for repo in _repositories())


def fetch_config(reference: HubReference) -> Path:
    """Return the folder of the repository's config.json, downloading only that file if needed."""
    with explained(reference):
        path = retried(
            lambda: hub.hf_hub_download(
                reference.repository, "config.json", revision=reference.revision
            )
        )
    return Path(path).parent


def _repositories() -> list[hub.CachedRepoInfo]:
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.CacheNotFound:
        return []
    return [repo for repo in repositories if repo.repo_type == "model"]


def _list_files(reference: HubReference) -> list[str]:
    """Return the paths of the files at the reference's commit; offline, from the cached list."""
    api = hub.HfApi()
    revision = api.resolve_revision(reference.repository, revision=reference.revision)
    try:
        return _cached_paths(reference, revision.resolved)
    except CachedRepoTreeNotFoundError:
        entries = api.list_repo_tree(
            reference.repository, recursive=True, revision=revision.resolved
        )
        return [entry.path for entry in entries if isinstance(entry, hub.RepoFile)]


def _cached_paths(reference: HubReference, revision: str | None) -> list[str]:
    """Return the cached list of a commit's paths. Raises CachedRepoTreeNotFoundError."""
    tree = hub.get_cached_repo_tree(reference.repository, revision=revision)
    return [entry.path for entry in tree]


def _snapshot(
    reference: HubReference,
    paths: list[str],
    report: Report | None = None,
    *,
    local_files_only: bool,
) -> Path:
    chosen = select_files(reference, paths)
    folder = hub.snapshot_download(
        reference.repository,
        revision=reference.revision,
        allow_patterns=[glob.escape(path) for path in chosen],
        local_files_only=local_files_only,
        tqdm_class=None if report is None else progress_bar(report),
    )
    return Path(folder)


def _served_path(reference: HubReference, folder: Path) -> Path:
    return folder / reference.file if reference.file else folder


def _verify(reference: HubReference, folder: Path) -> None:
    """Compare the files in `folder` with their ETags, which are their hashes and blob names.

    Removes a file that differs from the cache and raises ConfigError.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = path.resolve()
        if _has_hash(blob, blob.name):
            continue
        blob.unlink()
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"{reference}: {path.relative_to(folder)} does not have the hash that the hub lists and is"
            " removed from the cache; pull again, and if that fails too, report it to the repository"
        )


def _has_hash(blob: Path, expected: str) -> bool:
    """Compare with SHA-256 (files in LFS) or git's blob hash, by the length of `expected`.

    Returns True for an ETag of another length, which cannot be compared.
    """
    if len(expected) == _SHA256:
        digest = hashlib.sha256()
    elif len(expected) == _SHA1:
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size)
    else:
        return True
    with blob.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == expected


@contextmanager
def explained(reference: HubReference) -> Iterator[None]:
    """Convert errors of the hub, the network and the disk to ConfigErrors with a remedy."""
    try:
        yield
    except GatedRepoError:
        raise ConfigError(
            f"{reference}: access is restricted; accept the conditions on the model's page, and set"
            " HF_TOKEN to a token of that account"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError(
            f"{reference}: the repository has no revision {reference.revision!r}; give a branch,"
            " a tag or a commit of it"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{reference}: the hub has no such repository, or HF_TOKEN may not read it;"
            " check the spelling of org/name"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        remedy = "too many requests: wait, or set HF_TOKEN" if status == 429 else "try again later"
        raise ConfigError(f"{reference}: the hub answered with status {status}; {remedy}") from None
    except (LocalEntryNotFoundError, RevisionResolutionError):
        raise ConfigError(
            f"{reference}: not in the cache, and the hub cannot be reached (HF_ENDPOINT,"
            " HF_HUB_OFFLINE); connect, or give a checkpoint folder"
        ) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ConfigError(
            f"{reference}: the disk of the cache is full; free space, or set HF_HOME to a folder"
            " on another disk; finished files are kept"
        ) from None
