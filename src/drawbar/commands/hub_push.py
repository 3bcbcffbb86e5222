"""Upload an exported folder to the Hugging Face Hub."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from drawbar.errors import ExitCode, UserError
from drawbar.runtime.hub import TIMEOUT_SECONDS


@dataclass(frozen=True)
class Push:
    """Where an exported folder is uploaded to."""

    name: str
    """``OWNER/NAME`` of a model repository, which is created if it does not exist."""
    public: bool = False
    """Whether a repository that is created is public; one that exists stays as it is."""

    def check(self) -> None:
        """Raises UserError where the name cannot be one, or nobody is logged in; the Hub is not asked."""
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise _wrong_name(self.name) from error
        if self.name.count("/") != 1:
            raise _wrong_name(self.name)
        if get_token() is None:
            raise UserError(
                "there is no token of the Hugging Face Hub to upload with",
                where="--push",
                remedy="log in by `hf auth login`, or set the variable HF_TOKEN; or leave out --push",
            )

    def upload(self, folder: Path, message: str) -> str:
        """Upload all files of the folder as one commit; return the address of the repository.

        Raises:
            UserError: the Hub cannot be reached, or refuses.
        """
        api = HfApi()
        try:
            # first a request with a time limit, which the next two have not: it fails if the Hub cannot be reached. An
            # HTTP error is an answer, too: the repository may not exist yet.
            with suppress(HfHubHTTPError):
                api.repo_info(self.name, timeout=TIMEOUT_SECONDS)
            address = api.create_repo(self.name, private=not self.public, exist_ok=True)
            api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except Exception as error:  # the type depends on the HTTP library that huggingface_hub uses
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"{self.name} could not be uploaded to the Hugging Face Hub: {lines[0]}",
                where="--push",
                remedy=f"the exported folder is complete; to upload it: `hf upload {self.name} {folder}`",
                exit_code=ExitCode.WRONG_REQUEST if _is_refusal(error) else ExitCode.FAILED,
            ) from error
        return str(address)


def _is_refusal(error: Exception) -> bool:
    """Whether the Hub has answered that this request is wrong, such as for a token that may not write there."""
    return isinstance(error, HfHubHTTPError) and error.response is not None and 400 <= error.response.status_code < 500


def _wrong_name(name: str) -> UserError:
    return UserError(f"{name!r} is no name of a repository", where="--push", remedy="name it as OWNER/NAME")
