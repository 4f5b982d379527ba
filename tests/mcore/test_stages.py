"""Which layers are on which stage: for many settings, what Megatron itself would build.

Every setting goes through Megatron's parser and validation, and its own functions then say what
each rank builds, from the transformer configuration alone.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state as mpu
from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.models.hybrid.hybrid_layer_allocation import select_pipeline_segment
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.mcore.layers import layers_of_stages
from megatron_nsp.mcore.model import model_config, model_shape
from megatron_nsp.mcore.pretrain import parse_job
from megatron_nsp.mcore.stages import chunk_layers, virtual_stages
from tests.mcore.launch import MODEL

pytestmark = pytest.mark.usefixtures("help_texts")

NUM_SETTINGS = 50


def random_flags(rng: random.Random) -> Iterator[str]:
    """A pipeline of up to four ranks, its layers shared out in some way or other."""
    ranks, chunks = rng.randint(2, 4), rng.randint(1, 3)
    num_layers, how = ranks * chunks * rng.randint(1, 3), rng.randrange(5)
    yield from ("--pipeline-model-parallel-size", str(ranks))
    if how == 0 and chunks > 1:
        per_chunk = num_layers // ranks // chunks
        yield from ("--num-layers-per-virtual-pipeline-stage", str(per_chunk))
    elif how == 1:
        rows = [["t"] * rng.randint(0, 3) for _ in range(ranks * chunks)]
        rows[rng.randrange(len(rows))] += ["t"]
        num_layers = sum(map(len, rows))
        rows[0], rows[-1] = ["E", *rows[0]], [*rows[-1], "L"]
        yield from ("--pipeline-model-parallel-layout", "|".join(map("".join, rows)))
    elif chunks > 1:
        yield from ("--num-virtual-stages-per-pipeline-rank", str(chunks))
    if how == 2:
        first, last = (chunks * rng.randint(1, 2) for _ in range(2))
        num_layers = first + last + (ranks - 2) * chunks * rng.randint(1, 2)
        yield from ("--decoder-first-pipeline-num-layers", str(first))
        if ranks > 2 or rng.random() < 0.5:
            yield from ("--decoder-last-pipeline-num-layers", str(last))
    for end in ("embedding", "loss"):
        if how == 3 and rng.random() < 0.7:
            num_layers -= 1
            yield f"--account-for-{end}-in-pipeline-split"
    if rng.random() < 0.1:
        num_layers += 1
    yield from ("--num-layers", str(num_layers), "--global-batch-size", str(ranks))


def built(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[list[range]]:
    """The layers of each chunk, by pipeline rank, as Megatron's builders say."""
    chunks = config.virtual_pipeline_model_parallel_size
    size_of = "get_virtual_pipeline_model_parallel_world_size"
    monkeypatch.setattr(mpu, size_of, lambda: chunks)
    found = []
    for rank in range(config.pipeline_model_parallel_size):
        monkeypatch.setattr(mpu, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        found.append([])
        for chunk in range(chunks or 1):
            stage = chunk if chunks else None
            start = get_transformer_layer_offset(config, stage, rank)
            found[-1].append(range(start, start + get_num_layers_to_build(config, stage, rank)))
    return found


def test_chunks_hold_the_layers_that_megatron_builds_in_them(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    rng, refused, seen = random.Random(5), [], set()
    for _ in range(NUM_SETTINGS):
        flags = list(random_flags(rng))
        monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", *MODEL, "--data-path", str(prefix)])
        sys.argv += flags
        monkeypatch.setenv("WORLD_SIZE", flags[1])
        unset_global_variables()
        try:
            args, _ = parse_job()
            config = model_config(args).transformer
        except ValueError as error:
            refused.append((flags, str(error)))
            continue
        assert virtual_stages(args) == (config.virtual_pipeline_model_parallel_size or 1), flags
        expected = built(config, monkeypatch)
        assert chunk_layers(args) == expected, flags
        layers = sorted(layer for rank in expected for chunk in rank for layer in chunk)
        assert layers == list(range(args.num_layers))
        most = max(sum(map(len, rank)) for rank in expected)
        assert max(map(len, layers_of_stages(args))) == most
        args.padded_vocab_size = 256  # known once there is a tokenizer
        assert model_shape(args, 4).num_layers == most
        seen |= {flag for flag in flags if flag.startswith("--")}
    assert len(seen) == 10, seen  # each way of sharing layers out was taken at least once
    assert 0 < len(refused) < NUM_SETTINGS / 3, refused
    assert not any("\n" in message for _, message in refused)


@pytest.mark.parametrize(
    ("pattern", "ranks"), [("*-|*-*-|*|-*-", 2), ("*-|*-|*-|*-|*-|-*", 3), ("*-*-*-", 3)]
)
def test_segments_of_a_hybrid_model(
    monkeypatch: pytest.MonkeyPatch, pattern: str, ranks: int
) -> None:
    args = SimpleNamespace(
        hybrid_layer_pattern=pattern,
        num_layers=len(pattern.replace("|", "")),
        pipeline_model_parallel_size=ranks,
        pipeline_model_parallel_layout=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    chunks = max((pattern.count("|") + 1) // ranks, 1)
    distributed = hybrid_layer_allocation.torch.distributed
    monkeypatch.setattr(distributed, "get_world_size", lambda _: ranks)
    monkeypatch.setattr(hybrid_layer_allocation, "log_on_each_pipeline_stage", lambda *a, **k: None)
    assert virtual_stages(args) == chunks  # type: ignore[arg-type]
    for rank, own in enumerate(chunk_layers(args)):  # type: ignore[arg-type]
        monkeypatch.setattr(distributed, "get_rank", lambda _, rank=rank: rank)
        for chunk in range(chunks):
            stage = chunk if chunks > 1 else None
            layers, start = select_pipeline_segment(pattern, object(), stage)
            assert own[chunk] == range(start, start + len(layers))
