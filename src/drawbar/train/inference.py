"""Evaluation and generation from a run directory."""

from contextlib import ExitStack, closing

from drawbar.checkpoint.space import explain_full_disk
from drawbar.config.schema import RunConfig
from drawbar.evaluation.evaluate import evaluate, write_results
from drawbar.evaluation.generate import Sampling, generate_text
from drawbar.runtime.dist import World
from drawbar.runtime.env import Place, choose_device
from drawbar.runtime.log import open_log_file, start_logging
from drawbar.runtime.seed import seed_everything
from drawbar.tasks.registry import task_class
from drawbar.tasks.task import Task
from drawbar.tracking.console import make_console
from drawbar.train.setup import build_task, eval_micro_batch, load_split, open_checkpoint


def evaluate_run(
    config: RunConfig, task_type: type[Task] | None, split_name: str, which: str | None
) -> dict[str, float]:
    """Evaluate one checkpoint on one split; print the scores and write ``eval/<split>/scores.json``.

    Raises:
        UserError: there is no such checkpoint or data.
    """
    place = Place.from_environment()
    device = choose_device(config.device, place)
    console = make_console(place.first)
    start_logging(place.rank, console.logging_handler())
    with ExitStack() as stack:
        stack.callback(console.stop)
        stack.enter_context(explain_full_disk(config.run_dir))
        world = stack.enter_context(World(place, device, config.launch.timeout))
        open_log_file(config.run_dir, world.rank)
        task = build_task(task_type or task_class(config.task.type), config, world, config.run_dir)
        split = load_split(task, split_name, config, world, console)
        engine, step = open_checkpoint(task, config, which, world)
        with closing(engine):
            evaluation = evaluate(
                engine,
                task,
                split,
                world,
                eval_micro_batch(config, world),
                progress=lambda done, total: console.phase(f"evaluating {split_name}", done, total),
            )
        if world.first:
            write_results(config.run_dir / "eval" / split_name, evaluation, step)
            console.evaluation(step, {f"eval/{split_name}/{name}": value for name, value in evaluation.scores.items()})
    return evaluation.scores


def generate_from_run(
    config: RunConfig,
    task_type: type[Task] | None,
    prompts: list[str],
    sampling: Sampling,
    which: str | None,
    seed: int,
) -> list[str]:
    """What a checkpoint's model goes on with after each prompt, on one process."""
    place = Place()
    device = choose_device(config.device, place)
    seed_everything(seed)
    with World(place, device, config.launch.timeout) as world:
        task = build_task(task_type or task_class(config.task.type), config, world, config.run_dir)
        engine, _ = open_checkpoint(task, config, which, world)
        with closing(engine):
            return generate_text(engine, task.tokenizer, prompts, sampling)
