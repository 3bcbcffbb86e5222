"""Checks whether the Hugging Face Hub can be reached: without a network, that must not take a minute."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from drawbar.errors import UserError, nearest
from drawbar.runtime.log import logger, told_while_waiting

TIMEOUT_SECONDS = 5.0


def hub_answers(name: str, kind: Literal["model", "dataset"] = "model") -> bool:
    """Ask the Hub for a repository, once. Without a network, its own library would retry for most of a minute.

    Raises:
        UserError: the Hub does not know the name, or the name is invalid.
    """
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_SECONDS)
    except HFValidationError as error:
        raise UserError(
            f"{name} is neither a folder on this machine nor a valid name on the Hugging Face Hub",
            remedy=f"{meant_folder(name)}check the path, which is relative to the folder {Path.cwd()}",
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{name} is neither a folder on this machine nor a repository on the Hugging Face Hub that you may read",
            remedy=f"{meant_folder(name)}check the spelling; for a private or gated one, log in with `hf auth login`",
        ) from error
    except HfHubHTTPError:
        return True  # it answered, albeit with an error: the loader may retry
    except Exception as error:  # noqa: BLE001 — the type depends on the HTTP library that huggingface_hub uses
        logger.info("the Hugging Face Hub cannot be reached (%s): using the local cache", error)
        return False
    return True


def fetching(name: str, online: bool) -> AbstractContextManager[None]:
    """Context for code that may fetch files for minutes without a progress bar: logs that it is waiting for them."""
    return told_while_waiting(f"{name} from the Hugging Face Hub", after=2.0) if online else nullcontext()


def meant_folder(name: str) -> str:
    """``did you mean ./tiny-llama? Else ``, to begin a remedy with; empty if no folder there has a similar name."""
    path = Path(name)
    try:
        folders = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:  # usually `team` of team/model
        return ""
    guess = nearest(path.name, folders, cutoff=0.8)
    if guess is None:
        return ""
    folder = path.parent / guess
    return f"did you mean {folder if path.is_absolute() else f'./{folder}'}? Else "
