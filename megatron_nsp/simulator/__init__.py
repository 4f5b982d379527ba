"""Discrete events over the schedules of all ranks: what a step would take, and what it waits for.

Pure: plans and profiles go in, times come out. Nothing here runs a model.
"""

from megatron_nsp.simulator.iteration import Breakdown, IterationSettings, simulate_plan
from megatron_nsp.simulator.marks import SavedSamples, mark_saved

__all__ = ["Breakdown", "IterationSettings", "SavedSamples", "mark_saved", "simulate_plan"]
