"""Awkward steps in Megatron's own loop, held against one rank. Cases named in each test."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.sampler import BatchSampler, always
from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, shared_checkpoint, train
from tests.mcore.plans import batches, each_degree, filler, mixed, record, root
from tests.mcore.test_equality import assert_same

TREE = SPTree(4, (1, 2, 4))


def documents(folder: Path, lengths: list[int]) -> list[str]:
    """Writes the documents; returns the flags of a run that draws all of them in each step."""
    write_documents(folder / "docs", lengths, seed=3)
    return ["--data-path", str(folder / "docs"), "--nsp-batch-tokens", str(sum(lengths))]


def forced(folder: Path, lengths: list[int], kinds: tuple, steps: int, **tree: object) -> str:
    """Records plans for those documents; returns the policy that replays them."""
    drawn = batches(folder / "docs", steps, sum(lengths), max(lengths))
    record(folder / "plans.jsonl", tree.get("tree", TREE), drawn, kinds)  # type: ignore[arg-type]
    return f"file:{folder / 'plans.jsonl'}"


def test_a3_an_over_long_document_is_left_out_and_counted(tmp_path: Path) -> None:
    flags = documents(tmp_path, [10000, 512, 512])
    flags += ["--nsp-batch-tokens", "1024", "--nsp-max-length", "8192", "--train-iters", "4"]
    run = train(4, tmp_path / "run", *flags)
    lines = [line for line in run.output.splitlines() if "nsp step" in line]
    assert len(lines) == 4 and all("targets: 1022 " in line for line in lines)
    drawn = BatchSampler(np.array([10000, 512, 512]), always(1024), max_length=8192, seed=7)
    met = [len(drawn.draw().over_long) for _ in range(4)]
    told = [f"{n} over-long ({n}0000 tokens: documents {', '.join('0' * n)})" for n in met]
    assert sum(met) >= 2 and all(
        text in line if count else "over-long" not in line
        for line, text, count in zip(lines, told, met, strict=True)
    )
    refused = train(4, tmp_path / "error", *flags, "--nsp-over-long", "error", check=False)
    message = "document 0 of --data-path has 10000 tokens, over --nsp-max-length 8192; 1 of 3"
    assert refused.returncode and refused.output.count(message) == 1


def test_e2_c2_token_counts_and_the_natural_plan(tmp_path: Path) -> None:
    flags = documents(tmp_path, [4096, 1, 1, 7])
    flags += ["--seq-length", "4096", "--max-position-embeddings", "4096", "--train-iters", "2"]
    one, four = (train(ranks, tmp_path / str(ranks), *flags) for ranks in (1, 4))
    assert_same(one, four, 2, 1e-5, 1e-5)
    for run in (one, four):
        assert run.output.count("tokens: 4105 | targets: 4101 ") == 2
        assert len(run.token_losses(0)) == 4101


def test_e3_ranks_without_targets(tmp_path: Path) -> None:
    flags = documents(tmp_path, [1024])
    flags += ["--seq-length", "1024", "--max-position-embeddings", "1024", "--train-iters", "2"]
    flags += ["--probe-mask-before=923"]
    policy = ["--nsp-policy", forced_root(tmp_path, [1024], 2)]
    one, four = train(1, tmp_path / "1", *flags), train(4, tmp_path / "4", *flags, *policy)
    assert [len(rank[0]["tokens"]) for rank in four.steps] == [0, 0, 0, 100]
    assert_same(one, four, 2, 1e-5, 1e-5)


def forced_root(folder: Path, lengths: list[int], steps: int) -> str:
    """Everything at the root in every step."""
    return forced(folder, lengths, (root,), steps)


def test_e3_a_step_without_any_target(tmp_path: Path) -> None:
    flags = documents(tmp_path, [1] * 8)
    run = train(4, tmp_path / "run", *flags, "--train-iters", "2")
    assert run.losses == [0.0, 0.0]
    assert "number of nan iterations:   0" in run.output
    assert run.output.count("targets: 0 (no targets in this step)") == 2
    gradients = run.grads(0)
    assert len(gradients) > 10 and all(not grad.any() for grad in gradients.values())


def test_g1_idle_experts_and_a_rank_without_tokens(tmp_path: Path) -> None:
    lengths = [90, 40, 17, 5]
    flags, top_1 = documents(tmp_path, lengths), "--moe-router-topk 1 --moe-router-pre-softmax"
    model = [*MOE, *top_1.split()]
    start = shared_checkpoint(tmp_path, tmp_path / "docs", *model)
    flags += [*model, *start, "--probe-one-expert", "--train-iters", "3"]
    one = train(1, tmp_path / "one", *flags)
    policy = forced(tmp_path, lengths, (filler, root, mixed), 3)
    spread = ["--expert-model-parallel-size", "4", "--nsp-policy", policy]
    four = train(4, tmp_path / "four", *flags, *spread)
    assert_same(one, four, 3, 1e-5, 1e-5)
    # Step 1 leaves three ranks with a filler token each, which the router is told to leave out.
    assert [rank[0]["padding"] for rank in four.steps] == [[1, 1]] * 3 + [[0, 0]]
    idle = {name: g for name, g in four.grads(0).items() if "local_experts.3" in name}
    assert idle and all(not grad.any() for grad in idle.values())
    busy = {name: g for name, g in four.grads(0).items() if "local_experts.0" in name}
    assert busy and all(grad.any() for grad in busy.values())


def test_j2_tensor_parallel_with_work_on_one_rank_of_the_domain(tmp_path: Path) -> None:
    lengths = [60, 33, 8, 1]
    flags = [*documents(tmp_path, lengths), "--probe-float64", "--train-iters", "4"]
    flags += shared_checkpoint(tmp_path, tmp_path / "docs", "--probe-float64")
    one = train(1, tmp_path / "one", *flags)
    policy = forced(tmp_path, lengths, (filler, root, mixed, filler), 4)
    split = ["--tensor-model-parallel-size", "2", "--nsp-policy", policy]
    eight = train(8, tmp_path / "eight", *flags, *split)
    assert_same(one, eight, 4, 1e-9, 1e-9)
    nodes = [Plan.from_json(line).active_nodes() for line in policy_lines(policy)]
    assert nodes[0] == (TREE.node(1, 3),)


def policy_lines(policy: str) -> list[str]:
    """The lines of a replay file."""
    return Path(policy.removeprefix("file:")).read_text().splitlines()


def test_d3_a_document_behind_another_has_the_losses_it_has_alone(tmp_path: Path) -> None:
    lengths = [60, 33, 20, 5]
    flags = [*documents(tmp_path, lengths), "--probe-float64", "--lr", "0", "--train-iters"]
    policy = forced(tmp_path, lengths, (filler, root, mixed), 3)
    packed = train(4, tmp_path / "packed", *flags, "3", "--nsp-policy", policy)
    assert [len(rank[0]["tokens"]) for rank in packed.steps] == [0, 0, 0, sum(lengths) - 4]
    one_a_step = train(1, tmp_path / "alone", *flags, "4", "--nsp-batch-tokens", "1")
    alone = [one_a_step.token_losses(step) for step in range(4)]
    assert all(len({document for document, _ in losses}) == 1 for losses in alone)
    expected = {token: loss for losses in alone for token, loss in losses.items()}
    for step in range(3):
        losses = packed.token_losses(step)
        assert losses.keys() == expected.keys()
        assert max(abs(losses[token] - loss) for token, loss in expected.items()) < 1e-9


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degrees"), [(28, 7, (1, 7)), (12, 3, (1, 3, 6))], ids=str
)
def test_degrees_that_are_no_powers_of_two_split_or_repeat_the_key_value_heads(
    tmp_path: Path, heads: int, kv_heads: int, degrees: tuple[int, ...]
) -> None:
    ranks, lengths, kinds = degrees[-1], [60, 33, 21, 8], (root, each_degree, mixed)
    flags = [*documents(tmp_path, lengths), "--probe-float64", "--train-iters", "3"]
    flags += ["--num-attention-heads", str(heads), "--num-query-groups", str(kv_heads)]
    flags += ["--hidden-size", str(4 * heads), "--ffn-hidden-size", "64"]
    policy = forced(tmp_path, lengths, kinds, 3, tree=SPTree(ranks, degrees))
    nested = ["--nsp-degrees", ",".join(map(str, degrees)), "--nsp-policy", policy]
    one, many = train(1, tmp_path / "1", *flags), train(ranks, tmp_path / "n", *flags, *nested)
    assert any(rank[0]["records"] for rank in many.steps)
    assert_same(one, many, 3, 1e-9, 1e-9)


def test_d2_groups_of_modules_stay_over_micro_batches_of_degrees_4_1_2(tmp_path: Path) -> None:
    lengths = [70, 64, 33, 20, 9, 1]
    flags = [*documents(tmp_path, lengths), "--train-iters", "2"]
    tree, plans = TREE, []
    for batch in batches(tmp_path / "docs", 2, sum(lengths)):
        degree = [(4, 1, 2)[place % 3] for place in range(6)]
        nodes = [tree.node(d, place % (4 // d)) for place, d in enumerate(degree)]
        micro_batch = [place % 3 for place in range(6)]
        plans.append(Plan.from_nodes(tree, batch.lengths, nodes, micro_batch, 3))
    path = tmp_path / "plans.jsonl"
    path.write_text("".join(plan.to_json() + "\n" for plan in plans))
    one = train(1, tmp_path / "one", *flags, "--global-batch-size", "3")
    policy = ["--nsp-policy", f"file:{path}", "--global-batch-size", "12"]
    four = train(4, tmp_path / "four", *flags, *policy)
    assert_same(one, four, 2, 1e-5, 1e-5)
    for rank in four.steps:
        assert rank[0]["groups"] and rank[0]["groups"] == rank[1]["groups"]
        assert len(rank[1]["rotary"]) == 6 and set(rank[1]["rotary"]) == {None}


def test_f1_f2_g2_a_tree_with_one_sample_runs_as_many_micro_batches_as_the_other(
    tmp_path: Path,
) -> None:
    """Two trees of two ranks that share one expert group; the second is idle in two passes."""
    lengths, tree = [90, 61, 40, 33, 17, 5], SPTree(4, (1, 2))
    flags = [*documents(tmp_path, lengths), *MOE, "--train-iters", "2"]
    flags += shared_checkpoint(tmp_path, tmp_path / "docs", *MOE)
    plans = []
    for batch in batches(tmp_path / "docs", 2, sum(lengths)):
        first = [tree.node(2, 0), tree.node(1, 0), tree.node(1, 1), tree.node(2, 0)]
        nodes = [*first, tree.node(2, 0), tree.node(1, 3)]
        plans.append(Plan.from_nodes(tree, batch.lengths, nodes, [0, 1, 1, 2, 2, 0], 3))
    (tmp_path / "plans").write_text("".join(plan.to_json() + "\n" for plan in plans))
    one = train(1, tmp_path / "one", *flags, "--global-batch-size", "3")
    split = ["--nsp-max-degree", "2", "--nsp-policy", f"file:{tmp_path / 'plans'}"]
    split += ["--global-batch-size", "12", "--expert-model-parallel-size", "4"]
    four = train(4, tmp_path / "four", *flags, *split)
    assert_same(one, four, 2, 1e-5, 1e-5)
    assert four.output.count("samples: 6 | tokens: 246 | targets: 240 ") == 2
    assert [len(rank[0]["tokens"]) > 0 for rank in four.steps] == [True, True, False, True]


RECOMPUTE = (  # noqa: SIM905
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
).split()


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One mixed run three times, and once with everything recomputed."""
    folder, lengths = tmp_path_factory.mktemp("repeated"), [130, 77, 64, 31, 8, 3, 1]
    flags = documents(folder, lengths)
    policy = forced(folder, lengths, (mixed,), 3)
    flags += ["--train-iters", "3", "--nsp-policy", policy]
    extra = {
        "first": [],
        "second": [],
        "serial": ["--no-nsp-overlap"],
        "recomputed": RECOMPUTE,
    }
    return {name: train(4, folder / name, *flags, *more) for name, more in extra.items()}


@pytest.mark.parametrize("other", ["second", "serial", "recomputed"])
def test_l3_same_bits(repeated: dict[str, Run], other: str) -> None:
    first, again = repeated["first"], repeated[other]
    assert first.losses == again.losses
    for step in range(3):
        expected, got = first.grads(step), again.grads(step)
        assert expected and all(grad.equal(got[name]) for name, grad in expected.items())


def test_h1_recompute_repeats_the_forward_exchanges_of_every_node(repeated: dict[str, Run]) -> None:
    for rank in range(4):
        plain = [len(step["records"]) for step in repeated["first"].steps[rank]]
        recomputed = [len(step["records"]) for step in repeated["recomputed"].steps[rank]]
        assert any(plain) and recomputed == [count * 6 // 4 for count in plain]


SHARDED = (  # noqa: SIM905
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
).split()


def test_i2_delayed_hosts_keep_shared_collectives_in_order(tmp_path: Path) -> None:
    lengths = [130, 77, 64, 31, 8, 3, 1, 20, 44]
    flags = [*documents(tmp_path, lengths), *MOE, "--expert-model-parallel-size", "2", *SHARDED]
    policy = forced(tmp_path, lengths, (mixed, each_degree), 4)
    flags += ["--nsp-policy", policy, "--train-iters", "4"]
    prompt = train(4, tmp_path / "prompt", *flags)
    for name, more in (("late", []), ("recomputed", RECOMPUTE)):
        run = train(4, tmp_path / name, *flags, "--probe-delays", "10", *more)
        assert run.losses == prompt.losses
        for step in range(4):
            assert max(rank[step]["max_in_flight"] for rank in run.steps) == 1
            lists = [[record.ranks for record in rank[step]["records"]] for rank in run.steps]
            for pair in combinations(range(4), 2):
                of_both = [
                    [ranks for ranks in lists[rank] if set(pair) <= set(ranks)] for rank in pair
                ]
                assert of_both[0] == of_both[1]


def test_c3_an_empty_document_is_left_out_and_counted(tmp_path: Path) -> None:
    write_documents(tmp_path / "docs", [30, 0, 20], seed=3)
    flags = ["--data-path", str(tmp_path / "docs"), "--nsp-batch-tokens", "150"]
    run = train(4, tmp_path / "run", *flags, "--train-iters", "2")
    lines = [line for line in run.output.splitlines() if "nsp step" in line]
    # Three epochs and a half of 50 tokens: every epoch passes over the empty document once.
    assert len(lines) == 2 and all("left out: " in line and " empty" in line for line in lines)
    assert {entry[0] for rank in run.steps for entry in rank[0]["tokens"]} == {0, 2}


def test_m1_operations_in_the_log_are_those_of_the_lengths_that_ran(tmp_path: Path) -> None:
    lengths = [130, 77, 64, 31, 8, 3, 1, 90, 55, 200, 12, 5]
    told = []
    for seq_length in ("512", "2048"):
        folder = tmp_path / seq_length
        folder.mkdir()
        flags = [*documents(folder, lengths), "--train-iters", "2", "--save-interval", "2"]
        flags += ["--seq-length", seq_length, "--max-position-embeddings", "2048"]
        flags += ["--log-progress", "--save", str(folder / "saved")]
        train(2, folder / "run", *flags)
        progress = (folder / "saved" / "progress.txt").read_text()
        told.append(re.findall(r"Floating-point operations: (\S+)", progress)[-1])
    # Two layers of MODEL: projections, MLP of three matrices, logits; a causal half of the scores.
    tokens, squares = 2 * sum(lengths), 2 * sum(n * n for n in lengths)
    layer = 64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 128
    forward = tokens * 2 * (2 * layer + 64 * 256) + squares * 2 * 2 * 64
    assert told[0] == told[1] and abs(float(told[0]) / (3 * forward) - 1) < 0.01
