"""What is exported gives the run's scores and predictions to whoever loads it with transformers alone."""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizerFast,
    GPT2TokenizerFast,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaTokenizerFast,
    pipeline,
)

from conftest import WORDS
from drawbar.cli.arguments import load_run
from drawbar.commands.export_run import ExportFormat, export_run
from drawbar.commands.trained_run import TrainedRun
from drawbar.data.tokenizer import train_byte_bpe
from exhaustive import some
from runs import fit_in
from translators import LANGUAGES, PAIRS, mbart, mbart50, nllb

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,  # what is written and predicted must depend on every token
}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
BERT = {**LLAMA, "max_position_embeddings": 66}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0}
BART = {
    "d_model": 16,
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 1),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 24),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 2),
    "max_position_embeddings": 64,
    "init_std": 0.5,
}
CONFIG: dict[str, Any] = {
    "run": {"name": "tiny"},
    "data": {"train": "rows.jsonl", "validation": "rows.jsonl", "sequence_length": 24},
    "train": {"global_batch": 4, "steps": 2},
    "optim": {"lr": 1.0e-2},
    "eval": {"micro_batch": 4},
    "precision": "fp32",
    "device": "cpu",
    "tracking": {"tensorboard": False},
}
CHAT = (
    "{% for message in messages %}[{{ message['role'][0] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
TEXTS = [" ".join(WORDS[number : number + 2 + 4 * number % 9]) for number in range(8)]
TEXTS[5] *= 9  # longer than data.sequence_length


def bpe() -> dict[str, Any]:
    state = json.loads(train_byte_bpe(TEXTS * 3, 300).backend_tokenizer.to_str())["model"]
    return {"vocab": state["vocab"], "merges": [tuple(merge) for merge in state["merges"]]}


def gpt2() -> PreTrainedTokenizerBase:
    """Puts nothing around a text, and has no pad token."""
    return GPT2TokenizerFast(**bpe())


def llama() -> PreTrainedTokenizerBase:
    """Puts a begin token before a text."""
    return generic(TemplateProcessing(single=["<s>", "$A"], pair=["<s>", "$A", "$B"], special_tokens=[("<s>", 0)]))


def t5() -> PreTrainedTokenizerBase:
    """Puts an end token after a text."""
    return generic(TemplateProcessing(single=["$A", "</s>"], pair=["$A", "$B", "</s>"], special_tokens=[("</s>", 1)]))


def generic(template: TemplateProcessing) -> PreTrainedTokenizerBase:
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = Metaspace()
    backend.decoder = MetaspaceDecoder()
    backend.train_from_iterator(TEXTS, WordLevelTrainer(special_tokens=["<s>", "</s>", "<pad>", "<unk>"]))
    backend.post_processor = template
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def roberta() -> PreTrainedTokenizerBase:
    found = bpe()
    special = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"]
    found["vocab"] |= {name: len(found["vocab"]) + number for number, name in enumerate(special)}
    return RobertaTokenizerFast(**found)


def bert() -> PreTrainedTokenizerBase:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    return BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})


class Exported:
    """A run, what it says of itself, and its model and tokenizer as transformers loads them."""

    def __init__(self, folder: Path, task: dict[str, Any], rows: list[dict[str, Any]], model_class: Any) -> None:
        self.rows = rows
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(json.dumps({**CONFIG, "task": task}))
        fit_in(folder)
        results = folder / "runs" / "tiny" / "eval" / "validation"
        self.scores = json.loads((results / "scores.json").read_text())
        written = results / "predictions.jsonl"
        lines = written.read_text().splitlines() if written.exists() else []
        self.predictions = [json.loads(line)["prediction"] for line in lines]
        self.folder = str(folder / "exported")
        with chdir(folder):
            self.config = load_run("runs/tiny", (), None).config
            export_run(self.config, None, Path(self.folder), None, ExportFormat())
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self.model: Any = model_class.from_pretrained(self.folder).eval()
        assert self.model.dtype == torch.float32

    def mean_loss(self, inputs: Callable[[dict[str, Any]], dict[str, Any]], shift: int) -> float:
        """Of all targets of all rows, by the model's own loss; ``inputs`` makes its inputs of a row, labels too."""
        total = count = 0.0
        for row in self.rows:
            tensors = {name: torch.tensor([value]) for name, value in inputs(row).items()}
            targets = int((tensors["labels"][:, shift:] != -100).sum()) if tensors["labels"].ndim > 1 else 1
            with torch.no_grad():
                total += float(self.model(**tensors).loss) * targets
            count += targets
        return total / count


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Exported]:
    def make(tokenizer: Callable[[], Any] | None, rows: Any, model_class: Any, **task: Any) -> Exported:
        wanted: Any = {"train": "byte_bpe", "vocab_size": 300}
        if tokenizer is not None:
            wanted = str(tmp_path / "tokenizer")
            tokenizer().save_pretrained(wanted)
        return Exported(tmp_path, {"tokenizer": wanted, **task}, rows, model_class)

    return make


def named(*tokenizers: Callable[[], Any] | None) -> pytest.MarkDecorator:
    names = ["trained" if one is None else one.__name__ for one in tokenizers]
    return pytest.mark.parametrize("tokenizer", some(tokenizers, 2), ids=names)


@named(None, gpt2, llama)
def test_documents(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    found = export(
        tokenizer, [{"text": text} for text in TEXTS[:5]], AutoModelForCausalLM, model="gpt2", from_scratch=GPT2
    )
    end = found.tokenizer.eos_token_id

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        tokens = [*found.tokenizer(row["text"])["input_ids"], end]  # the one token that the task adds itself
        return {"input_ids": tokens, "labels": tokens}

    assert found.mean_loss(inputs, shift=1) == pytest.approx(found.scores["loss"], rel=1e-4)
    prompts = ["the driver", "the hill and"]
    ours = TrainedRun(found.config, None, None).generate(prompts, max_new_tokens=8, temperature=0)
    write = pipeline("text-generation", model=found.folder, device="cpu")
    theirs = write(prompts, do_sample=False, max_new_tokens=8, return_full_text=False, batch_size=2)
    assert [text for (answer,) in theirs for text in answer.values()] == ours
    assert len(set(ours)) > 1


@named(None, gpt2)
def test_completions(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    rows = [{"prompt": f"{text}: ", "completion": text[:5]} for text in TEXTS[:4]]
    columns = {"prompt_column": "prompt", "completion_column": "completion"}
    settings = {"model": "llama", "from_scratch": LLAMA, "generation": {"max_new_tokens": 6}, **columns}
    found = export(tokenizer, rows, AutoModelForCausalLM, **settings)
    inputs = found.tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    written = found.model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    assert found.tokenizer.batch_decode(written, skip_special_tokens=True) == found.predictions


@named(None, llama)
def test_chats(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text[:6]}, {"role": "assistant", "content": "on"}]} for text in TEXTS
    ]
    settings = {"model": "llama", "from_scratch": LLAMA, "generation": {"max_new_tokens": 6}, "chat_template": CHAT}
    found = export(tokenizer, rows[:4], AutoModelForCausalLM, messages_column="messages", **settings)
    asked = [row["messages"][:1] for row in rows[:4]]
    options = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
    inputs = found.tokenizer.apply_chat_template(asked, **options)
    written = found.model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    assert found.tokenizer.batch_decode(written, skip_special_tokens=True) == found.predictions


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@named(None, gpt2, bert)
def test_classes(export: Callable[..., Exported], family: str, tokenizer: Callable[[], Any] | None) -> None:
    rows = [{"text": text, "label": "xyz"[number % 3]} for number, text in enumerate(TEXTS)]
    scratch = BERT if family == "bert" else GPT2
    settings = {"type": "sequence_classification", "model": family, "from_scratch": scratch}
    found = export(tokenizer, rows, AutoModelForSequenceClassification, **settings)

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        label = found.model.config.label2id[row["label"]]
        return {**found.tokenizer(row["text"], truncation=True), "labels": label}

    assert found.mean_loss(inputs, shift=0) == pytest.approx(found.scores["loss"], rel=1e-4)
    classify: Any = pipeline("text-classification", model=found.folder, device="cpu", truncation=True)
    assert [one["label"] for one in classify([row["text"] for row in rows], batch_size=4)] == found.predictions


@named(None, gpt2, bert)
def test_pairs(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    rows = [{"text": text, "other": TEXTS[-number], "label": number / 8} for number, text in enumerate(TEXTS)]
    settings = {"type": "sequence_classification", "model": "bert", "from_scratch": BERT, "problem": "regression"}
    found = export(tokenizer, rows, AutoModelForSequenceClassification, text_pair_column="other", **settings)
    score: Any = pipeline("text-classification", model=found.folder, device="cpu", truncation=True)
    answers = score([{"text": row["text"], "text_pair": row["other"]} for row in rows])
    assert [one["score"] for one in answers] == pytest.approx(found.predictions, rel=1e-4)


@named(None, roberta, bert)
def test_tags(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    rows = [{"tokens": text.split(), "tags": ["XYZ"[len(word) % 3] for word in text.split()]} for text in TEXTS]
    settings = {"type": "token_classification", "model": "bert", "from_scratch": BERT}
    found = export(tokenizer, rows, AutoModelForTokenClassification, **settings)
    names = found.model.config.id2label

    def inputs(row: dict[str, Any]) -> tuple[Any, list[int]]:
        encoded = found.tokenizer(row["tokens"], is_split_into_words=True, truncation=True)
        words = encoded.word_ids()
        return encoded, [at for at, word in enumerate(words) if word is not None and word not in words[:at]]

    def labelled(row: dict[str, Any]) -> dict[str, Any]:
        encoded, firsts = inputs(row)
        labels = [-100] * len(encoded["input_ids"])
        for at, tag in zip(firsts, row["tags"], strict=False):
            labels[at] = found.model.config.label2id[tag]
        return {**encoded, "labels": labels}

    assert found.mean_loss(labelled, shift=0) == pytest.approx(found.scores["loss"], rel=1e-4)
    tag: Any = pipeline("token-classification", model=found.folder, device="cpu", aggregation_strategy="first")
    for row, prediction in zip(rows, found.predictions, strict=True):
        encoded, firsts = inputs(row)
        with torch.no_grad():
            chosen = found.model(**encoded.convert_to_tensors("pt", prepend_batch_axis=True)).logits.argmax(-1)[0]
        assert [names[int(chosen[at])] for at in firsts] == prediction
        groups = tag(" ".join(row["tokens"]))  # words of one class in a row are one group
        assert [one["entity_group"] for one in groups for _ in one["word"].split()][: len(prediction)] == prediction


@pytest.mark.parametrize("family", ["t5", "bart"])
@named(None, gpt2, t5, roberta)
def test_targets(
    export: Callable[..., Exported],
    family: str,
    tokenizer: Callable[[], Any] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"source": text, "target": TEXTS[-number]} for number, text in enumerate(TEXTS)]
    scratch = T5 if family == "t5" else BART
    settings = {"type": "seq2seq", "model": family, "from_scratch": scratch, "source_prefix": "the load: "}
    generation = {"max_new_tokens": 6, "beams": 2}
    found = export(tokenizer, rows, AutoModelForSeq2SeqLM, generation=generation, **settings)
    assert "put 'the load: ' before every source" in capsys.readouterr().out
    prefix = found.model.config.prefix

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        return dict(found.tokenizer(prefix + row["source"], text_target=row["target"], truncation=True))

    assert found.mean_loss(inputs, shift=0) == pytest.approx(found.scores["loss"], rel=1e-4)
    sources = [prefix + row["source"] for row in rows]
    written = found.model.generate(**found.tokenizer(sources, padding=True, truncation=True, return_tensors="pt"))
    texts = found.tokenizer.batch_decode(written, skip_special_tokens=True)
    assert [text.strip() for text in texts] == found.predictions


@pytest.mark.parametrize("make", some([nllb, mbart, mbart50], 1))
def test_translations(export: Callable[..., Exported], make: Callable[..., Any]) -> None:
    """What is written begins with the code of the target's language, without being told."""
    rows = [{"source": source, "target": target} for source, target in PAIRS]
    source, target = LANGUAGES[make.__name__]
    languages = {"source_language": source, "target_language": target}
    family = "m2m_100" if make is nllb else "mbart"
    scratch = BART | {"decoder_start_token_id": 2}
    settings = {"type": "seq2seq", "model": family, "from_scratch": scratch, "generation": {"max_new_tokens": 6}}
    found = export(make, rows, AutoModelForSeq2SeqLM, **languages, **settings)

    def inputs(row: dict[str, Any]) -> dict[str, Any]:
        return dict(found.tokenizer(row["source"], text_target=row["target"]))

    assert found.mean_loss(inputs, shift=0) == pytest.approx(found.scores["loss"], rel=1e-4)
    sources = [row["source"] for row in rows]
    written = found.model.generate(**found.tokenizer(sources, padding=True, return_tensors="pt"))
    codes = found.tokenizer.convert_ids_to_tokens(written[:, 0 if make is mbart else 1].tolist())
    assert codes == [target] * len(rows)
    texts = found.tokenizer.batch_decode(written, skip_special_tokens=True)
    assert [text.strip() for text in texts] == found.predictions


@named(None, bert)
def test_masks(export: Callable[..., Exported], tokenizer: Callable[[], Any] | None) -> None:
    rows = [{"text": text} for text in TEXTS[:5]]
    settings = {"type": "masked_lm", "model": "bert", "from_scratch": BERT, "mask_share": 0.999}
    found = export(tokenizer, rows, AutoModelForMaskedLM, **settings)
    fill: Any = pipeline("fill-mask", model=found.folder, device="cpu")
    before, after = (list(found.tokenizer("")["input_ids"][at : at + 1]) for at in (0, 1))
    for row in rows:
        tokens = found.tokenizer(row["text"])["input_ids"]
        inside = found.tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        assert tokens == [*before, *inside, *after]
    (answer,) = fill(f"the {found.tokenizer.mask_token} pulls", top_k=1)
    assert isinstance(answer["token_str"], str)
