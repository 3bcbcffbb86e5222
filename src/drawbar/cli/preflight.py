"""What ``drawbar submit`` looks at before the job waits in a queue, besides the configuration."""

from typing import TYPE_CHECKING

from drawbar.launch.folder_facts import check_room

if TYPE_CHECKING:
    from drawbar.config.schema.run_config import RunConfig
    from drawbar.launch.job import Job
    from drawbar.launch.launcher import Launcher
    from drawbar.tasks.task import Task


def check_before_queue(config: "RunConfig", job: "Job", launcher: "Launcher", task: "type[Task] | None") -> list[str]:
    """Check a job before it is submitted. Returns notes for the user about a job that passes.

    Raises:
        UserError: a data file cannot be used, the run's folder cannot be written, or the launcher could never run it.
    """
    if not job.cluster.preflight:
        return []
    notes: list[str] = []
    if launcher.shares_disk:
        notes += check_data(config) if _reads_files(config, task) else []
        check_room(job.run_dir)
    return notes + launcher.check(job)


def _reads_files(config: "RunConfig", task: "type[Task] | None") -> bool:
    """Whether the settings ``data`` name the records: a task of the user's may find its own."""
    if task is None and ":" not in config.task.type:
        return True
    from drawbar.tasks.task import Task
    from drawbar.tasks.task_registry import task_class  # the user's module has imported torch by now

    return (task or task_class(config.task.type)).records is Task.records


def check_data(config: "RunConfig") -> list[str]:
    """Find the files of the data, and see whether there are encoded ones.

    Raises:
        UserError: a file is missing, empty or of an unknown kind.
    """
    from drawbar.data.sources import open_records

    data = config.data
    names = ["train", *(["validation"] if data.validation or data.validation_share else [])]
    for name in names:
        open_records(data, name)
    if data.streaming:
        names.remove("train")
    cached = [name for name in names if any(config.cache_dir.glob(f"{name}-*/meta.json"))]
    missing = [name for name in names if name not in cached]
    notes = []
    if cached:
        notes.append(
            f"{config.cache_dir} has encoded data ({', '.join(cached)}); where they are of other settings, the job "
            "encodes its own first"
        )
    if missing:
        notes.append(f"the job will encode its data first ({', '.join(missing)}); `drawbar prepare` does it here")
    return notes
