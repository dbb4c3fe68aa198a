"""Synthetic tasks: rows of ids made from random numbers, and what is to be said at some of their places.

A new task is one file like `recall.py` and one line here: `titans evaluate NAME` and the page of results know it then.
"""

from titans_lm.data.tasks.babilong import BabiLongTask
from titans_lm.data.tasks.common_words import CommonWordsTask
from titans_lm.data.tasks.needle import NeedleTask
from titans_lm.data.tasks.recall import RecallTask
from titans_lm.data.tasks.task import TaskPlan
from titans_lm.data.tasks.tracking import TrackingTask
from titans_lm.data.tasks.variables import VariablesTask

TASKS: dict[str, type[TaskPlan]] = {
    plan.name: plan
    for plan in (
        RecallTask,
        TrackingTask,
        NeedleTask,
        VariablesTask,
        CommonWordsTask,
        BabiLongTask,
    )
}
"""Every task by its word behind `titans evaluate`."""
