"""Tree-level recomputation in Megatron's own loop: same bits, counted calls, counted bytes.

Cases H1, H2 and H3 of docs/cases.md. Counts are taken from outside: kernel calls in a wrapper
around the kernel, collectives by logging groups.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.saving import (
    NOTHING_SAVED,
    SavedSamples,
    SavedSizes,
    mark_saved,
    saved_bytes,
)
from megatron_nsp.plan.tree import SPTree
from tests.data_maker import write_documents
from tests.mcore.launch import MOE, Run, train
from tests.mcore.plans import batches

LENGTHS = [130, 77, 64, 31, 8, 3, 1, 90, 55, 12] * 2
BATCH_TOKENS = sum(LENGTHS)
NUM_LAYERS = 2
_WHOLE = ["--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method"]
FULL, BLOCK = [*_WHOLE, "uniform"], [*_WHOLE, "block"]
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]
ROW_BYTES, LSE_BYTES = 8 * 8 * 4, 4
"""Of one token of the tests' model in float32: 8 heads of 8 elements."""


def output(how: list[str]) -> SavedSizes:
    """The sizes of what the tests' model saves."""
    layers = 1 if how is BLOCK else NUM_LAYERS
    return SavedSizes(8, 0 if how is SELECTIVE else ROW_BYTES, LSE_BYTES, layers)


def write_plans(folder: Path, tree: SPTree, steps: int, num_micro_batches: int) -> list[Plan]:
    """Recorded plans with a sample on every level in each micro-batch, the others anywhere."""
    write_documents(folder / "docs", LENGTHS, seed=3)
    rng, plans = random.Random(7), []
    for batch in batches(folder / "docs", steps, BATCH_TOKENS, max(LENGTHS)):
        nodes = [rng.choice(list(tree.nodes())) for _ in batch.lengths]
        for place, degree in enumerate(tree.degrees * num_micro_batches):
            nodes[place] = tree.node(degree, rng.randrange(tree.num_ranks // degree))
        micro_batch = [
            place // len(tree.degrees) % num_micro_batches for place in range(len(nodes))
        ]
        plans.append(Plan.from_nodes(tree, batch.lengths, nodes, micro_batch, num_micro_batches))
    (folder / "plans.jsonl").write_text("".join(plan.to_json() + "\n" for plan in plans))
    return plans


def flags(folder: Path, steps: int, num_micro_batches: int, num_ranks: int = 4) -> list[str]:
    """The flags of a run that replays the plans of a folder."""
    return [
        *("--data-path", str(folder / "docs"), "--nsp-batch-tokens", str(BATCH_TOKENS)),
        *("--nsp-policy", f"file:{folder / 'plans.jsonl'}", "--train-iters", str(steps)),
        *("--global-batch-size", str(num_ranks * num_micro_batches), "--probe-recompute"),
    ]


def budget(plans: list[Plan], how: list[str], share: float) -> list[str]:
    """The flag for a share of what the fullest rank would save, and for inf all of it."""
    if share in (0.0, float("inf")):
        return ["--nsp-save-budget-gb", str(share)]
    most = max(mark_saved(plan, output(how), float("inf")).rank_bytes for plan in plans)
    return ["--nsp-save-budget-gb", repr(share * most / 1e9)]


def marks(plan: Plan, how: list[str], words: list[str]) -> SavedSamples:
    """What a run with this budget saves of a plan."""
    gigabytes = float(words[1])
    return mark_saved(plan, output(how), gigabytes * 1e9) if gigabytes else NOTHING_SAVED


def assert_counts(run: Run, plans: list[Plan], how: list[str], words: list[str]) -> None:
    """Kernel calls and collectives of every rank and step are the closed form."""
    again_layers = output(how).num_layers if how else 0
    for number, plan in enumerate(plans):
        saved = marks(plan, how, words)
        for rank in range(plan.tree.num_ranks):
            calls, collectives = [0, 0], 0
            for m in range(plan.num_micro_batches):
                for node in plan.active_path(rank, m):
                    is_redone = saved.of_node(m, node) < len(plan.samples_of(node, m))
                    forwards = NUM_LAYERS + again_layers * is_redone
                    calls[0] += forwards
                    calls[1] += NUM_LAYERS
                    if plan.tree.degree(node) > 1:
                        collectives += 2 * (forwards + NUM_LAYERS)
            step = run.steps[rank][number]
            found = [step["kernel_calls"].count(pass_) for pass_ in ("fwd", "bwd")]
            assert found == calls, (number, rank)
            assert len(step["records"]) == collectives, (number, rank)


def assert_saved(run: Run, plans: list[Plan], how: list[str], words: list[str]) -> None:
    """What every micro-batch has saved after forward is what the marks say, to the byte."""
    for number, plan in enumerate(plans):
        saved = marks(plan, how, words)
        for rank in range(plan.tree.num_ranks):
            expected = [
                int(saved_bytes(plan, saved, output(how), m)[rank])
                for m in range(plan.num_micro_batches)
            ]
            entries = [entry for entry in run.steps[rank][number]["saved"] if entry[0]]
            with_rows = how is not SELECTIVE
            assert [out * with_rows + lse for _, _, out, lse in entries] == expected
            assert [m for _, m, _, _ in entries] == list(range(plan.num_micro_batches))
            assert max(expected) <= float(words[1]) * 1e9


def assert_same_bits(one: Run, other: Run) -> None:
    """Losses and every gradient."""
    assert one.losses == other.losses
    for step in range(len(one.losses)):
        expected, got = one.grads(step), other.grads(step)
        assert expected and all(grad.equal(got[name]) for name, grad in expected.items())


Nested = tuple[Path, list[Plan], dict[str, Run]]


@pytest.fixture(scope="module", params=["dense", "moe"])
def nested(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Nested:
    """Plans, and runs without recomputation, to hold others against."""
    folder = tmp_path_factory.mktemp(request.param)
    plans = write_plans(folder, SPTree(4, (1, 2, 4)), 2, 2)
    model = [*MOE, "--expert-model-parallel-size", "2"] if request.param == "moe" else []
    common = [*flags(folder, 2, 2), *model]
    runs = {"plain": train(4, folder / "plain", *common)}
    for name, how in (("full", FULL), ("selective", SELECTIVE), ("block", BLOCK)):
        for share in (0.0, 0.5, float("inf")):
            words = [*how, *budget(plans, how, share)]
            runs[f"{name} {share}"] = train(4, folder / f"{name}-{share}", *common, *words)
    return folder, plans, runs


@pytest.mark.parametrize("share", [0.0, 0.5, float("inf")])
@pytest.mark.parametrize(
    ("name", "how"), [("full", FULL), ("selective", SELECTIVE), ("block", BLOCK)]
)
def test_budgets_change_no_bit_and_calls_and_bytes_are_the_closed_form(
    nested: Nested, name: str, how: list[str], share: float
) -> None:
    _, plans, runs = nested
    run, words = runs[f"{name} {share}"], budget(plans, how, share)
    assert_same_bits(runs["plain"], run)
    assert_counts(run, plans, how, words)
    assert_saved(run, plans, how, words)
    lines = [line for line in run.output.splitlines() if "nsp step" in line]
    for line, plan in zip(lines, plans, strict=True):
        saved = marks(plan, how, words)
        tokens = int(plan.lengths[saved.samples(plan)].sum())
        told = f"saved: {tokens} tokens, at most {saved.rank_bytes / 1e6:.3f} MB a rank"
        assert (told in line) == (share > 0) and ("saved:" in line) == (share > 0)


def test_plain_runs_count_as_the_closed_form_too(nested: Nested) -> None:
    _, plans, runs = nested
    assert_counts(runs["plain"], plans, [], ["", "0"])


def test_a_half_budget_cuts_inside_a_node(nested: Nested) -> None:
    _, plans, _ = nested
    saved = [marks(plan, FULL, budget(plans, FULL, 0.5)) for plan in plans]
    cuts = [
        0 < count < len(plan.samples_of(node, m))
        for plan, each in zip(plans, saved, strict=True)
        for (m, node), count in each.num_saved.items()
    ]
    assert any(cuts) and not all(cuts)


def test_h3_recomputed_attention_never_asks_the_router(nested: Nested) -> None:
    _, _, runs = nested
    is_moe = any("experts" in name for name in runs["plain"].grads(0))
    for name, run in runs.items():
        again = 2 if name.startswith("full") else 1.5 if name.startswith("block") else 1
        for rank in run.steps:
            for step in rank:
                assert len(step["routes"]) == is_moe * again * NUM_LAYERS * 2


def first_and_repeated(routes: list) -> Iterator[tuple]:
    """Pairs of a routing map and that of its recomputation."""
    waiting: dict[int, list] = {}
    for layer, is_again, routing_map in routes:
        if is_again:
            yield waiting[layer].pop(), routing_map
        else:
            waiting.setdefault(layer, []).append(routing_map)
    assert not any(waiting.values())


@pytest.mark.parametrize("share", ["0", "3e-5", "inf"])
def test_h3_routing_with_ties_is_the_same_when_layers_are_recomputed(
    tmp_path: Path, share: str
) -> None:
    write_plans(tmp_path, SPTree(4, (1, 2, 4)), 17, 3)
    model = [*MOE, "--expert-model-parallel-size", "2", "--probe-tied-experts", "--bf16"]
    words = [*flags(tmp_path, 17, 3), *model, *FULL, "--nsp-save-budget-gb", share]
    run = train(4, tmp_path / "run", *words)
    pairs = [
        pair for rank in run.steps for step in rank for pair in first_and_repeated(step["routes"])
    ]
    assert len(pairs) == 4 * 17 * 3 * NUM_LAYERS  # 51 rounds of two layers on each rank
    assert all(first.equal(again) for first, again in pairs)
    tied = [bool((first[:, 0] != first[:, 1]).any()) for first, _ in pairs]
    assert any(tied)  # one of the two was taken without the other: ties were broken


def test_stages_of_a_pipeline_save_for_every_micro_batch_in_flight(tmp_path: Path) -> None:
    plans = write_plans(tmp_path, SPTree(2, (1, 2)), 2, 4)
    common = [*flags(tmp_path, 2, 4, num_ranks=2), "--pipeline-model-parallel-size", "2"]
    plain = train(4, tmp_path / "plain", *common)
    stage = SavedSizes(8, ROW_BYTES, LSE_BYTES, num_layers=1)
    for share in (0.5, 1.0):
        most = max(mark_saved(plan, stage, float("inf")).rank_bytes for plan in plans)
        gigabytes = share * most / 1e9
        words = [*FULL, "--nsp-save-budget-gb", repr(gigabytes)]
        run = train(4, tmp_path / str(share), *common, *words)
        assert_same_bits(plain, run)
        for number, plan in enumerate(plans):
            saved = mark_saved(plan, stage, gigabytes * 1e9)
            held = [saved_bytes(plan, saved, stage, m) for m in range(4)]
            for place, rank in enumerate(run.steps):
                domain_rank, is_first = place % 2, place < 2
                own = [int(each[domain_rank]) for each in held]
                assert [sum(entry[2:]) for entry in rank[number]["saved"]] == own
                # The first stage has two micro-batches in flight, the last one.
                window = 2 if is_first else 1
                expected = [sum(own[max(0, m + 1 - window) : m + 1]) for m in range(4)]
                assert rank[number]["live_bytes"] == expected


FSDP = (  # noqa: SIM905 - reads as the command line it is
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
).split()


@pytest.mark.parametrize(
    ("num_ranks", "split"), [(4, FSDP), (8, ["--tensor-model-parallel-size", "2"])]
)
def test_sharded_parameters_and_heads(tmp_path: Path, num_ranks: int, split: list[str]) -> None:
    plans = write_plans(tmp_path, SPTree(4, (1, 2, 4)), 2, 1)
    common = [*flags(tmp_path, 2, 1), *split]
    plain = train(num_ranks, tmp_path / "plain", *common)
    saving = train(num_ranks, tmp_path / "saved", *common, *FULL, "--nsp-save-budget-gb", "inf")
    assert plain.losses == saving.losses
    heads = 8 * 4 // num_ranks
    own = SavedSizes(heads, heads * 8 * 4, LSE_BYTES, NUM_LAYERS)
    for number, plan in enumerate(plans):
        expected = saved_bytes(plan, mark_saved(plan, own, float("inf")), own).tolist()
        found = [sum(rank[number]["saved"][0][2:]) for rank in saving.steps]
        assert found == [each for each in expected for _ in range(num_ranks // 4)]


def test_evaluation_in_between_saves_nothing(tmp_path: Path) -> None:
    plans = write_plans(tmp_path, SPTree(4, (1, 2, 4)), 3, 1)
    write_documents(tmp_path / "valid", [60, 31, 20, 9], seed=4)
    words = flags(tmp_path, 3, 1)
    words[0] = "--train-data-path"
    words += ["--valid-data-path", str(tmp_path / "valid"), "--eval-interval", "1"]
    plain, saving = (
        train(4, tmp_path / name, *words, *more, "--eval-iters", "1")
        for name, more in (("plain", []), ("saved", [*FULL, *budget(plans, FULL, float("inf"))]))
    )
    assert_same_bits(plain, saving)
    assert plain.output.count("validation loss at") == saving.output.count("validation loss at") > 1
    for rank in saving.steps:
        entries = [entry for step in rank for entry in step["saved"]]
        evaluated = [entry for entry in entries if not entry[0]]
        assert len(evaluated) == 2 and all(entry[2:] == (0, 0) for entry in evaluated)
        assert any(entry[3] for entry in entries)


def test_a_step_that_megatron_repeats_saves_and_counts_as_much_again(tmp_path: Path) -> None:
    plans = write_plans(tmp_path, SPTree(4, (1, 2, 4)), 2, 2)
    words = [*flags(tmp_path, 2, 2), *FULL, *budget(plans, FULL, 0.5)]
    once = train(4, tmp_path / "once", *words)
    rerun = ["--probe-rerun", "--rerun-mode", "validate_results"]
    twice = train(4, tmp_path / "twice", *words, *rerun)
    assert_same_bits(once, twice)
    for single, double in zip(once.steps, twice.steps, strict=True):
        for first, again in zip(single, double, strict=True):
            assert again["saved"] == 2 * first["saved"]
            assert len(again["kernel_calls"]) == 2 * len(first["kernel_calls"])


def test_h2_ranks_that_mark_differently_all_stop_before_the_step(tmp_path: Path) -> None:
    write_plans(tmp_path, SPTree(4, (1, 2, 4)), 2, 1)
    words = [*flags(tmp_path, 2, 1), *FULL, "--nsp-save-budget-gb", "inf"]
    run = train(4, tmp_path / "run", *words, "--probe-other-marks=2", check=False)
    messages = [line for line in run.output.splitlines() if line.startswith("nsp: rank")]
    assert run.returncode and messages
    assert all("plans of step 1 differ between ranks" in line for line in messages)
