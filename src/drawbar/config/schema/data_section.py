"""The ``data`` section: where records come from, and how they become batches."""

from typing import Annotated, Literal

from pydantic import Field

from drawbar.config.schema.section import Auto, Count, Fraction, PathText, Section, Separator, Text, text_of


class SourceSection(Section):
    """One source of records that needs more than a path. Give one of `files`, `parallel` and `dataset`."""

    files: PathText | list[PathText] | None = None
    """A file, a glob, or a list of them."""
    reader: Text | None = None
    """With `files`: the format to read them in, regardless of their extension: an extension such as `.csv`, or your own
    reader as `package.module:Class`."""
    parallel: dict[Text, PathText] | None = None
    """Text files by column name, as in `{source: train.en, target: train.de}`. Line n of each file forms record n."""
    dataset: PathText | None = None
    """A dataset to load with `datasets.load_dataset`: its name on the Hugging Face Hub, or a local folder."""
    subset: Text | None = None
    """With `dataset`: the name of its configuration."""
    split: Text | None = None
    """With `dataset`: the split to read (default: the one named after the key, such as `train`)."""
    columns: list[Text] | None = None
    """Column names for a `.tsv` or `.csv` file without a header (default: `data.columns`)."""
    separator: Separator | None = None
    """Field separator of `.csv` files (default: `data.separator`)."""
    rename: dict[Text, Text] | None = None
    """New column names: `{text: sentence}` renames `sentence` to `text` (default: `data.rename`)."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Sampling weight of this source, relative to the others (default: each sample once per epoch)."""
    name: Annotated[str, text_of("letters, digits, dots, dashes and underscores", r"^[A-Za-z0-9._-]+$")] | None = None
    """Validation and test data: evaluate this source by itself, too, with scores such as `NAME/loss`."""


Source = PathText | SourceSection
Sources = Source | list[Source] | None


class LimitSection(Section):
    """Limit the number of records read from a split."""

    train: Count | None = None
    """Maximum number of training records."""
    validation: Count | None = None
    """Maximum number of validation records."""
    test: Count | None = None
    """Maximum number of test records."""


class DataSection(Section):
    train: Sources = None
    """Training data: a file, a glob, a built-in source (`python_stdlib`), `{files: …}`, or a list of these.
    Formats: `.txt`, `.tsv`, `.csv`, `.json`, `.jsonl` (`.ndjson`), `.parquet` and `.arrow`; text files may be
    compressed (`.gz`)."""
    validation: Sources = None
    """Validation data, in the same forms."""
    test: Sources = None
    """Test data, in the same forms. `drawbar eval --split test`, `predict` and `prepare` read it; training does not."""
    validation_share: Annotated[Fraction, Field(gt=0)] | None = None
    """Without `data.validation`: the share of the training records to hold out for validation, chosen by content."""
    columns: list[Text] | None = None
    """Column names for `.tsv` and `.csv` files without a header."""
    separator: Separator = ","
    """Field separator of `.csv` files; files exported from Excel often use `";"`."""
    rename: dict[Text, Text] | None = None
    """New column names: `{text: sentence}` renames `sentence` to `text`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What makes a record of a `.txt` file: each line, each paragraph (up to a blank line), or the whole file."""
    limit: LimitSection = LimitSection()
    on_bad_record: Literal["error", "skip"] = "error"
    """What to do with a record that cannot be read or encoded: stop and name it, or skip and count it."""
    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Maximum sample length, in tokens. Language modelling splits longer documents; other tasks truncate them."""
    batching: Literal["padded", "grouped", "packed"] = "padded"
    """How samples fill a batch. `padded`: one sample per row, padded to the longest. `grouped`: the same, but batches
    hold samples of similar length. `packed`: several samples per row; attention and positions never cross samples."""
    padding_free: bool | Auto = "auto"
    """Skip the computation for padding in training: the samples of a micro-batch are concatenated into one row, and
    attention stays within each sample. Batches, targets and losses do not change. With `packed`, only attention does.
    `auto`: on if task, model, strategy and `parallel.compile` support it; a run that started with padding keeps it."""
    shuffle: bool = True
    """Visit the training samples in a new random order every epoch."""
    streaming: bool = False
    """Encode training data on the fly, in constant memory, instead of before the first step."""
    shuffle_buffer: Count = 16384
    """With `streaming`: records per shuffle block, over all processes. Each lane shuffles blocks of this number divided
    by `stream_lanes`."""
    stream_lanes: Count = 384
    """With `streaming`: number of lanes that the stream is split into. The number of data-parallel ranks must divide it
    (384: 1, 2, 3, 4, 6, 8 and so on up to 384). The lanes, not the number of ranks, determine the order of the samples.
    Samples are shuffled and packed within a lane, so more lanes call for a larger `shuffle_buffer`."""
    workers: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Worker processes. For encoding: the total number; `auto` is one per core, at most 16, or none for little data.
    For preparing batches ahead of training: the number per rank; `auto` is a thread in the rank, or none if you
    override `augment` or `collate` (set 1 or more for these). With 0, each batch is built when its step starts."""
    cache: PathText | None = None
    """Folder for encoded data (default: `.cache` in `run.dir`)."""
    rebuild: bool = False
    """Encode the data again even if drawbar detects no change, and replace the cached data. Applies when a run starts
    and to `drawbar prepare`."""

    @property
    def records_per_lane(self) -> int:
        """Number of records of a lane that are shuffled together, as one block."""
        return max(1, self.shuffle_buffer // self.stream_lanes)
