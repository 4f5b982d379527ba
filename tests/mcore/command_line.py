"""Parses command lines in this process, as far as pretrain_nsp does before it starts anything."""

import argparse
import sys

import pytest
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.mcore.job import Job
from megatron_nsp.mcore.model import model_config
from megatron_nsp.mcore.pretrain import parse_job


def parse(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> tuple[argparse.Namespace, Job]:
    """Parses a command line of a six-rank job."""
    monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", *flags])
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    unset_global_variables()  # left behind by flags that were refused after Megatron's validation
    args, job = parse_job()
    model_config(args)
    return args, job
