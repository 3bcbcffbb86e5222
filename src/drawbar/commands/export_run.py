"""Exports a checkpoint of a run as a folder that transformers loads, and uploads it to the Hub.

The model card (``README.md``) of the folder is meant to be published: it contains no paths of the machine on which the
run was trained.
"""

import json
import math
import re
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers.utils import logging as transformers_logging

from drawbar.commands.output_files import check_new_folder, writing
from drawbar.config.schema.run_config import RunConfig
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import ExitCode, UserError
from drawbar.models.folder import SOURCE_FILE, initial_model_of
from drawbar.runtime.hub import TIMEOUT_SECONDS
from drawbar.runtime.log import logger, start_logging
from drawbar.tasks.task import Task
from drawbar.tracking.console import make_console
from drawbar.tracking.run_view import evaluation_scores, parse_metrics_line
from drawbar.train.checkpoint_export import CheckpointExport, ExportFormat
from drawbar.util.atomic_files import new_folder
from drawbar.util.run_dir import METRICS_FILE

PIPELINES = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "seq2seq": "text2text-generation",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
}
"""``task.type`` → the Hub's ``pipeline_tag`` of such a model."""
_TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ kind }}, trained with drawbar {{ version }}.

| | |
| --- | --- |
{% for what, value in facts.items() -%}
| {{ what }} | {{ value }} |
{% endfor %}
{%- if scores %}
## Evaluation

After step {{ step }}:

| score | |
| --- | ---: |
{% for what, value in scores.items() -%}
| {{ what }} | {{ value }} |
{% endfor %}
{%- endif %}"""


def model_card(config: RunConfig, model: nn.Module, step: int, dtype: str, adapters: bool) -> ModelCard:
    """The card of the checkpoint of ``step``.

    Args:
        model: only its class and the shapes of its parameters are used.
        dtype: of the exported weights.
        adapters: whether the adapters of a LoRA run are exported instead of the whole model.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    copied = initial_model_of(config.run_dir, config.task)
    named = getattr(config.task, "model", None) if copied is None else None
    base = _published_name(named, getattr(config.task, "from_scratch", None))
    data = ModelCardData(
        base_model=base,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=PIPELINES.get(config.task.type),
        tags=["drawbar"],
    )
    train, optim, packed = config.train, config.optim, config.data.batching == "packed"
    facts = {
        "model": f"{type(model).__name__}, {parameters:,} parameters",
        **({"trained from": base} if base else {}),
        **({} if copied is None else {"trained from": _other_run(copied)}),
        "weights": f"{dtype}{', LoRA adapters alone' if adapters else ''}",
        "checkpoint": f"step {step:,}",
        "packed rows in a step" if packed else "samples in a step": f"{train.global_batch:,}",
        "tokens of a sample, at most": f"{config.data.sequence_length:,}",
        "optimizer": f"{optim.name}, learning rate {optim.lr:g}, schedule {optim.schedule}",
        "seed": config.run.seed,
    }
    return ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=_cell(config.run.name),
        kind="LoRA adapters" if adapters else "A model",
        version=version("drawbar"),
        step=f"{step:,}",
        facts={what: _cell(value) for what, value in facts.items()},
        scores={_cell(what): _cell(value) for what, value in _scores(config.run_dir, step).items()},
    )


def _other_run(copied: Path) -> str:
    """The name and step of the run that the initial model was copied from. The path is left out, as cards are
    published."""
    source = json.loads((copied / SOURCE_FILE).read_text("utf-8"))
    return f"the run {Path(source['run']).name}, step {source['step']:,}"


def _published_name(model: Any, from_scratch: Any) -> str | None:
    """The name of the base model on the Hub; None for a local folder, or a model that is trained from scratch."""
    is_hub_name = isinstance(model, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not Path(model).exists()
    return model if is_hub_name and from_scratch is None else None


def _scores(run_dir: Path, step: int) -> dict[str, str]:
    """Name → score of the evaluation after ``step``; empty if there was none."""
    scores: dict[str, str] = {}
    with suppress(OSError), (run_dir / METRICS_FILE).open("rb") as lines:
        for entry in map(parse_metrics_line, lines):
            if entry is not None and entry["step"] == step:
                found = evaluation_scores(entry).items()
                scores |= {name.removeprefix("eval/"): f"{value:.4g}" for name, value in found if math.isfinite(value)}
    return scores


def _cell(value: Any) -> str:
    """The value as text for a cell of a Markdown table, with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(str(value).split()))


@dataclass(frozen=True)
class Push:
    """The repository that an exported folder is uploaded to."""

    name: str
    """``OWNER/NAME`` of a model repository, which is created if it does not exist."""
    public: bool = False
    """Whether a new repository is public; an existing one is left as it is."""

    def check(self) -> None:
        """Raise UserError if the name is invalid or the user is not logged in; the Hub is not contacted."""
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise _wrong_name(self.name) from error
        if self.name.count("/") != 1:
            raise _wrong_name(self.name)
        if get_token() is None:
            raise UserError(
                "there is no token for uploading to the Hugging Face Hub",
                where="--push",
                remedy="log in with `hf auth login`, or set the variable HF_TOKEN; or leave out --push",
            )

    def upload(self, folder: Path, message: str) -> str:
        """Upload all files of the folder as one commit; return the address of the repository.

        Raises:
            UserError: the Hub cannot be reached, or refuses.
        """
        api = HfApi()
        try:
            # first a request with a timeout, which the next two lack: it fails if the Hub cannot be reached. An HTTP
            # error is also an answer: the repository may not exist yet.
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
    """Whether the Hub has rejected this request, for example because the token may not write there."""
    return isinstance(error, HfHubHTTPError) and error.response is not None and 400 <= error.response.status_code < 500


def _wrong_name(name: str) -> UserError:
    return UserError(f"{name!r} is not a valid repository name", where="--push", remedy="name it as OWNER/NAME")


def export_run(
    config: RunConfig,
    task_type: type[Task] | None,
    folder: Path,
    checkpoint: str | None,
    form: ExportFormat,
    push: Push | None = None,
) -> None:
    """Write a checkpoint's model, tokenizer and model card to a folder for ``from_pretrained``, in one process on the
    CPU.

    Args:
        folder: absent or empty; it appears when it is complete.
        checkpoint: ``best``, ``latest``, a step or a path; None for the best, or the latest if there is no best one.
        push: where to upload the folder once it is complete; the local folder is kept.

    Raises:
        UserError: the folder is not empty, there is no such checkpoint, there are no adapters to merge, a weight is too
            large for ``form.dtype``, the model is not one of transformers', or it cannot be uploaded.
    """
    if push is not None:
        push.check()
    folder = folder.absolute()
    _check(config, folder, form.merge)
    rank_info = RankInfo()
    console = make_console(rank_info.is_rank0)
    start_logging(rank_info.rank, console.logging_handler())
    transformers_logging.disable_progress_bar()
    adapters = config.lora is not None and not form.merge
    with (
        Distributed(rank_info, torch.device("cpu"), config.launch.timeout) as world,
        redirect_stdout(sys.stderr),  # libraries must not write to the command's stdout
    ):
        opened = CheckpointExport(config, task_type, checkpoint, form, world)
        logger.info("checkpoint: %s", opened.path)
        card = model_card(config, opened.model, opened.step, form.dtype, adapters)
        with writing(folder, "--to"), new_folder(folder) as draft:
            opened.write(draft)
            card.save(draft / "README.md")
    console.message(f"{folder}: {'adapters' if adapters else 'model'} and tokenizer")
    if push is not None:
        with redirect_stdout(sys.stderr):
            address = push.upload(folder, f"{config.run.name}, step {opened.step:,}, exported by drawbar")
        console.message(f"{address}: uploaded")
    prefix = getattr(config.task, "source_prefix", "")
    if prefix:
        console.message(f"put {prefix!r} before every source, as in training: the tokenizer does not add it")


def _check(config: RunConfig, folder: Path, merge: bool) -> None:
    if merge and config.lora is None:
        raise UserError(
            f"the run {config.run.name} has no adapters to merge: it trained the whole model",
            where="--merge",
            remedy="leave out --merge",
        )
    check_new_folder(folder, "--to")
