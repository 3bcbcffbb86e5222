"""The options of the built-in tasks. They live here so that `drawbar config` need not import torch."""

from typing import Annotated, Any, Literal

from pydantic import Field

from drawbar.config.schema.section import Count, Fraction, PathText, Section, Text
from drawbar.util.registry import Registry


class TaskConfig(Section):
    """Options of a task. A task's own `Config` subclasses this; each field is a key under `task:`."""

    type: Text = "causal_lm"
    """A built-in task (`causal_lm`, `sequence_classification`, …), or your own class as `package.module:Class`."""


class TokenizerTraining(Section):
    train: Literal["byte_bpe"]
    """Train a new tokenizer on the training data: byte-level BPE, so any text can be encoded."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Number of tokens, the 256 bytes and the end-of-text token included."""


class GenerationSection(Section):
    """How the model writes its predictions."""

    max_new_tokens: Count = 128
    """Most tokens to add."""
    beams: Count = 1
    """Beams of a beam search; 1 is none."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy: always the likeliest token."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Draw from so many of the likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that have this probability together."""


class PretrainedTaskConfig(TaskConfig):
    """Options that all built-in tasks share."""

    model: PathText
    """Hub name or folder of a pretrained model, or a run whose model to begin with: `RUN`, `RUN@best`, `RUN@STEP`; with
    `from_scratch`, also a model type such as `bert` or `t5`."""
    from_scratch: dict[str, Any] | None = None
    """Start from random weights, with these fields of the architecture's own config changed (`{}`: none)."""
    tokenizer: PathText | TokenizerTraining | None = None
    """Hub name or folder of the tokenizer (default: the model's own), or `{train: byte_bpe, vocab_size: N}`."""
    add_special_tokens: Literal["auto", "begin", "end", "begin_end", "none"] = "auto"
    """What the tokenizer puts around a text: the begin token, the end token, both or nothing. `auto`: a given tokenizer
    puts what it always puts, and what the task cannot do without (an end of the text to write, something between two
    texts); a tokenizer that is trained here puts what the task needs."""
    attention: Text = "auto"
    """How attention is computed: `sdpa`, `eager`, `flash_attention_2`, `flash_attention_3`, `flex_attention`, or a
    kernel of the hub; `auto`: the choice of transformers, which is sdpa where the model has it."""
    resize_embeddings: bool = False
    """Grow or shrink the model's embeddings to the tokenizer's size. If false, too large a tokenizer is an error."""
    metrics: list[Text] | None = None
    """Scores of an evaluation: names such as `accuracy`, or `package.module:function` (default: the task's usual)."""


class LanguageModelConfig(PretrainedTaskConfig):
    """Options of the built-in tasks that predict tokens."""

    cross_entropy: Literal["auto", "plain", "chunked", "liger"] = "auto"
    """How the loss is computed: `plain`, from the logits of all positions; `chunked`, in the model's head, for some
    targets at a time and none of the ignored positions, which takes far less memory and time; `liger`, by the kernels
    of `liger-kernel` (CUDA). `auto`: chunked where the model allows it; a resumed run goes on as it began."""


TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs", "system")
"""The keys of a record that the chat template gets beside its messages, as in TRL and axolotl."""


COLUMNS_BY_SHAPE = ("prompt_column", "completion_column", "messages_column")
"""Options of ``causal_lm`` that follow from the shape of the records, where the user names no column."""


class CausalLMConfig(LanguageModelConfig):
    """Options of the built-in task `causal_lm`: predict the next token."""

    type: Text = "causal_lm"
    """A built-in task (`causal_lm`, `sequence_classification`, …), or your own class as `package.module:Class`."""
    model: PathText = "llama"
    """Hub name or folder of a pretrained model, or a run whose model to begin with: `RUN`, `RUN@best`, `RUN@STEP`; with
    `from_scratch`, also a model type such as `llama` or `gpt2`."""
    text_column: Text = "text"
    """The key that holds the text of a record."""
    prompt_column: Text | None = None
    """Instruction tuning: the key that holds the prompt. The loss is that of the completion alone."""
    completion_column: Text | None = None
    """Instruction tuning: the key that holds the completion."""
    messages_column: Text | None = None
    """Instruction tuning: the key that holds a chat, a list of `{role, content}`; the loss is that of the answers. The
    template also gets the record's `tools`, `documents`, `chat_template_kwargs` and `system`."""
    answers: Literal["all", "last"] = "all"
    """Chats: over which of the assistant's messages the loss is computed."""
    chat_template: Text | None = None
    """Chats: a Jinja file, or a template as text, in place of the tokenizer's own; it is kept with the tokenizer."""
    generation: GenerationSection | None = None
    """Instruction tuning: write completions in an evaluation, and score them (default: the loss alone)."""


def names_no_column(options: TaskConfig) -> bool:
    """Whether the user leaves it to the shape of the records which columns ``causal_lm`` reads."""
    return isinstance(options, CausalLMConfig) and not options.model_fields_set & {*COLUMNS_BY_SHAPE, "text_column"}


class SequenceClassificationConfig(PretrainedTaskConfig):
    """Options of the built-in task `sequence_classification`: a label, several, or a number for each text."""

    type: Text = "sequence_classification"
    text_column: Text = "text"
    """The key that holds the text."""
    text_pair_column: Text | None = None
    """The key of a second text, for pairs of sentences."""
    label_column: Text = "label"
    """The key that holds the label; a list of labels for `multi_label`, a number for `regression`."""
    problem: Literal["single_label", "multi_label", "regression"] = "single_label"
    """A record has exactly one of the labels, any number of the labels, or a number."""
    labels: list[str | int | bool] | None = None
    """All labels, in the order of the model's outputs (default: those of the training data, in the order that its
    files name them in, or sorted). A pretrained model that was trained for the same labels keeps its own order."""


class TokenClassificationConfig(PretrainedTaskConfig):
    """Options of the built-in task `token_classification`: a label for each word."""

    type: Text = "token_classification"
    tokens_column: Text = "tokens"
    """The key that holds the list of words."""
    labels_column: Text = "tags"
    """The key that holds the list of their labels."""
    labels: list[str | int | bool] | None = None
    """All labels, in the order of the model's outputs (default: those of the training data, in the order that its
    files name them in, or sorted). A pretrained model that was trained for the same labels keeps its own order."""


class Seq2SeqConfig(LanguageModelConfig):
    """Options of the built-in task `seq2seq`: write a text from another, such as a translation or a summary."""

    type: Text = "seq2seq"
    source_column: Text = "source"
    """The key that holds the text to read."""
    target_column: Text = "target"
    """The key that holds the text to write."""
    source_prefix: str = ""
    """Put before every source, such as `translate English to German: `."""
    source_language: Text | None = None
    """For multilingual models (NLLB, mBART, M2M100): the sources' language, as the tokenizer names it (`eng_Latn`)."""
    target_language: Text | None = None
    """The language of the targets, likewise; what the model writes begins with its code."""
    target_length: Annotated[int, Field(ge=2)] | None = None
    """Longest target, in tokens (default: `data.sequence_length`)."""
    generation: GenerationSection | None = GenerationSection()
    """How an evaluation writes its predictions; `null`: none are written, and the loss is the only score."""


class MaskedLMConfig(LanguageModelConfig):
    """Options of the built-in task `masked_lm`: find the words that were masked."""

    type: Text = "masked_lm"
    text_column: Text = "text"
    """The key that holds the text of a record."""
    mask_share: Annotated[Fraction, Field(gt=0)] = 0.15
    """Share of the tokens to predict; 80% of them are masked, 10% replaced by a random token, 10% kept (BERT)."""


BUILT_IN_TASKS: dict[str, type[TaskConfig]] = {
    "causal_lm": CausalLMConfig,
    "sequence_classification": SequenceClassificationConfig,
    "token_classification": TokenClassificationConfig,
    "seq2seq": Seq2SeqConfig,
    "masked_lm": MaskedLMConfig,
}
"""The options of each built-in task."""

TASKS: Registry[Any] = Registry(
    "task",
    "drawbar.tasks",
    {
        "causal_lm": "drawbar.tasks.causal_lm:CausalLM",
        "sequence_classification": "drawbar.tasks.classification:SequenceClassification",
        "token_classification": "drawbar.tasks.classification:TokenClassification",
        "seq2seq": "drawbar.tasks.seq2seq:Seq2Seq",
        "masked_lm": "drawbar.tasks.masked_lm:MaskedLM",
    },
)
"""Names for ``task.type``. A class of your own is also found as ``package.module:Class``."""
