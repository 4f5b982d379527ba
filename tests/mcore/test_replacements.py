"""Flags that are taken as a wish: what is set in their place, and what is said."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_nsp.mcore.replacements import REPLACEMENTS
from tests.mcore.command_line import parse
from tests.mcore.launch import MODEL

pytestmark = pytest.mark.usefixtures("help_texts")

EXAMPLES = {
    "": "--calculate-per-token-loss is switched on: ranks hold different numbers of tokens, so "
    "losses are summed over tokens",
    "--dataloader-type cyclic": "--dataloader-type cyclic is replaced: the plan says which rank "
    "reads what",
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 256": "--max-seqlen-per-dp-cp-rank 256 "
    "is replaced by --nsp-token-budget: the most tokens of a rank in one micro-batch",
    "--context-parallel-size 3 --seq-length 510": "--context-parallel-size 3 is replaced: a long "
    "sample is shared by as many data-parallel ranks as it needs, a short one by none",
    "--hybrid-context-parallel": "--hybrid-context-parallel is replaced: the plan says how many "
    "ranks share a sample",
    "--cp-comm-type a2a": "--cp-comm-type is replaced by --nsp-backend auto: how ranks exchange is "
    "chosen for each node",
    "--num-experts 4 --moe-token-dispatcher-type allgather": (
        "--moe-token-dispatcher-type allgather is replaced by alltoall: ranks hold different "
        "numbers of tokens"
    ),
    "--num-experts 4 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
    "--no-rope-fusion": (
        "--moe-hybridep-pad-uneven-dispatch-inputs is switched on: ranks hold different numbers of "
        "tokens"
    ),
    "--spec tests.mcore.local_stack SPEC --hybrid-override-pattern *-": (
        "--hybrid-override-pattern is replaced by --hybrid-layer-pattern *-, its newer name"
    ),
    "--multi-latent-attention": "--multi-latent-attention runs with --no-rope-fusion: the fused "
    "kernel rotates by row and not by position",
    "--ddp-average-in-collective": "--ddp-average-in-collective is switched off: gradients are "
    "summed over ranks and divided by tokens, not by ranks",
} | {
    flag: f"{flag} is switched off: {why}"
    for flags, why in (
        (
            ("--tp-comm-overlap", "--defer-embedding-wgrad-compute"),
            "its buffers have one number of rows, and micro-batches have theirs",
        ),
        (
            (
                "--overlap-moe-expert-parallel-comm",
                "--delay-wgrad-compute",
                "--ep-overlap-early-attn-memory-release",
            ),
            "it takes the layers of two micro-batches apart, and each has its own exchanges",
        ),
    )
    for flag in flags
}


@pytest.mark.parametrize("flags", EXAMPLES)
def test_what_is_replaced_is_said_once(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, flags: str
) -> None:
    if "latent" in flags or "flex" in flags:  # CPU ranks have no such kernels to begin with
        monkeypatch.setattr("megatron_nsp.mcore.pretrain.set_cpu_defaults", lambda parser: None)
        monkeypatch.setattr("megatron_nsp.mcore.job.check_arguments", lambda args: None)
    # With context parallelism Megatron's validation asks the GPU for its capability.
    properties = SimpleNamespace(major=10, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: properties)
    left_out = {"--calculate-per-token-loss"} if flags == "" else set()
    left_out |= {"--group-query-attention"} if "latent" in flags else set()
    model = [flag for flag in MODEL if flag not in left_out]
    args, job = parse(monkeypatch, [*model, "--data-path", str(prefix), *flags.split()])
    assert job.notices.count(EXAMPLES[flags]) == 1
    *replaced, documents, idle = job.notices
    assert documents.startswith("documents: ")
    assert len(replaced) == 1 + ("max-seqlen" in flags) and idle.startswith("without effect: ")
    assert args.calculate_per_token_loss and args.context_parallel_size == 1
    assert not args.overlap_moe_expert_parallel_comm
    assert not args.hybrid_context_parallel and args.dataloader_type == "external"
    assert args.cp_comm_type == ["p2p"] and not args.apply_rope_fusion
    assert job.config.token_budget == (256 if "max-seqlen" in flags else None)
    # Megatron counts batches by context-parallel groups.
    assert args.data_parallel_size == (2 if "--context-parallel-size" in flags else 6)


def test_every_row_has_an_example() -> None:
    assert {row.flag for row in REPLACEMENTS} == {line.split()[0] for line in EXAMPLES.values()}


def test_a_job_that_asks_for_nothing_else_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    flags = ["--data-path", str(prefix), "--attention-dropout", "0"]
    _, job = parse(monkeypatch, [*MODEL, *flags])
    assert job.notices == ("documents: 3 to train on",)
