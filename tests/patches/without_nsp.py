"""A patched Megatron tree in runs that do not turn nested sequence parallelism on; one process.

    python without_nsp.py FOLDER

Prints `untouched` when groups, data loader and parser do what they do without the patches.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.training.arguments import add_megatron_arguments
from megatron.training.datasets import data_samplers

from megatron_nsp.config import NSPConfig
from megatron_nsp.mcore import parallel_state
from megatron_nsp.mcore.args import config_from_args

# what the loader reads; `nsp_*` are absent, as in a tree that has the sampler hook alone
LOADER_ARGS = {
    "dataloader_type": "single",
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "full_validation": False,
    "hybrid_context_parallel": False,
    "num_workers": 0,
}


def check_groups(store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    assert not parallel_state.nested_groups_are_initialized()
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()


def check_loader() -> None:
    args = SimpleNamespace(**LOADER_ARGS)
    data_samplers.get_args = lambda: args
    dataset = torch.utils.data.TensorDataset(torch.arange(8))
    loader = data_samplers.build_pretraining_data_loader(dataset, 2)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert [batch[0].tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]
    # flags that such a run would ignore
    args.nsp_batch_tokens = 1000
    with pytest.raises(ValueError, match="--nsp-batch-tokens would have no effect"):
        data_samplers.build_pretraining_data_loader(dataset, 2)


def check_parser() -> None:
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert config_from_args(parser.parse_args([])) == NSPConfig()


if __name__ == "__main__":
    check_groups(Path(sys.argv[1]) / "store")
    check_loader()
    check_parser()
    dist.destroy_process_group()
    print("untouched")
