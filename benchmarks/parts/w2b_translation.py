"""W2b: the same as W2 with an encoder and a decoder: Multi30k with a small T5."""

from benchmarks.common.options import Options
from benchmarks.common.real_data import multi30k
from benchmarks.common.report import Report
from benchmarks.parts.w2_variable_length import ROWS, fine_tuning, two_epochs
from benchmarks.peers.workload import Workload


def measure(options: Options) -> Report:
    return fine_tuning("W2b", "Multi30k with a small T5", translation, options)


def translation(options: Options, steps: int) -> tuple[Workload, list[str]]:
    english, german = multi30k(options)
    overrides = [
        f"data.train={{parallel: {{source: {english}, target: {german}}}}}",
        *("data.sequence_length=128", f"data.limit.train={steps * ROWS}", "task.generation=null"),
    ]
    size, layers = (32, 1) if options.quick else (256, 3)
    model = f"{{d_model: {size}, d_kv: 32, d_ff: {4 * size}, num_layers: {layers}, num_heads: 4}}"
    builder = ["task.model=t5", f"task.from_scratch={model}", "task.tokenizer={train: byte_bpe, vocab_size: 4096}"]
    return two_epochs(options, "seq2seq", overrides, steps), builder
