"""Runs in .te-venv (`make te`); elsewhere there is nothing to collect."""

import importlib.util
import os

# TE compiles small functions otherwise, once in every forked rank.
os.environ["NVTE_TORCH_COMPILE"] = "0"

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]
