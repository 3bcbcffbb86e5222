"""The task of the soak's run: it meets the faults of its life, and notes what it does as lines of JSON in one file.

Lines of a start (one from each rank), of the samples of a micro-batch before its forward, and of a step that is done.
``START`` names the processes that were started together.
"""

from fault_table import TASK

PACE = 0.03
"""Seconds that a step takes in addition while there are faults to come: else too many pass before one is met."""
PATIENCE = 12
"""Steps after which a fault that has not come never will: the run would go on to its end."""

SOAK_TASK = f'''{TASK}
import json, sys

LIFE = os.environ.get("SOAK_LIFE")
RANK = int(os.environ.get("RANK", "0"))
START = os.environ.get("TORCHELASTIC_RUN_ID") or f"process {{os.getpid()}}"
NOTES = os.environ.get("SOAK_NOTES", "notes.jsonl")
planned, fate_of_start, begun = None, None, None
if LIFE and os.path.exists(f"lives/{{LIFE}}.json"):
    with open(f"lives/{{LIFE}}.json") as file:
        planned = json.load(file)
    met = 0
    if os.path.exists(f"lives/{{LIFE}}.met"):
        with open(f"lives/{{LIFE}}.met") as file:
            met = len(file.readlines())
    fate_of_start = planned[met] if met < len(planned) else None


def note(**what):
    write(NOTES, life=LIFE, start=START, rank=RANK, **what)


def write(path, **what):
    with open(path, "a") as file:
        file.write(json.dumps(what | {{"time": time.time()}}) + chr(10))


def meet(phase):
    """Meet the fate of this start, if it is for this rank and phase, and the step has come."""
    global fate_of_start, FAULT, made
    due = fate_of_start
    if due is None or begun is None or (due["phase"], due["who"]) != (phase, RANK) or made < begun + due["after"] - 1:
        return
    fate_of_start, FAULT = None, due["kind"]
    write(f"lives/{{LIFE}}.met", step=made + 1)
    if phase in ("evaluation", "callback", "save"):  # the step is made, and the next one counted before the run ends
        made += 1
    fate()


class Soaked(Fated):
    def num_targets(self, batch):  # asked once for every micro-batch, also where a pipeline calls no forward
        if begun is not None and sys._getframe(1).f_code.co_name != "eval_step":
            note(step=made + 1, ids=list(batch.ids))
        return super().num_targets(batch)


class Diary(Notes):
    def on_train_start(self, run):
        global begun
        super().on_train_start(run)
        begun = made
        note(begun=begun, pid=os.getpid())

    def on_step(self, run, info):
        super().on_step(run, info)
        if RANK == 0:
            note(done=info.step)
        if LIFE is not None and planned is not None:
            time.sleep({PACE})
        if fate_of_start is not None and made > begun + fate_of_start["after"] + {PATIENCE}:
            raise RuntimeError(f"this never came: {{fate_of_start}}")
'''
