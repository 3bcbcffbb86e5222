"""The section ``data``: where records come from, and how they become batches."""

from typing import Annotated, Literal

from pydantic import Field

from drawbar.config.schema.section import Auto, Count, Fraction, PathText, Section, Separator, Text


class SourceSection(Section):
    """One source of records, where a path alone does not say enough. Give `files`, `parallel` or `dataset`."""

    files: PathText | list[PathText] | None = None
    """A file, a glob, or a list of them."""
    reader: Text | None = None
    """With `files`: how they are read, whatever their names end in: an ending such as `.csv`, or a class of your own as
    `package.module:Class`."""
    parallel: dict[Text, PathText] | None = None
    """Text files by column name: line n of each makes record n, as in `{source: train.en, target: train.de}`."""
    dataset: PathText | None = None
    """Name on the Hugging Face Hub, or folder, of a dataset for `datasets.load_dataset`."""
    subset: Text | None = None
    """With `dataset`: which of its configurations."""
    split: Text | None = None
    """With `dataset`: which of its splits (default: the one named like the key, such as `train`)."""
    columns: list[Text] | None = None
    """Names of the columns of a `.tsv` or `.csv` file without a header (default: `data.columns`)."""
    separator: Separator | None = None
    """What stands between the fields of a `.csv` file (default: `data.separator`)."""
    rename: dict[Text, Text] | None = None
    """New names of columns: `{text: sentence}` makes a `sentence` the `text` (default: `data.rename`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """This source's part of the training, relative to the other weights (default: each sample once an epoch)."""


Source = PathText | SourceSection
Sources = Source | list[Source] | None


class LimitSection(Section):
    """Read only so many records of a split."""

    train: Count | None = None
    """At most so many training records."""
    validation: Count | None = None
    """At most so many validation records."""
    test: Count | None = None
    """At most so many test records."""


class DataSection(Section):
    train: Sources = None
    """Training data: a file, a glob, a built-in source (`python_stdlib`), `{files: …}`, or a list of them.
    Files are `.txt`, `.tsv`, `.csv`, `.json`, `.jsonl` (`.ndjson`), `.parquet` or `.arrow`; text may be compressed
    (`.gz`)."""
    validation: Sources = None
    """Validation data, in the same forms."""
    test: Sources = None
    """Test data, in the same forms; `drawbar eval --split test`, `predict` and `prepare` read it, training does not."""
    validation_share: Annotated[Fraction, Field(gt=0)] | None = None
    """Without `data.validation`: the share of the training records to validate on instead, chosen by their content."""
    columns: list[Text] | None = None
    """Names of the columns of `.tsv` and `.csv` files without a header."""
    separator: Separator = ","
    """What stands between the fields of `.csv` files: `";"` in many that were written by Excel."""
    rename: dict[Text, Text] | None = None
    """New names of columns: `{text: sentence}` makes a `sentence` the `text`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one record of a `.txt` file is: a line, a paragraph (up to a blank line) or the whole file."""
    limit: LimitSection = LimitSection()
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be read or encoded: stop and name it, or leave it out and count it."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Longest sample, in tokens. Longer documents are split for language modelling, and cut for other tasks."""
    batching: Literal["padded", "grouped", "packed"] = "padded"
    """How samples fill a batch: a row each, padded to the longest; the same, with samples of similar length together;
    or rows of several samples, where attention and positions never cross from one into another."""
    padding_free: bool | Auto = "auto"
    """Compute nothing for padding in training: the samples of a micro-batch lie end to end in one row, and attention is
    limited to each of them. Batches, targets and losses stay what they are. With `packed`, it changes attention alone.
    `auto`: where task, model, strategy and `parallel.compile` allow it; a run that began with padding keeps it."""
    shuffle: bool = True
    """Visit the training samples in a new random order every epoch."""
    streaming: bool = False
    """Encode training data while it is read, in constant memory, instead of before the first step."""
    shuffle_buffer: Count = 16384
    """With `streaming`: records of a block, over all processes. Those of each lane, this number divided by
    `stream_lanes`, are shuffled among one another."""
    stream_lanes: Count = 384
    """With `streaming`: how many parts the stream is dealt into; the number of data-parallel ranks must divide it (384:
    1, 2, 3, 4, 6, 8 and so on to 384). It decides the order of the samples, so that this order does not depend on the
    number of ranks. Samples are shuffled and packed within a part, so more of them want a larger `shuffle_buffer`."""
    workers: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Worker processes. For encoding: so many in all; `auto` is one a core, at most 16, where there is much to do. For
    batches, which are prepared ahead of training: so many for each rank; `auto` is a thread of the rank, or none
    where `augment` or `collate` are your own: set 1 or more for them. With none (0), each batch is made when its step
    begins."""
    cache: PathText | None = None
    """Folder of encoded data (default: `.cache` in `run.dir`)."""
    rebuild: bool = False
    """Encode the data anew, even where nothing has changed that drawbar knows of, and replace what was kept: when a run
    begins, and in `drawbar prepare`."""

    @property
    def records_per_lane(self) -> int:
        """How many records of a lane are shuffled together, as one block."""
        return max(1, self.shuffle_buffer // self.stream_lanes)
