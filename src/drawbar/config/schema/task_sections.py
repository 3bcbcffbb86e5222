"""The options of the built-in tasks, kept apart from the tasks so that `drawbar config` need not import torch."""

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
    """Vocabulary size, including the 256 bytes and the end-of-text token."""


class GenerationSection(Section):
    """How the model generates its predictions."""

    max_new_tokens: Count = 128
    """Maximum number of tokens to generate."""
    beams: Count = 1
    """Number of beams; 1 disables beam search."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy decoding."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Sample from the k most likely tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens with this total probability (nucleus sampling)."""


class PretrainedTaskConfig(TaskConfig):
    """Options shared by all built-in tasks."""

    model: PathText
    """Hub name or folder of a pretrained model, or a run to start from: `RUN`, `RUN@best`, `RUN@STEP`; with
    `from_scratch`, also a model type such as `bert` or `t5`."""
    from_scratch: dict[str, Any] | None = None
    """Start from random weights, overriding these fields of the architecture's config (`{}`: none)."""
    tokenizer: PathText | TokenizerTraining | None = None
    """Hub name or folder of the tokenizer (default: the model's own), or `{train: byte_bpe, vocab_size: N}`."""
    add_special_tokens: Literal["auto", "begin", "end", "begin_end", "none"] = "auto"
    """Special tokens added around a text: the begin token, the end token, both or none. `auto`: an existing tokenizer
    adds its usual ones and those the task requires (an end to the text to generate, a separator between two texts); a
    tokenizer trained by this run adds those the task requires."""
    attention: Text = "auto"
    """Attention implementation: `sdpa`, `eager`, `flash_attention_2`, `flash_attention_3`, `flex_attention`, or a
    kernel from the Hub. `auto`: the default of transformers, which is sdpa if the model supports it."""
    resize_embeddings: bool = False
    """Resize the model's embeddings to the tokenizer's size. If false, too large a tokenizer is an error."""
    label_smoothing: Fraction = 0.0
    """Share of each label that is spread over all tokens (or classes) in training. The loss of an evaluation is
    plain."""
    metrics: list[Text] | None = None
    """Evaluation metrics: names such as `accuracy`, or `package.module:function` (default: the usual for the task)."""


class LanguageModelConfig(PretrainedTaskConfig):
    """Options of the built-in tasks that predict tokens."""

    cross_entropy: Literal["auto", "plain", "chunked", "liger"] = "auto"
    """How the loss is computed. `plain`: from the logits of all positions. `chunked`: in the model's head, a chunk of
    targets at a time and without ignored positions, which takes far less memory and time. `liger`: by the kernels
    of `liger-kernel` (CUDA). `auto`: chunked if the model supports it; a resumed run keeps its choice."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the squared log-sum-exp of the logits that is added to a token's loss, in training. It keeps logits of
    large models small, as with 1e-4 in PaLM."""


TEMPLATE_COLUMNS = ("tools", "documents", "chat_template_kwargs", "system")
"""The keys of a record that are passed to the chat template with its messages, as in TRL and axolotl."""


COLUMNS_BY_SHAPE = ("prompt_column", "completion_column", "messages_column")
"""Options of ``causal_lm`` that are derived from the shape of the records if the user names no column."""


class CausalLMConfig(LanguageModelConfig):
    """Options of the built-in task `causal_lm`: predict the next token."""

    type: Text = "causal_lm"
    """A built-in task (`causal_lm`, `sequence_classification`, …), or your own class as `package.module:Class`."""
    model: PathText = "llama"
    """Hub name or folder of a pretrained model, or a run to start from: `RUN`, `RUN@best`, `RUN@STEP`; with
    `from_scratch`, also a model type such as `llama` or `gpt2`."""
    text_column: Text = "text"
    """Key of the text in a record."""
    prompt_column: Text | None = None
    """Instruction tuning: key of the prompt. The loss covers only the completion."""
    completion_column: Text | None = None
    """Instruction tuning: key of the completion."""
    messages_column: Text | None = None
    """Instruction tuning: key of a chat, a list of `{role, content}`. The loss covers only the answers. The chat
    template also receives the record's `tools`, `documents`, `chat_template_kwargs` and `system`."""
    answers: Literal["all", "last"] = "all"
    """Chats: which of the assistant's messages the loss covers."""
    chat_template: Text | None = None
    """Chats: a Jinja file, or a template as text, that replaces the tokenizer's own and is saved with the tokenizer."""
    generation: GenerationSection | None = None
    """Instruction tuning: generate completions during evaluation, and score them (default: only the loss)."""
    embedding_noise: Annotated[float, Field(ge=0)] = 0.0
    """Uniform noise on the embeddings in training, α in NEFTune: of at most α/√(tokens of the sample × hidden size).
    5 to 15 are usual for instruction tuning."""


def names_no_column(options: TaskConfig) -> bool:
    """Whether the shape of the records, not the user, determines the columns that ``causal_lm`` reads."""
    return isinstance(options, CausalLMConfig) and not options.model_fields_set & {*COLUMNS_BY_SHAPE, "text_column"}


class ClassificationConfig(PretrainedTaskConfig):
    """Options shared by the built-in tasks that predict labels."""

    labels: list[str | int | bool] | None = None
    """All labels, in the order of the model's outputs (default: those of the training data, in the order declared in
    its files, or else sorted). A pretrained model with the same labels keeps its own order."""
    class_weights: dict[str | int | bool, Annotated[float, Field(gt=0)]] | Literal["balanced"] | None = None
    """Weights of the classes in the mean loss, as in `{spam: 5.0}`; others have 1. `balanced`: in inverse proportion to
    their numbers in the training data, as in scikit-learn."""


class SequenceClassificationConfig(ClassificationConfig):
    """Options of the built-in task `sequence_classification`: one label, several labels, or a number for each text."""

    type: Text = "sequence_classification"
    text_column: Text = "text"
    """Key of the text."""
    text_pair_column: Text | None = None
    """Key of a second text, for sentence pairs."""
    label_column: Text = "label"
    """Key of the label: a list of labels for `multi_label`, a number for `regression`."""
    problem: Literal["single_label", "multi_label", "regression"] = "single_label"
    """Whether a record has exactly one label, any number of labels, or a number."""


class TokenClassificationConfig(ClassificationConfig):
    """Options of the built-in task `token_classification`: a label for each word."""

    type: Text = "token_classification"
    tokens_column: Text = "tokens"
    """Key of the list of words."""
    labels_column: Text = "tags"
    """Key of the list of their labels."""


class Seq2SeqConfig(LanguageModelConfig):
    """Options of the built-in task `seq2seq`: generate a text from another, such as a translation or a summary."""

    type: Text = "seq2seq"
    source_column: Text = "source"
    """Key of the source text."""
    target_column: Text = "target"
    """Key of the target text."""
    source_prefix: str = ""
    """Text to prepend to every source, such as `translate English to German: `."""
    source_language: Text | None = None
    """Multilingual models (NLLB, mBART, M2M100): language of the sources, as the tokenizer names it (`eng_Latn`)."""
    target_language: Text | None = None
    """Multilingual models: language of the targets. Generated text begins with its code."""
    target_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum target length, in tokens (default: `data.sequence_length`)."""
    generation: GenerationSection | None = GenerationSection()
    """How evaluation generates predictions; `null` disables generation, and the loss is the only score."""


class MaskedLMConfig(LanguageModelConfig):
    """Options of the built-in task `masked_lm`: predict the masked tokens."""

    type: Text = "masked_lm"
    text_column: Text = "text"
    """Key of the text in a record."""
    mask_share: Annotated[Fraction, Field(gt=0)] = 0.15
    """Share of the tokens to predict: 80% of these are masked, 10% replaced by a random token, 10% kept (BERT)."""


class PairConfig(PretrainedTaskConfig):
    """Options shared by the built-in tasks that learn from pairs of answers."""

    prompt_column: Text | None = "prompt"
    """Key of the prompt: a text, or the messages of a chat. Chats without this key begin with it. `null`: texts do,
    too, and what both answers of a pair begin with is the prompt."""
    chosen_column: Text = "chosen"
    """Key of the better answer: a text, or the messages of a chat, of which the last is the answer."""
    rejected_column: Text = "rejected"
    """Key of the worse answer."""
    chat_template: Text | None = None
    """Chats: a Jinja file, or a template as text, that replaces the tokenizer's own and is saved with the tokenizer."""


class PreferenceConfig(PairConfig):
    """Options of the built-in task `preference`: a language model learns which answers people prefer."""

    type: Text = "preference"
    method: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = "dpo"
    """The loss. `dpo`, `ipo` and `kto` compare the model with the one that training starts from; `kto` learns from
    single answers, each good or bad."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the log-probabilities (`dpo`, `kto`, `simpo`), of the regularization (`ipo`, its τ) or of the odds
    ratio (`orpo`, its λ)."""
    gamma: Annotated[float, Field(ge=0)] = 0.5
    """`simpo`: by how much the better answer's reward should be larger."""
    completion_column: Text = "completion"
    """`kto`: key of the answer."""
    label_column: Text = "label"
    """`kto`: key of whether the answer is good: true or false."""
    desirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """`kto`: weight of good answers in the loss."""
    undesirable_weight: Annotated[float, Field(gt=0)] = 1.0
    """`kto`: weight of bad answers in the loss."""


class RewardConfig(PairConfig):
    """Options of the built-in task `reward`: a model that scores answers, from pairs of a better and a worse one."""

    type: Text = "reward"
    margin_column: Text | None = None
    """Key of a number: by how much the better answer's score should be larger."""


BUILT_IN_TASKS: dict[str, type[TaskConfig]] = {
    "causal_lm": CausalLMConfig,
    "sequence_classification": SequenceClassificationConfig,
    "token_classification": TokenClassificationConfig,
    "seq2seq": Seq2SeqConfig,
    "masked_lm": MaskedLMConfig,
    "preference": PreferenceConfig,
    "reward": RewardConfig,
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
        "preference": "drawbar.tasks.preference:Preference",
        "reward": "drawbar.tasks.preference:Reward",
    },
)
"""Names for ``task.type``. Your own class may also be given as ``package.module:Class``."""
