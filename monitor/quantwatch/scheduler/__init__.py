"""Queues the slots of checks when they are due: leader lease, wake-up clock, decisions."""

from quantwatch.scheduler.loop import Scheduler

__all__ = ["Scheduler"]
