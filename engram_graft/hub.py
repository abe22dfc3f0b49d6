"""Grafts on the Hugging Face hub: a directory pushed there, a directory there opened by its name. Nothing from a hub is ever run."""

import contextlib
import fnmatch
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engram_graft.bases import hub_options
from engram_graft.errors import UserError, first_line
from engram_graft.files import read_graft
from engram_graft.integrity import CODE_FILE, CONFIG_FILE

# what a reader needs; a merged directory's code goes there for those who trust it, and is never fetched from there
FILES = ["*.safetensors", "*.json", "*.md", "*.yaml", "*.jinja", "*.txt", "*.html"]
NESTED = ["*/*"]  # checkpoints, a merged directory inside a run's: none of a reader's business
_WEIGHTS = [
    "*.safetensors",
    "*.index.json",
    "adapter_config.json",
    CODE_FILE,
]  # what would be read although it is of an older push
_HTTPError: Any = HfHubHTTPError.__bases__[0]  # of whichever HTTP library huggingface_hub uses


def push_to_hub(directory: str | Path, repo_id: str, private: bool = True, revision: str | None = None) -> dict[str, Any]:
    """Put a graft directory, or a merged one, on the hub as `repo_id` ("user/name"), which is made if it is not there.

    The files are read and checked first. Weights in the repository that are no longer in the directory are removed from it.

    Args:
        private: of a repository that is made. One that is public already is refused unless this is false.
        revision: a branch, made if it is not there; by default the main one.

    Returns:
        {"url" of the commit, "repo_id", "private", "files": names pushed, "removed": names removed}.

    Raises:
        UserError: the directory is damaged or no graft; no token, no network, no right to write there.
    """
    path = Path(directory)
    read_graft(path)
    files = sorted(child.name for child in path.iterdir() if child.is_file() and _matches(child.name, [*FILES, CODE_FILE]))
    api = HfApi()
    with _explained(f"{repo_id!r} could not be pushed to"):
        made = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        is_private = bool(api.repo_info(made).private)
        if private and not is_private:
            raise UserError(f"{made} is a public repository: to push there give private=False (--public), or choose another name")
        if revision is not None:
            api.create_branch(made, branch=revision, exist_ok=True)
        there = api.list_repo_files(made, revision=revision)
        removed = sorted(name for name in there if "/" not in name and _matches(name, _WEIGHTS) and name not in files)
        commit = api.upload_folder(
            repo_id=made,
            folder_path=path,
            revision=revision,
            commit_message=f"Engram graft: {path.resolve().name}",
            allow_patterns=[glob.escape(name) for name in files],
            ignore_patterns=NESTED,
            delete_patterns=[glob.escape(name) for name in removed] or None,
        )
    return {"url": commit.commit_url, "repo_id": made, "private": is_private, "files": files, "removed": removed}


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """Where a graft is: a directory here as it is, "user/name" downloaded, without any code.

    Raises:
        UserError: the hub has no graft of this name, or cannot be reached and the local cache has none.
    """
    name = str(source)
    if not on_hub(name):
        if revision is not None:
            raise UserError(f"revision={revision!r}: {name} is a directory here, only what is on the hub has revisions")
        return Path(source)
    with _explained(f"{name}: no such directory here, and the hub did not give a graft of this name"):
        try:
            hf_hub_download(name, CONFIG_FILE, revision=revision, **hub_options())  # before gigabytes of something else
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError as error:
            raise UserError(f"{name}: no graft on the hub ({CONFIG_FILE} is missing there); name one that push wrote") from error
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=NESTED, **hub_options()))


def find(source: str | Path) -> Path | None:
    """As `resolve`, but None for what is no graft, here or on the hub: it may be a base."""
    if on_hub(source):
        try:
            hf_hub_download(str(source), CONFIG_FILE, **hub_options())
        except (EntryNotFoundError, _HTTPError, OSError, ValueError):
            return None
        return resolve(source)
    return Path(source) if (Path(source) / CONFIG_FILE).is_file() else None


def on_hub(source: str | Path) -> bool:
    """Whether this can only be the name of a repository: "user/name", and no file or directory here."""
    return re.fullmatch(r"[\w.-]*\w/[\w.-]+", str(source)) is not None and not Path(source).exists()


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """What huggingface_hub raises, in one line with the next step."""
    try:
        yield
    except UserError:
        raise
    except (_HTTPError, OSError, ValueError) as error:
        said = first_line(error).partition(" To enable hf.co")[0]  # the rest advises an option that is not ours
        raise UserError(f"{what} ({said}); {_next_step(error)}") from error


def _next_step(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error  # why the cache had to be asked
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "log in (hf auth login), or set HF_TOKEN"
    if isinstance(error, GatedRepoError) or status == 403:
        return "use a token that may do this (hf auth login), or ask the repository's owner"
    if isinstance(error, RevisionNotFoundError):
        return "give a branch, tag or commit that is there"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return "check the name; a private repository needs hf auth login"
    if isinstance(error, HFValidationError):
        return 'give a name like "user/name"'
    if status is not None:
        return "try again later"
    if isinstance(error, LocalEntryNotFoundError):
        return "check the name and the network; the local cache has no copy"
    return "check the network"
