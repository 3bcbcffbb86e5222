"""Reading a configuration: YAML, overrides, origins, and one readable error for everything that is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawbar.config.io.load_config import LoadedConfig, dump_yaml, load_config
from drawbar.config.io.source import Origin
from drawbar.config.schema.run_config import RunConfig, run_config_type
from drawbar.config.schema.task_sections import CausalLMConfig, TaskConfig, TokenizerTraining
from drawbar.errors import UserError


class ScoringConfig(TaskConfig):
    threshold: float
    labels: tuple[str, ...] = ("no", "yes")
    folder: Path = Path("here")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes config.yaml into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def write_config(text: str | bytes) -> str:
        data = text if isinstance(text, bytes) else text.encode()
        Path("config.yaml").write_bytes(data)
        return "config.yaml"

    return write_config


def problems_of(path: str | None, *overrides: str, task: type[TaskConfig] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, task)
    return str(caught.value)


# ---- what is read ----------------------------------------------------------------------------------------------


def test_without_file_and_overrides_everything_is_default():
    loaded = load_config(None)
    assert loaded.config.model_dump() == RunConfig().model_dump()
    assert loaded.origins == {}
    assert loaded.origin("optim.lr") == Origin("default")


def test_values_of_the_file_and_their_lines(write):
    path = write(
        "# a comment\n"
        "run: {name: demo,\n"
        "      seed: 3}\n"
        "optim:\n"
        "  lr: 3e-4\n"
        "data:\n"
        "  train:\n"
        "    - a.txt\n"
        "    - b.txt\n"
        "task:\n"
        "  from_scratch: {n_layer: 2}\n"
    )
    loaded = load_config(path)
    assert loaded.config.optim.lr == 3e-4
    assert loaded.config.run.name == "demo"
    assert loaded.config.data.train == ["a.txt", "b.txt"]
    assert loaded.path == Path("config.yaml")
    lines = {key: str(loaded.origin(key)) for key in ("run.name", "run.seed", "optim.lr", "data.train")}
    assert lines == {
        "run.name": "config.yaml:2",
        "run.seed": "config.yaml:3",
        "optim.lr": "config.yaml:5",
        "data.train": "config.yaml:7",
    }
    assert str(loaded.origin("task.from_scratch.n_layer")) == "config.yaml:11"
    assert str(loaded.origin("optim.name")) == "default"


def test_yaml_is_version_1_2(write):
    loaded = load_config(write("run: {name: 2024-01-31}\ndata: {train: no, test: 1e3.txt}\noptim: {lr: 1E-5}\n"))
    assert (loaded.config.run.name, loaded.config.data.train, loaded.config.optim.lr) == ("2024-01-31", "no", 1e-5)


def test_anchors_and_merges_are_plain_data(write):
    loaded = load_config(
        write("data: {train: &files [a.txt], validation: *files, shuffle: &off false, streaming: *off}\n")
    )
    assert loaded.config.data.validation == ["a.txt"]
    assert loaded.config.data.streaming is False


def test_a_byte_order_mark_and_windows_line_ends(write):
    loaded = load_config(write(b"\xef\xbb\xbfrun:\r\n  name: demo\r\n"))
    assert (loaded.config.run.name, str(loaded.origin("run.name"))) == ("demo", "config.yaml:2")


def test_overrides_win_and_say_so(write):
    path = write(
        "optim: {lr: 1.0, eps: 1e-6}\ndata: {train: [a, b, c]}\ntask: {from_scratch: {n_layer: 4, n_embd: 8}}\n"
    )
    loaded = load_config(
        path, ["optim.lr=3e-4", "task.from_scratch.n_layer=2", "eval.patience=null", "data.train=[x.txt,y.txt]"]
    )
    config = loaded.config
    assert (config.optim.lr, config.optim.eps) == (3e-4, 1e-6)
    assert config.task.from_scratch == {"n_layer": 2, "n_embd": 8}
    assert config.eval.patience is None
    assert config.data.train == ["x.txt", "y.txt"]
    assert str(loaded.origin("optim.lr")) == "command line"
    assert str(loaded.origin("optim.eps")) == "config.yaml:1"
    assert "data.train.2" not in loaded.origins


def test_a_section_as_override_merges_and_the_last_of_two_wins(write):
    path = write("optim: {lr: 1.0, eps: 1e-6}\n")
    config = load_config(path, ["optim={lr: 2.0, power: 1.0}", "optim.lr=3.0"]).config
    assert (config.optim.lr, config.optim.eps) == (3.0, 1e-6)


def test_a_value_may_hold_an_equals_sign():
    assert load_config(None, ["data.train=a=b.txt"]).config.data.train == "a=b.txt"


def test_home_and_environment_in_paths(write, monkeypatch):
    monkeypatch.setenv("DATA_HOME", "/somewhere")
    text = "data: {train: '${DATA_HOME}/a.txt', validation: $DATA_HOME/b.txt}\nrun: {dir: ~/runs}\n"
    config = load_config(write(text)).config
    assert config.data.train == "/somewhere/a.txt"
    assert config.data.validation == "/somewhere/b.txt"
    assert config.run.dir == str(Path.home() / "runs")


def test_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config(None).config.optim.lr = 1.0


# ---- which task ------------------------------------------------------------------------------------------------


def test_options_of_a_given_task_take_any_type_that_yaml_can_spell():
    overrides = ["task.threshold=1", "task.labels=[a, b, c]", "task.folder=x/y"]
    loaded = load_config(None, overrides, ScoringConfig)
    task = loaded.config.task
    assert isinstance(task, ScoringConfig)
    assert (task.threshold, task.labels, task.folder) == (1.0, ("a", "b", "c"), Path("x/y"))
    assert load_config(None, ["task.threshold=1", "task.type=mine:Own"], ScoringConfig).config.task.type == "mine:Own"


def test_options_of_a_given_task_are_written_and_read_back(write):
    config = load_config(None, ["task.threshold=0.5", "task.labels=[a, b, c]", "task.folder=x/y"], ScoringConfig).config
    assert load_config(write(dump_yaml(config)), task=ScoringConfig).config == config


def test_missing_option_of_a_task():
    assert "task.threshold: missing; expected number" in problems_of(None, task=ScoringConfig)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, as `python -m` would find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    Path("own_task_module.py").write_text(
        "from drawbar.config.schema.run_config import TaskConfig\n"
        "class Own:\n    class Config(TaskConfig):\n        size: int = 3\n"
        "class Bare: pass\n"
    )
    yield "own_task_module"
    sys.modules.pop("own_task_module", None)


def test_task_class_by_module_and_name(own_module):
    config = load_config(None, [f"task.type={own_module}:Own", "task.size=5"]).config
    assert config.task.model_dump() == {"type": "own_task_module:Own", "size": 5}
    assert "size: 5" in dump_yaml(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal_ml", "there is no task 'causal_ml'; did you mean causal_lm? There are: causal_lm, sequence_class"),
        ("causal_ml", "your own is package.module:Class"),
        ("own_task_module:Onw", "has no 'Onw'; did you mean own_task_module:Own?"),
        ("own_task_module:Bare", "a class with a class `Config`"),
        ("no_such_module:Own", "No module named 'no_such_module'"),
        (":Own", "Empty module name"),
    ],
)
def test_task_that_cannot_be_found(own_module, name, expected):
    text = problems_of(None, f"task.type={name}", "optim.lr=-1")
    assert f"command line: task.type={name}: " in text
    assert expected in text
    # The rest is judged all the same.
    assert "optim.lr=-1: expected number >= 0" in text


def test_module_that_fails_names_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("broken_task_module.py").write_text("x = 1\nx.nothing\n")
    text = problems_of(None, "task.type=broken_task_module:Own")
    assert "AttributeError: 'int' object has no attribute 'nothing'" in text
    assert "broken_task_module.py:2" in text


@pytest.mark.parametrize("through_library", [False, True])
def test_a_missing_module_names_the_users_line_and_what_to_install(tmp_path, monkeypatch, through_library):
    library = tmp_path / "lib" / "site-packages"
    library.mkdir(parents=True)
    (library / "wrapper_library.py").write_text("import no_such_package.inside\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(library), *sys.path])
    Path("task_that_imports.py").write_text(
        f"x = 1\nimport {'wrapper_library' if through_library else 'no_such_package'}\n"
    )
    text = problems_of(None, "task.type=task_that_imports:Own")
    assert f"No module named 'no_such_package' ({tmp_path}/task_that_imports.py:2)" in text
    assert "`pip install no_such_package`" in text


def test_a_module_that_is_not_there_is_no_fault_of_drawbars_lines(own_module):
    text = problems_of(None, "task.type=own_task_modul:Own")
    assert "No module named 'own_task_modul'; did you mean own_task_module? If it is your own" in text
    assert "imports.py" not in text


# ---- unknown keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("optim:\n  lrr: 1.0\n", "config.yaml:2: optim.lrr: unknown key; did you mean optim.lr?"),
        ("lr: 1.0\n", "config.yaml:1: lr: unknown key; did you mean optim.lr?"),
        (
            "tracking: {every: 5}\n",
            "unknown key; did you mean tracking.log_every or eval.every or checkpoint.every?",
        ),
        ("task: {tokenizer: {vocab: 300}}\n", "did you mean task.tokenizer.vocab_size?"),
        ("optimizer: {lr: 1.0}\n", "optimizer: unknown key; did you mean optim?"),
        ("model: gpt2\n", "model: unknown key; did you mean task.model?"),
        ("checkpoint: {zzzz: 1}\n", "unknown key; allowed in checkpoint: every, keep, keep_best"),
        ("zzzz: 1\n", "unknown key; allowed here: run, task, data, lora, train, optim, precision"),
        ("1: 2\n", "config.yaml:1: 1: unknown key"),
        ("null: 2\n", "config.yaml:1: null: unknown key"),
    ],
)
def test_unknown_key(write, yaml, line):
    assert line in problems_of(write(yaml))


def test_unknown_key_on_the_command_line():
    assert "command line: optim.lrr=1: unknown key; did you mean optim.lr?" in problems_of(None, "optim.lrr=1")


# ---- wrong values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "line"),
    [
        ("device: gpu\n", "got 'gpu'; did you mean cuda?"),
        ("tracking: {trackers: [wanb]}\n", "a section of options: tracking.trackers={wanb: {}}"),
        ("task: {type: seq2seq, model: t5, source_prefix: {translate: null}}\n", "a text with a colon needs quotes"),
        ("precision: bf61\n", "expected auto | fp32 | bf16 | fp16, got 'bf61'; did you mean bf16?"),
        ("optim: {schedule: Cosine}\n", "got 'Cosine'; did you mean cosine?"),
        ("train: {global_batch: '32'}\n", "expected whole number >= 1, got '32'; did you mean 32, without quotes?"),
        ("train: {steps: '1,000'}\n", "got '1,000'; did you mean 1000, without quotes?"),
        ("train: {steps: 1e3}\n", "expected whole number >= 1 | null, got 1000.0; did you mean 1000?"),
        ("train: {steps: true}\n", "expected whole number >= 1 | null, got true\n"),
        ("train: {micro_batch: 0}\n", "train.micro_batch: expected whole number >= 1 | auto, got 0\n"),
        ("train: {micro_batch: atuo}\n", "expected whole number >= 1 | auto, got 'atuo'; did you mean auto?"),
        ("optim: {warmup: 5%}\n", "got '5%'; did you mean 0.05, without quotes?"),
        ("optim: {warmup: 1.5}\n", "expected whole number >= 0 | number >= 0 and < 1, got 1.5\n"),
        ("optim: {lr: nan}\n", "optim.lr: expected number >= 0, got 'nan'\n"),
        ("run: {name: 5}\n", 'got 5; did you mean the text "5", in quotes? On the command line: run.name=\'"5"\''),
        ("optim: {lr: .inf}\n", "optim.lr: expected number >= 0, got Infinity\n"),
        ("optim: {lr: .nan}\n", "optim.lr: expected number >= 0, got NaN\n"),
        ("optim: {betas: [0.9]}\n", "optim.betas: expected list of 2: "),
        ("optim: {betas: [0.9, x]}\n", "optim.betas.1: expected a valid number, got 'x'\n"),
        ("data: {train: [a, 3]}\n", "data.train.1: expected a valid string, got 3\n"),
        (
            "data: {train: {a: 3}}\n",
            "data.train.a: unknown key; allowed in data.train: files, reader, parallel, dataset,",
        ),
        (
            "data: {train: 3}\n",
            "data.train: expected text | section (files, reader, parallel, dataset, subset, split, ",
        ),
        ("data: {streaming: yes}\n", "expected true | false, got 'yes'; did you mean true?"),
        ("data: {streaming: Off}\n", "got 'Off'; did you mean false?"),
        ("eval: {patience: none}\n", "got 'none'; did you mean null?"),
        ("run: {name: a b}\n", "run.name: expected text of letters, digits, dots, dashes and underscores (first a "),
        ("run: {name: ''}\n", "run.name: expected text of letters, digits, dots, dashes and underscores"),
        (
            "cluster: {modules: [cuda, a b]}\n",
            "expected list of text of letters, digits and _ . , @ + / -, at most 128 ",
        ),
        ("task: {tokenizer: 5}\n", "task.tokenizer: expected text | section (train, vocab_size) | null, got 5\n"),
        ("task: {tokenizer: {vocab_size: 300}}\n", "task.tokenizer.train: missing; expected byte_bpe"),
        ("tracking: {wandb: {project: x}}\n", "tracking.wandb: unknown key; did you mean tracking.trackers?"),
        ("tracking: {trackers: {wandb: {api_key: abc}}}\n", "tracking.trackers: api_key looks like a secret"),
        ("tracking: {trackers: {mlflow: {uri: 'http://me:abc@host'}}}\n", "tracking.trackers: uri looks like a secret"),
        ("callbacks: [{mine:Bot: {slack_token: abc}}]\n", "callbacks: slack_token looks like a secret"),
        ("tracking: {profile: {}}\n", "config.yaml:1: tracking.profile.start: missing; expected whole number >= 1"),
        ("optim: fast\n", "config.yaml:1: optim: expected a section of keys and values, got 'fast'\n"),
        ("optim:\ndata: {}\n", "optim: expected a section of keys and values, got null; indent its keys below it"),
        ("task: {type: 3}\n", "task.type: expected text, got 3\n"),
        ("optim: {lr: !!python/object:os.system x}\n", "config.yaml:1: optim.lr: not a plain value: YAML tags"),
        ('run: {name: "\\ud800"}\n', "run.name: not a plain value"),
    ],
)
def test_wrong_value(write, yaml, line):
    text = problems_of(write(yaml))
    assert line in text
    assert "config.yaml:1: " in text


def test_a_union_gives_one_problem_for_each_key(write):
    text = problems_of(write("train: {micro_batch: aut}\ntask: {tokenizer: [1]}\n"))
    assert text.startswith("2 problems:\n")
    assert text.count("train.micro_batch") == 1
    assert text.count("task.tokenizer") == 1
    assert "Input should" not in text


def test_an_item_of_a_list_has_its_own_line(write):
    assert "config.yaml:4: data.train.1: " in problems_of(write("data:\n  train:\n    - a\n    - 3\n"))


def test_all_problems_at_once_each_with_its_place(write):
    path = write("optim:\n  lrr: 1\nprecision: bf61\nrun: {seed: -1}\n")
    lines = problems_of(path, "train.steps=0", "evel.every=3", "nonsense").splitlines()
    assert lines[0] == "6 problems:"
    found = {line.split(": expected")[0].split(": unknown")[0] for line in lines[1:7]}
    assert found == {
        "config.yaml:2: optim.lrr",
        "config.yaml:3: precision",
        "config.yaml:4: run.seed",
        "command line: train.steps=0",
        "command line: evel.every=3: evel",
        "command line: nonsense",
    }
    assert "drawbar config explain" in lines[-1]


def test_variable_that_is_not_set(write, monkeypatch):
    monkeypatch.delenv("NO_SUCH_PLACE", raising=False)
    text = problems_of(write("data:\n  train: '${NO_SUCH_PLACE}/a.txt'\n"))
    assert "config.yaml:2: data.train: the environment variable NO_SUCH_PLACE is not set" in text


# ---- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optim.lr", "expected KEY=VALUE"),
        ("=3", "the key is not complete"),
        ("optim..lr=3", "the key is not complete"),
        ("eval.patience=", "there is no value; write eval.patience=null for none"),
        (
            "data.train=*.txt",
            "the value is not YAML (found undefined alias '.txt'); quote text with special",
        ),
        ("data.train=#a.txt", "there is no value; write data.train=null for none"),
        ("task.from_scratch.n_layer=", "there is no value; write task.from_scratch.n_layer=null for none"),
        ("run.name=", "there is no value; expected text of letters, digits, dots"),
        ("run.name=null", "expected text of letters, digits, dots"),
        ("run.dir=", "there is no value; expected text; the default is runs"),
        ("eval.metric=null", "expected text, got null; the default is loss"),
        ("nonsense=", "there is no value"),
        ("train.steps=!!int x", "the value is not YAML (a value cannot be read: "),
        ("data.train=[a", "the value is not YAML"),
        ("optim.lr=abc", "expected number >= 0, got 'abc'"),
        ("train.epochs.foo=1", 'train.epochs: expected number > 0 | null, got {"foo": 1}'),
        ("optim={lrr: 1}", "optim.lrr: unknown key; did you mean optim.lr?"),
    ],
)
def test_override_that_is_wrong(override, reason):
    assert f"command line: {override}: {reason}" in problems_of(None, override)


def test_override_below_a_value_does_not_lose_the_value_in_silence(write):
    text = problems_of(write("task:\n  tokenizer: gpt2\n"), "task.tokenizer.vocab_size=300")
    assert "task.tokenizer has a value already (config.yaml:2)" in text


def test_glob_that_is_no_yaml_shows_how_to_quote_it():
    assert "quote text with special characters: data.train='\"*.txt\"'" in problems_of(None, "data.train=*.txt")
    assert load_config(None, ['data.train="*.txt"']).config.data.train == "*.txt"


# ---- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("a: 1\nb: [1\nc: 2\n", "config.yaml:3: not valid YAML: expected ',' or ']'"),
        ("a:\n\t- b\n", "indent with spaces, not with tabs"),
        ("optim:\n  lr: 1\n  lr: 2\n", 'config.yaml:3: not valid YAML: found duplicate key "lr"'),
        ("data: {train: x}\n---\nrun: {}\n", "config.yaml:2: not valid YAML"),
        ("data:\n  train: *.txt\n", "put text that starts with * or & in quotes"),
        ("a: b: c\n", "config.yaml:1: not valid YAML"),
        ("a: \0\n", "not valid YAML"),
        ("a: !!bool maybe\n", "not valid YAML: a value cannot be read"),
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "the file has no keys and values at its top level"),
        ("hello\n", "the file has no keys and values at its top level"),
        (b"run:\n  name: \xff\n", "the file is not UTF-8 text\n  where: config.yaml:2"),
        ("a: " + "[" * 1100, "config.yaml"),
    ],
)
def test_file_that_is_no_configuration(write, yaml, expected):
    text = problems_of(write(yaml))
    assert expected in text
    assert "config.yaml" in text


def test_aliases_that_stand_for_more_than_memory_holds(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "aliases expand to more" in problems_of(write("\n".join(lines) + "\n"))


def test_missing_file_suggests_the_nearest(write):
    write("run: {}\n")
    text = problems_of("confg.yaml")
    assert "there is no such file\n  where: confg.yaml" in text
    assert "did you mean config.yaml?" in text
    assert "the folder nowhere does not exist either" in problems_of("nowhere/config.yaml")


def test_folder_instead_of_a_file(tmp_path):
    assert "this is a folder" in problems_of(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_that_may_not_be_read(write):
    path = write("run: {}\n")
    Path(path).chmod(0)
    assert "Permission denied" in problems_of(path)


# ---- writing it back -------------------------------------------------------------------------------------------


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda text: text[0] != "~" and "$" not in text
)
floats = st.floats(min_value=0, exclude_min=True, max_value=1, exclude_max=True)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "run": st.fixed_dictionaries({"name": st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,12}", fullmatch=True)}),
        "task": st.fixed_dictionaries(
            {
                "model": texts,
                "from_scratch": st.none() | st.dictionaries(st.text(st.characters(codec="utf-8")), plain_values),
                "tokenizer": st.none() | texts | st.just(TokenizerTraining(train="byte_bpe", vocab_size=300)),
            }
        ),
        "data": st.fixed_dictionaries({"train": st.none() | texts | st.lists(texts, max_size=3)}),
        "train": st.fixed_dictionaries({"micro_batch": st.just("auto") | st.integers(min_value=1), "epochs": floats}),
        "optim": st.fixed_dictionaries(
            {"lr": floats, "betas": st.tuples(floats, floats), "warmup": st.integers(min_value=0) | floats}
        ),
    },
)


@settings(max_examples=20, deadline=None)
@given(values=configs)
def test_dump_is_read_back_equal(tmp_path_factory, values):
    config = run_config_type(CausalLMConfig).model_validate(values)
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    again = load_config(path).config
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)
    # A comment behind every value must not change what is read.
    origins = dict.fromkeys(load_config(path).origins, "a comment")
    path.write_text(dump_yaml(config, origins), encoding="utf-8")
    assert load_config(path).config == config


def test_dump_writes_every_default():
    text = dump_yaml(RunConfig())
    assert "  lr: 0.0003\n" in text
    assert "  patience: null\n" in text
    assert "  betas: [0.9, 0.999]\n" in text


def test_dump_keeps_infinity_of_a_model_option(write):
    config = load_config(None, ["task.from_scratch.time_limit=[0.0, .inf]"]).config
    assert load_config(write(dump_yaml(config))).config.task.from_scratch == {"time_limit": [0.0, float("inf")]}


def test_loaded_config_can_be_made_by_hand():
    assert LoadedConfig(RunConfig(), {}, None).origin("run.name") == Origin("default")


# ---- start-up --------------------------------------------------------------------------------------------------


def test_no_torch_is_imported(write):
    path = write("task: {type: causal_lm}\n")
    script = (
        "import sys\n"
        "from drawbar.config.io.load_config import dump_yaml, load_config\n"
        "import drawbar.config.io.compare, drawbar.config.io.explain, drawbar.config.rules.rule_table\n"
        f"dump_yaml(load_config({path!r}).config)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_text_with_a_colon_on_the_command_line_is_to_be_quoted() -> None:
    text = problems_of(None, "task.type=seq2seq", "task.model=t5", "task.source_prefix=translate: ")
    assert "needs its own quotes: 'task.source_prefix=\"translate: \"'" in text
    quoted = ["task.type=seq2seq", "task.model=t5", 'task.source_prefix="translate: "']
    assert load_config(None, quoted).config.task.source_prefix == "translate: "


def test_the_origin_of_a_section_is_that_of_a_key_in_it() -> None:
    loaded = load_config(None, ["lora.rank=4"])
    assert str(loaded.origin("lora")) == "command line"
    assert str(loaded.origin("task")) == "default"
