"""Discrete events over the schedules of all ranks: what a step would take, and what it waits for.

Pure: plans and profiles go in, times come out. Nothing here runs a model.
"""

from megatron_nsp.simulator.step import Breakdown, StepSettings, simulate_plan

__all__ = ["Breakdown", "StepSettings", "simulate_plan"]
