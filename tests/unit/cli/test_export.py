"""``drawbar export``: what transformers and peft load is the model of the run."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, closing
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from drawbar.cli.arguments import load_run
from drawbar.commands.export_run import export_run
from drawbar.data.tokenizer import train_byte_bpe
from drawbar.distributed.process_group import Distributed
from drawbar.distributed.rank_info import RankInfo
from drawbar.errors import UserError
from drawbar.models.saving import rounded
from drawbar.tasks.task_registry import task_class
from drawbar.train.checkpoint_export import CheckpointExport, ExportFormat
from drawbar.train.setup import build_task, open_checkpoint
from exhaustive import some
from harness import Finished, run_cli, run_script
from messages import check_one_message
from runs import losses

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = "{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
T5 = "{d_model: 32, d_kv: 8, d_ff: 32, num_layers: 1, num_heads: 2}"
LLAMA = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 4}"
TOKENIZER = "tokenizer: {train: byte_bpe, vocab_size: 260}"
LORA = "lora: {rank: 2, alpha: 32}"
CONFIG = """
data: {train: train.tsv, columns: [text, label], sequence_length: 32}
train: {global_batch: 8, steps: 6}
optim: {lr: 1.0e-2}
checkpoint: {every: 3}
precision: bf16
device: cpu
tracking: {tensorboard: false}
"""
RUNS = {
    "llama": f"task: {{model: llama, from_scratch: {LLAMA}, {TOKENIZER}}}",
    "bert": f"task: {{type: sequence_classification, model: bert, from_scratch: {BERT}, {TOKENIZER}}}",
    "t5": f"task: {{type: seq2seq, model: t5, from_scratch: {T5}, {TOKENIZER}, source_column: text, "
    "target_column: label, generation: null, metrics: []}",
    "lora": f"task: {{model: base}}\n{LORA}",
    "lora-classes": f"task: {{type: sequence_classification, model: base}}\n{LORA}",
    "module": "task: {type: 'mine:Plain'}",
}
MINE = """
import torch
import drawbar

class Plain(drawbar.Task):
    def encode(self, record, train):
        return {"x": [float(len(record["text"]))], "labels": record["label"] == "good"}

    def build_model(self):
        return torch.nn.Linear(1, 2)

    def forward(self, model, batch):
        return model(batch["x"])

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(outputs, batch["labels"].long(), reduction="sum")
"""
IDS = torch.tensor([[1, 65, 66, 67, 68, 100, 101, 0]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of every kind."""
    project = tmp_path_factory.mktemp("export")
    (project / "mine.py").write_text(MINE)
    rows = [("load " * (1 + i % 7) + word, word) for i in range(20) for word in ("good", "bad")]
    (project / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    tokenizer = train_byte_bpe([], 257)
    tokenizer.save_pretrained(str(project / "base"))
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=len(tokenizer), pad_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(str(project / "base"))
    for name, sections in RUNS.items():
        (project / f"{name}.yaml").write_text(f"run: {{name: {name}}}\n{sections}{CONFIG}")
        packed = ["data.batching=packed"] if name == "llama" else []
        done = run_cli("train", f"{name}.yaml", *packed, cwd=project)
        assert done.code == 0, done.out + done.err
    return project


def export(project: Path, run: str, to: str, *arguments: str, code: int = 0) -> Finished:
    done = run_cli("export", f"runs/{run}", "--to", to, *arguments, cwd=project)
    assert done.code == code, done.out + done.err
    return done


def inputs(run: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, **({"decoder_input_ids": IDS} if run == "t5" else {})}


def logits_of_run(project: Path, run: str, which: str | None = None) -> torch.Tensor:
    with chdir(project), Distributed(RankInfo(), CPU, timeout=60) as world:
        config = load_run(f"runs/{run}", ("precision=fp32", "data.batching=padded"), None).config
        task = build_task(task_class(config.task.type), config, world, config.run_dir)
        engine, _ = open_checkpoint(task, config, which, world)
        with closing(engine):
            return logits(engine.module, run)  # type: ignore[attr-defined]


def logits(model: torch.nn.Module, run: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs(run)).logits


def assert_complete(folder: Path) -> None:
    """Nothing lies beside it, and all may read it."""
    assert not list(folder.parent.glob("*.tmp*"))
    assert folder.stat().st_mode & 0o055 == 0o055
    assert [path.name for path in folder.iterdir() if path.stat().st_mode & 0o044 != 0o044] == []
    AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize(
    ("run", "load"),
    some(
        [
            ("llama", AutoModelForCausalLM),
            ("bert", AutoModelForSequenceClassification),
            ("t5", AutoModelForSeq2SeqLM),
        ],
        1,
    ),
)
def test_transformers_loads_the_model_of_the_run(trained: Path, tmp_path: Path, run: str, load: type) -> None:
    done = export(trained, run, str(tmp_path / "new" / "model"))
    assert str(tmp_path / "new" / "model") in done.out
    model = load.from_pretrained(str(tmp_path / "new" / "model"))
    assert torch.equal(logits(model, run), logits_of_run(trained, run))
    assert_complete(tmp_path / "new" / "model")
    if run == "bert":
        assert model.config.id2label == {0: "bad", 1: "good"}


def test_what_libraries_print_is_no_answer(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a library says on standard output, as DeepSpeed does when it is imported."""
    monkeypatch.setattr(CheckpointExport, "write", lambda *_: print("a library's warning"))
    with chdir(trained):
        export_run(load_run("runs/bert", (), None).config, None, tmp_path / "to", None, ExportFormat())
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"{tmp_path / 'to'}: model and tokenizer"]
    assert "a library's warning" in said.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [("llama",), ("lora", "--merge")])
def test_to_save_a_model_does_not_import_deepspeed(trained: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Which would take seconds, and warn of a machine without GPU."""
    run, *options = command
    script = "import sys, atexit; atexit.register(lambda: print('imported:', 'deepspeed' in sys.modules))"
    words = [sys.executable, "-c", f"{script}; import drawbar.cli; drawbar.cli.run()", "export", f"runs/{run}"]
    # a process of its own: one that is forked has what the tests have imported
    done = subprocess.run(
        [*words, "--to", str(tmp_path / "to"), *options], cwd=trained, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "imported: False" in done.stdout
    assert "Setting accelerator" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", [("train", "lora-classes.yaml"), ("eval", "runs/lora-classes", "--split", "train")])
def test_a_trained_head_is_not_new(trained: Path, command: tuple[str, ...]) -> None:
    done = run_cli(*command, cwd=trained)
    assert done.code == 0, done.err
    assert "new head" not in done.out + done.err


def test_the_checkpoint_that_is_named(trained: Path, tmp_path: Path) -> None:
    found = {}
    for which in ("3", "latest"):
        export(trained, "llama", str(tmp_path / which), "--checkpoint", which)
        found[which] = logits(AutoModelForCausalLM.from_pretrained(str(tmp_path / which)), "llama")
        assert torch.equal(found[which], logits_of_run(trained, "llama", which))
    assert not torch.equal(found["3"], found["latest"])


def test_a_new_run_starts_from_it(trained: Path, tmp_path: Path) -> None:
    export(trained, "llama", str(tmp_path / "model"))
    settings = ("task.from_scratch=null", "task.tokenizer=null", f"task.model={tmp_path / 'model'}", "run.name=new")
    done = run_cli("train", "llama.yaml", *settings, "tracking.log_every=1", f"run.dir={tmp_path}", cwd=trained)
    assert done.code == 0, done.out + done.err
    first = losses(tmp_path / "new")[1]
    scratch = run_cli("train", "llama.yaml", "tracking.log_every=1", f"run.dir={tmp_path}", cwd=trained)
    assert scratch.code == 0
    assert first < 0.8 * losses(tmp_path / "llama")[1]


@pytest.mark.parametrize(
    ("run", "load"), [("lora", AutoModelForCausalLM), ("lora-classes", AutoModelForSequenceClassification)]
)
def test_adapters_alone_and_merged(trained: Path, tmp_path: Path, run: str, load: type) -> None:
    wanted = logits_of_run(trained, run)
    base = {"num_labels": 2} if run == "lora-classes" else {}
    assert not torch.allclose(logits(load.from_pretrained(str(trained / "base"), **base), run), wanted, atol=1e-3)

    export(trained, run, str(tmp_path / "adapter"))
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert_complete(tmp_path / "adapter")
    pretrained = load.from_pretrained(str(trained / "base"), **base)
    adapted = peft.PeftModel.from_pretrained(pretrained, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(adapted, run), wanted, atol=1e-5, rtol=1e-5)

    export(trained, run, str(tmp_path / "whole"), "--merge")
    assert not list((tmp_path / "whole").glob("adapter*"))
    assert_complete(tmp_path / "whole")
    merged = load.from_pretrained(str(tmp_path / "whole"))
    torch.testing.assert_close(logits(merged, run), wanted, atol=1e-5, rtol=1e-5)


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")


@pytest.mark.parametrize(
    ("run", "arguments", "make", "says"),
    [
        ("llama", ("--merge",), None, ("no adapters to merge", "--merge")),
        ("llama", (), fill, ("is not empty", "--to")),
        ("llama", (), lambda path: path.write_text("mine"), ("is a file", "--to")),
        ("llama", ("--checkpoint", "999"), None, ("999", "3, 6")),
        ("module", (), None, ("Linear is not a transformers model", "safetensors")),
    ],
)
def test_a_request_that_is_wrong(
    trained: Path,
    tmp_path: Path,
    run: str,
    arguments: tuple[str, ...],
    make: Callable[[Path], object] | None,
    says: tuple[str, ...],
) -> None:
    if make is not None:
        make(tmp_path / "to")
    before = {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")}
    done = export(trained, run, str(tmp_path / "to"), *arguments, code=2)
    check_one_message(done.out + done.err, *says)
    assert {path: path.is_file() and path.read_text() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("run", "arguments"), [("llama", ("--checkpoint", "3")), ("lora", ("--merge",)), ("lora", ())])
def test_weights_in_bf16(trained: Path, tmp_path: Path, run: str, arguments: tuple[str, ...]) -> None:
    """Rounded once: what was merged was merged in fp32."""
    for dtype in ("fp32", "bf16"):
        export(trained, run, str(tmp_path / dtype), "--dtype", dtype, *arguments)
    (file,) = (path.name for path in (tmp_path / "bf16").glob("*.safetensors"))
    exact, rounded = load_file(tmp_path / "fp32" / file), load_file(tmp_path / "bf16" / file)
    assert {name: tensor.bfloat16() for name, tensor in exact.items()}.keys() == rounded.keys()
    assert all(torch.equal(tensor.bfloat16(), rounded[name]) for name, tensor in exact.items())
    if file == "model.safetensors":
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "bf16"))
        assert model.dtype == torch.bfloat16
        assert "bf16" in (tmp_path / "bf16" / "README.md").read_text()


def test_weights_that_fp16_cannot_hold() -> None:
    large = torch.tensor([0.0, 1e5])
    assert rounded("bias", large, torch.bfloat16).dtype == torch.bfloat16
    assert rounded("bias", torch.tensor([torch.inf]), torch.float16).isinf().all()
    assert rounded("count", torch.tensor([2**20]), torch.float16).item() == 2**20
    with pytest.raises(UserError, match="bias has numbers too large for float16"):
        rounded("bias", large, torch.float16)


def test_files_of_a_size(trained: Path, tmp_path: Path) -> None:
    export(trained, "llama", str(tmp_path / "to"), "--shard-size", "0.001GB")
    assert len(list((tmp_path / "to").glob("*.safetensors"))) == 1  # a tiny model
    done = export(trained, "llama", str(tmp_path / "no"), "--shard-size", "many", code=2)
    check_one_message(done.out + done.err, "many is not a valid file size", "--shard-size")


@pytest.mark.parametrize(("run", "pipeline"), [("llama", "text-generation"), ("bert", "text-classification")])
def test_the_card_says_what_the_model_is(trained: Path, tmp_path: Path, run: str, pipeline: str) -> None:
    export(trained, run, str(tmp_path / "to"))
    card = ModelCard.load(tmp_path / "to" / "README.md")
    assert card.data.pipeline_tag == pipeline
    assert card.data.library_name == "transformers"
    assert f"# {run}" in card.text
    assert "step 6" in card.text
    assert str(trained) not in card.content  # it may be published


def test_the_card_has_the_scores_of_its_step(trained: Path, tmp_path: Path) -> None:
    with (trained / "runs" / "bert" / "metrics.jsonl").open("a") as lines:
        for step, loss in ((3, 0.5), (6, 0.25)):
            lines.write(json.dumps({"step": step, "time": 0.0, "eval/valid|<b>/loss": loss}) + "\n")
    export(trained, "bert", str(tmp_path / "to"))
    text = (tmp_path / "to" / "README.md").read_text()
    assert r"| valid\|\<b\>/loss | 0.25 |" in text
    assert "| 0.5 |" not in text


def test_an_empty_folder_is_filled(trained: Path, tmp_path: Path) -> None:
    export(trained, "bert", str(tmp_path))
    assert_complete(tmp_path)


def test_a_place_that_cannot_be_written(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = export(trained, "bert", str(tmp_path / "file" / "to"), code=1)
    check_one_message(done.out + done.err, "cannot write", "--to")


def test_a_full_disk_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    """The files are too large for the limit that the process has."""
    run = shutil.copytree(trained / "runs" / "bert", tmp_path / "bert")
    (trained / "limit.py").write_text(
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from drawbar.cli import run\n"
        "run()\n"
    )
    done = run_script(trained / "limit.py", "export", str(run), "--to", str(tmp_path / "to"), cwd=trained)
    assert done.code == 1, done.out + done.err
    check_one_message(done.out + done.err, "cannot write", "--to", "File too large")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
