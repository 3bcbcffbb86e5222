"""What the model writes, for people to look at: ``eval.samples``."""

from typing import Any

import numpy as np

from drawbar.config.schema.run_config import EvalSection
from drawbar.engines.engine import Engine
from drawbar.errors import UserError
from drawbar.evaluation.scoring import Split, WrittenText
from drawbar.evaluation.text_generation import Prompt, Sampling, generate_text
from drawbar.tasks.causal_lm import DecoderTask
from drawbar.tasks.messages import message_text
from drawbar.tasks.task import Task


def write_samples(
    engine: Engine, task: Task, split: Split, scored: list[dict[str, Any]], section: EvalSection
) -> list[WrittenText]:
    """The texts that ``eval.samples`` asks for. Collective.

    Args:
        split: the validation data.
        scored: on rank 0, its records with their predictions.

    Raises:
        UserError: the task writes no text, or a prompt is too long.
    """
    wanted = section.samples
    if wanted is None:
        return []
    writes = isinstance(task, DecoderTask) and task.head == "causal_lm"
    if isinstance(wanted, int) and task.predicts and not writes:
        return [WrittenText(_shown(task, one), str(one.get("prediction"))) for one in scored[:wanted]]
    if not isinstance(task, DecoderTask) or not writes:
        raise UserError(
            f"{type(task).__name__} writes no text after a prompt",
            where="eval.samples",
            remedy="give a number, to see predictions; or leave it out",
        )
    prompts: list[Prompt]
    if isinstance(wanted, list):
        titles, prompts = wanted, [task.question(text) for text in wanted]
    else:
        prompts = _first_prompts(engine, task, split, wanted)
        titles = list(map(_last_text, prompts))
    sampling = Sampling(max_new_tokens=section.sample_tokens, temperature=0.0)
    with engine.evaluating():
        texts = generate_text(engine, task.tokenizer, prompts, sampling)
    return [WrittenText(title, text) for title, text in zip(titles, texts, strict=True)]


def _first_prompts(engine: Engine, task: DecoderTask, split: Split, count: int) -> list[Prompt]:
    """Those of the first records that gave samples, whose prompts are not too long."""
    numbers = np.unique(split.samples.record_of)[:count].tolist()

    def read() -> list[Prompt]:
        return [task.prompt_of(split.records[number]) for number in numbers]

    return engine.world.from_rank0(read, "reading prompts")


def _shown(task: Task, record: dict[str, Any]) -> str:
    texts = getattr(task, "texts", None)
    return texts(record)[0] if texts is not None else f"record {record['id']}"


def _last_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = prompt["messages"] if isinstance(prompt, dict) else prompt
    asked = [message for message in messages if message.get("role") != "assistant"]
    return message_text(asked[-1]) if asked else ""
