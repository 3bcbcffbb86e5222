"""docs/walkthroughs: their commands are those that the tests of examples/ run, or run here; no old setting is left."""

import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from pages import blocks, run_command, unknown_settings
from ruamel.yaml import YAML

import drawbar
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_rules

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "walkthroughs"
EXAMPLES = {
    "subclass_and_go": "subclass_and_go",
    "yaml_classifier": "sst2_bart",
    "switch_environment": "switch_strategy",
    "llama_at_scale": "llama_at_scale",
    "run_clm_on_slurm": "gpt2_lm",
}
OLD = {
    # FlagAI-Open/FlagAI, flagai/trainer.py: Trainer.__init__
    "switch_environment": """
        timers env_type pytorch_device experiment_name batch_size gradient_accumulation_steps weight_decay lr warm_up
        epochs save_interval eval_interval log_interval seed fp16 clip_grad checkpoint_activations tokenizer save_dir
        save_best save_optim save_rng load_dir load_type load_optim load_rng tensorboard_dir
        deepspeed_activation_checkpointing num_checkpoints master_ip master_port num_nodes num_gpus hostfile
        deepspeed_config model_parallel_size training_script
    """,
    # eth-easl/fmengine, cli/train.py, and the first level of configs/llama.json and configs/llama_lora.json
    "llama_at_scale": """
        init_ckpt use_flash_attn use_fused_ops use_deepspeed rank local_rank pipe_parallel_size model_parallel_size
        world_size seed deepspeed_config data_path num_workers cache_dir output_dir max_seq_len train_steps eval_steps
        save_steps log_steps pretrain train_micro_batch_size_per_gpu train_batch_size steps_per_print gradient_clipping
        lr-decay-style warmup bf16 offload_optimizer fp16 optimizer min_lr activation_checkpointing wall_clock_breakdown
        precision data_types zero_optimization scheduler flops_profiler lora
    """,
    # huggingface/transformers, examples/pytorch/language-modeling/run_clm.py: its two classes of arguments
    "run_clm_on_slurm": """
        model_name_or_path model_type config_overrides config_name tokenizer_name cache_dir use_fast_tokenizer
        model_revision token trust_remote_code dtype low_cpu_mem_usage dataset_name dataset_config_name train_file
        validation_file max_train_samples max_eval_samples streaming block_size overwrite_cache
        validation_split_percentage preprocessing_num_workers keep_linebreaks
    """,
    # the methods of a task class
    "subclass_and_go": """
        get_train_arguments get_test_arguments get_tokenizer get_model construct_instance process_inputs collate_fn
        forward_step loss_function inference process_outs compute_score
    """,
}
COMMAND = re.compile(r"`((?:drawbar|python task\.py|torchrun) [^`]+)`")


def page_text(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str) -> list[tuple[str, str]]:
    """The rows of all tables: what it is today, and here."""
    return [(old, new) for old, new in re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE) if old != "---"]


def example_folder(page: Path, folder: Path) -> Path:
    """A copy of the page's example, with the JSON files that the page shows, and data files for `submit` to find."""
    shutil.copytree(ROOT / "examples" / EXAMPLES[page.stem], folder, dirs_exist_ok=True)
    for block in blocks(page):
        if block.language == "json":
            (folder / f"{block.mark}.json").write_text(block.text, encoding="utf-8")
    for file in ("train.jsonl", "valid.jsonl", "train.tsv", "dev.tsv", "test.tsv", "test.txt", "valid.txt"):
        (folder / file).write_text("{}\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_commands_of_the_table_are_those_of_the_examples(name: str) -> None:
    """They are in a README of examples/, whose commands are run. Of the others, `submit` is for other machines and
    `report` has a page of its own; the settings of `train` are looked at."""
    run = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("examples/*/README.md"))
    section = page_text(name).split("## The commands")[1].split("\n## ")[0]
    told = [command for _, new in rows(section) for command in COMMAND.findall(new)]
    assert told
    with chdir(ROOT / "examples" / EXAMPLES[name]):
        for command in told:
            words = shlex.split(command)
            if f"\n{command}\n" in run or {"submit", "report"} & set(words):
                continue
            assert words[:2] == ["drawbar", "train"], f"no example runs: {command}"
            settings = [word for word in words[3:] if "deepspeed.config=" not in word]
            check_rules(drawbar.load_config(words[2], settings), RULES + TRAIN_RULES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_of_the_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict.fromkeys(("SST2", "WIKITEXT2"), str(tmp_path))
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    page = PAGES / f"{name}.md"
    folder = example_folder(page, tmp_path)
    for block in blocks(page):
        if block.language == "yaml" and block.mark == "hub":
            (folder / "part.yaml").write_text(block.text, encoding="utf-8")
            check_rules(drawbar.load_config(folder / "part.yaml"), RULES + TRAIN_RULES)
        if block.language == "bash":
            for command in block.text.splitlines():
                done = run_command(shlex.split(command), folder, env)
                assert done.code == 0, f"{command}\n{done.out}\n{done.err}"
                assert done.out.strip()


@pytest.mark.parametrize("name", OLD)
def test_no_old_setting_is_left_out(name: str) -> None:
    told = " ".join(old for old, _ in rows(page_text(name)))
    named = set(re.findall(r"`(?:--)?([\w-]+)", told))
    assert set(OLD[name].split()) - named == set()


def test_no_key_of_the_old_file_is_left_out() -> None:
    old = next(block.text for block in blocks(PAGES / "yaml_classifier.md") if block.mark == "old")
    told = " ".join(old for old, _ in rows(page_text("yaml_classifier")))
    keys = {f"{section}.{key}" for section, values in YAML(typ="safe").load(old).items() for key in values}
    assert {key for key in keys if not re.search(rf"\b{key.partition('.')[2]}\b", told)} == set()


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_setting_exists(page: Path) -> None:
    assert unknown_settings(page) == []
