"""Flags that cannot be used: one clear line, before any process group or Megatron assert."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.mcore.model import model_config
from megatron_nsp.mcore.pretrain import parse_job
from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import Node, SPTree
from tests.data_maker import write_documents
from tests.mcore.help_texts import read_help_texts_once
from tests.mcore.launch import MODEL, ROOT, command, environment

BAD = {
    "--nsp-max-degree 4": "--nsp-max-degree: degree 4 does not divide the 6 ranks",
    "--nsp-max-degree 3": "--nsp-max-degree: the largest degree must be a power of two, got 3",
    "--nsp-degrees 1,2,3": "--nsp-degrees: each degree must divide the next larger one: 2 and 3",
    "--nsp-degrees 1,3 --nsp-backend ulysses": "--nsp-degrees: degree 3 cannot split 8 query and 2"
    " key/value heads evenly, as --nsp-backend ulysses must",
    "--nsp-backend te-p2p": "--nsp-backend te-p2p runs on cuda tensors, this job's device is cpu",
    "--nsp-backend te-p2p --window-size 4,0": "te-p2p has no sliding window: --window-size",
    "--nsp-backend te-a2a --softmax-type learnable": "te-a2a serves no attention sinks",
    "--nsp-degrees 1,3 --nsp-backend te-a2a": "degree 3 cannot split .*as --nsp-backend te-a2a",
    "--nsp-backend rings": "--nsp-backend must be one of auto, ulysses, ring, usp, gather, te-p",
    "--nsp-backend ring --nsp-profile flexsp-gpt-7b-a100": "--nsp-backend must be auto or ulysses "
    "with --nsp-profile flexsp-gpt-7b-a100",
    "--nsp-degrees 1,2 --nsp-max-degree 2": "--nsp-max-degree 2 must not be given",
    "--context-parallel-size 2": "--context-parallel-size must be 1",
    "--nsp-token-budget 100": "--nsp-token-budget 100 is too small: the longest sample of --data-pa"
    "th, 512 tokens, puts 256 on a rank at the largest degree 2",
    "--nsp-token-budget 0": "--nsp-token-budget must be 1 to 2147483647, got 0",
    "--nsp-batch-tokens -5": "--nsp-batch-tokens must be 1 to 2147483647, got -5",
    "--nsp-batch-tokens 100000000000000000000": "--nsp-batch-tokens must be 1 to 2147483647, got 1",
    "--nsp-token-budget 3000000000": "--nsp-token-budget must be 1 to 2147483647, got 3",
    "--nsp-save-budget-gb -1": "--nsp-save-budget-gb must be at least 0, got -1.0",
    "--nsp-save-budget-gb nan": "--nsp-save-budget-gb must be at least 0, got nan",
    "--nsp-save-budget-gb 2": "--nsp-save-budget-gb 2 would do nothing: attention is not recompute",
    "--nsp-save-budget-gb 2 --recompute-granularity selective --recompute-modules mlp": "2 would "
    "do nothing: attention is not recomputed; it needs --recompute-granularity full, or selective",
    "--nsp-save-budget-gb inf --recompute-granularity full --recompute-method block": "would do no",
    "--nsp-plan-ahead -1": "--nsp-plan-ahead must be at least 0, got -1",
    "--nsp-over-long drop": "--nsp-over-long must be one of filter, error, got drop",
    "--nsp-max-length 400 --nsp-over-long error": "512 tokens, over --nsp-max-length 400; 1 of",
    "--nsp-policy fastest": "--nsp-policy must be file:PATH or one of auto, search",
    "--nsp-policy file:/no/such": "--nsp-policy file:/no/such: there is no such file",
    "--nsp-policy flexsp-10s": "--nsp-policy: flexsp-10s is stopped by the clock",
    "--nsp-input-layout rows": "--nsp-input-layout must be plan or static:N with N at least 1, got",
    "--nsp-input-layout static:0": "must be plan or static:N with N at least 1, got static:0",
    "--nsp-input-layout static:": "must be plan or static:N with N at least 1, got static:",
    "--nsp-input-layout static:4": "--nsp-input-layout static:4: degree 4 does not divide the 6",
    "--nsp-kernel triton": "--nsp-kernel must be one of auto, .*, got triton",
    "--nsp-kernel cuda-varlen": "--nsp-kernel cuda-varlen runs on cuda tensors",
    "--nsp-kernel flash-attn-3": "--nsp-kernel flash-attn-3 runs on cuda tensors",
    "--nsp-kernel te-module": "--nsp-kernel te-module runs on cuda tensors",
    "--nsp-profile nowhere": "nowhere",
    "--num-experts 4 --moe-aux-loss-coeff 0.01": "--moe-aux-loss-coeff must be 0, got",
    "--num-experts 4 --moe-router-load-balancing-type sinkhorn": "sinkhorn cannot be used",
    "--num-experts 4 --moe-router-enable-expert-bias": "--moe-router-enable-expert-bias cannot be",
    "--num-experts 4 --moe-input-jitter-eps 0.1": "--moe-input-jitter-eps 0.1 cannot be used",
    "--nsp-record-plans /no/such/plans": "--nsp-record-plans /no/such/plans: there is no folder",
    "--num-experts 4 --moe-expert-capacity-factor 1.0": "--moe-expert-capacity-factor must not be",
    "--num-experts 4 --moe-token-dispatcher-type allgather": "must be alltoall or flex, got",
    "--micro-batch-size 2": "--micro-batch-size must be 1, got 2",
    "--global-batch-size 7": "--global-batch-size 7 is no multiple of the 6 data-parallel ranks",
    "--attention-dropout 0.1": "--attention-dropout must be 0, got 0.1",
    "--tensor-model-parallel-size 4": "--tensor-model-parallel-size 4 .* does not divide the 6",
    "--num-query-groups 3": "--num-attention-heads 8 is no multiple of --num-query-groups 3",
    "--eval-iters 2": "--eval-iters 2 needs --valid-data-path",
    "--position-embedding-type mrope": "--position-embedding-type must be rope",
    "--multi-latent-attention --tensor-model-parallel-size 2": "--multi-latent-attention with --te"
    "nsor-model-parallel-size 2 needs --transformer-impl transformer_engine and --sequence-",
    "--position-embedding-type relative": "must be rope, yarn, learned_absolute or none, got rela",
    "--window-size 8,8": "--window-size must be LEFT,0 .* got 8,8: attention is causal",
    "--window-size=-2,0": "--window-size must be LEFT,0 with LEFT at least 0, or -1 .* got -2,0",
    "--window-size 8": "--window-size must be LEFT,0 .* got 8: attention is causal",
    "--window-size 8,0 --window-attn-skip-freq 0": "--window-attn-skip-freq must be at least 1, go",
    "--window-size 8,0 --window-attn-skip-freq [1,0,1]": "freq lists 3 layers, --num-layers is 2",
    "--hybrid-layer-pattern M*-": r"pattern M\*-: M cannot be used: only attention",
    "--hybrid-layer-pattern *-GD/**": "pattern .*: /DG cannot be used: only attention",
    "--hybrid-layer-pattern=-E": r"--hybrid-layer-pattern -E holds no attention layer, \* or \+",
    "--hybrid-layer-pattern *-|*-": "marks 2 stages, --pipeline-model-parallel-size is 1",
    "--hybrid-override-pattern *-": "--hybrid-override-pattern is deprecated: give --hybrid-layer",
    "--hybrid-layer-pattern *-": "--hybrid-layer-pattern needs Transformer Engine, which is not",
    "--spec nowhere SPEC": "--spec nowhere SPEC cannot be imported",
    "--attention-backend local": "--attention-backend local would take nested attention out of",
    "--tensor-model-parallel-size 2 --sequence-parallel": "--sequence-parallel needs --transformer"
    "-impl transformer_engine, which CPU ranks do not run, or a --spec",
    "--num-experts 4 --tensor-model-parallel-size 2": "--tensor-model-parallel-size 2 with experts"
    " needs --sequence-parallel",
    "--check-for-spiky-loss": "--check-for-spiky-loss cannot be used: ranks and steps hold diff",
    "--use-megatron-fsdp --save x": "--use-megatron-fsdp with --swiglu and --save needs --bf16 or",
    "--qk-clip": "--qk-clip is not supported: it needs the largest attention score",
    "--enable-cuda-graph": "--enable-cuda-graph cannot be used: boundaries change every step",
    "--num-layers-per-virtual-pipeline-stage 1": "virtual-pipeline-stage is not supported yet",
    "--mtp-num-layers 1": "--mtp-num-layers is not supported yet, got 1",
    "--num-experts 4 --sequence-parallel --pipeline-model-parallel-size 2": "later stages would",
    "--eval-iters 2 --valid-data-path x": "--eval-iters 2 needs .* and --train-data-path in place",
    "--num-attention-heads 0": "--num-attention-heads must be at least 1, got 0",
    "--num-query-groups 0": "--num-query-groups must be at least 1, got 0",
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size must be at least 1, got 0",
    "--pipeline-model-parallel-size -2": "pipeline-model-parallel-size must be at least 1, got -2",
    "--global-batch-size 0": "--global-batch-size must be at least 1, got 0",
    "--seed 0": "--seed must be at least 1, got 0",
    "--max-position-embeddings 100": "512|seq_length|max_position_embeddings",
    "--position-embedding-type learned_absolute --nsp-max-length 1024": "--max-position-embedding"
    "s 512 does not reach the longest sample of 1024 tokens",
    "--split 99,1,0": "--split 99,1,0 cannot be used",
    "--test-data-path x": "--test-data-path .* cannot be used",
    "--mock-data": "--mock-data cannot be used",
    "--train-samples 100": "--train-samples 100 cannot be used",
    "--dataloader-type cyclic": "--dataloader-type must be external, got cyclic",
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with lengths up to 512, and an empty one and one without usable documents."""
    folder = tmp_path_factory.mktemp("flags")
    write_documents(folder / "docs", [512, 5, 7], seed=0)
    write_documents(folder / "long", [600, 700], seed=0)
    write_documents(folder / "empty", [], seed=0)
    (folder / "broken.bin").write_bytes(b"abc")
    (folder / "broken.idx").write_bytes(b"no index")
    write_documents(folder / "short", [512, 5, 7], seed=0)
    with (folder / "short.bin").open("r+b") as data:
        data.truncate(100)
    write_documents(folder / "outside", [512, 5, 7], seed=0)
    index = (folder / "outside.idx").read_bytes()
    bound = len(index) - 16  # the last but one of 0, 1, 2, 3; Megatron looks at the last alone
    (folder / "outside.idx").write_bytes(
        index[:bound] + (9).to_bytes(8, "little") + index[bound + 8 :]
    )
    return folder / "docs"


@pytest.fixture(scope="module", autouse=True)
def help_texts() -> Iterator[None]:
    """Every test makes two parsers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_help_texts_once(monkeypatch)
        yield


def parse(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    """Parses a command line of a six-rank job."""
    monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", *flags])
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    unset_global_variables()  # left behind by flags that were refused after Megatron's validation
    args, _ = parse_job()
    model_config(args)


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_give_one_line(monkeypatch: pytest.MonkeyPatch, prefix: Path, flags: str) -> None:
    with pytest.raises(ValueError, match=BAD[flags]) as caught:
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix), *flags.split()])
    assert "\n" not in str(caught.value)


def test_a_missing_kernel_package_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # wherever it is installed
    flags = [flag for flag in MODEL if flag != "--nsp-cpu"]
    flags += ["--bf16", "--data-path", str(prefix), "--nsp-kernel", "flash-attn-3"]
    with pytest.raises(ValueError, match="needs the package flash_attn_interface") as caught:
        parse(monkeypatch, flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kernel", ["auto", "te", "flash-attn-2"])
def test_kernels_for_gpus_need_16_bits(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, kernel: str
) -> None:
    flags = [flag for flag in MODEL if flag != "--nsp-cpu"]
    flags += ["--data-path", str(prefix), "--nsp-kernel", kernel]
    with pytest.raises(ValueError, match=f"--nsp-kernel {kernel} on GPUs needs --bf16 or --fp16"):
        parse(monkeypatch, flags)


def test_sinks_on_a_kernel_without_lse(monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
    """No such kernel runs on CPU: Transformer Engine's module stands in."""
    kernel = SimpleNamespace(name="te-module", returns_lse=False)
    monkeypatch.setattr("megatron_nsp.mcore.job.choose_kernel", lambda *_: kernel)
    flags = [*MODEL, "--data-path", str(prefix), "--softmax-type", "learnable"]
    message = "--nsp-kernel te-module gives no LSE, which --softmax-type learnable needs"
    with pytest.raises(ValueError, match=message):
        parse(monkeypatch, flags)


def test_a_replayed_file_is_never_recorded_over(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    plans = prefix.with_name("kept.jsonl")
    plans.write_text("\n")
    flags = ["--nsp-policy", f"file:{plans}", "--nsp-record-plans", f"{plans.parent}/./kept.jsonl"]
    with pytest.raises(ValueError, match="would overwrite the plans it replays"):
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix), *flags])
    assert plans.read_text() == "\n"


@pytest.mark.parametrize(("late", "bad"), [("0", "01"), ("", "1")])
def test_some_rank_says_what_is_wrong(tmp_path: Path, prefix: Path, late: str, bad: str) -> None:
    """Rank 0 slow to speak; and data that only another rank misses."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys, time\n"
        "from megatron_nsp.mcore.cpu.mode import enable_cpu_mode\n"
        "enable_cpu_mode()\n"
        "from megatron_nsp.mcore import pretrain\n"
        f"if os.environ['RANK'] in {bad!r}: sys.argv += ['--data-path', 'not_mounted']\n"
        f"if os.environ['RANK'] in {late!r}: time.sleep(3)\n"
        f"if not {late!r}: pretrain.REFUSAL_WAIT_S = 1.0\n"  # rank 0 has nothing to say
        "pretrain.main()\n".replace("in ''", "in ()")
    )
    done = subprocess.run(
        command(2, script, *MODEL, "--data-path", str(prefix)),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    said = [line for line in done.stderr.splitlines() if "--data-path not_mounted" in line]
    speaker = "error: " if late else "error on rank 1: "
    assert len(said) == 1 and said[0].startswith(f"pretrain_nsp.py: {speaker}"), said


@pytest.mark.parametrize("line", ['{"nodes": []}', "no json", "[]"])
def test_a_file_that_holds_no_plan(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, line: str
) -> None:
    plans = prefix.with_name("plans.jsonl")
    plans.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"plans\.jsonl: line 1 is not a plan"):
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix), "--nsp-policy", f"file:{plans}"])


def test_evaluation_documents_are_opened_and_checked_before_the_run(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    flags = [*MODEL, "--train-data-path", str(prefix), "--eval-iters", "1", "--valid-data-path"]
    for name, message in (
        ("nowhere", "--valid-data-path .*nowhere: there is no file"),
        (
            "long",
            "--valid-data-path holds no document to train on: 2 documents, none with 1 to 512",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            parse(monkeypatch, [*flags, str(prefix.parent / name)])
    write_documents(prefix.with_name("fits"), [50, 60], seed=0)
    flags[flags.index("--train-data-path") + 1] = str(prefix.with_name("fits"))
    with pytest.raises(ValueError, match="longest sample of --valid-data-path, 512 tokens, puts"):
        parse(monkeypatch, [*flags, str(prefix), "--nsp-token-budget", "100"])


def test_a_plan_that_runs_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
    plan = Plan.from_nodes(SPTree(6, (1, 2)), [5, 7], [Node(0, 0)] * 2, micro_batch=[CARRIED] * 2)
    plans = prefix.with_name("idle.jsonl")
    plans.write_text(plan.to_json() + "\n")
    with pytest.raises(ValueError, match="plan 0 runs none of its 2 samples"):
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix), "--nsp-policy", f"file:{plans}"])


def test_missing_per_token_loss(monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
    flags = [flag for flag in MODEL if flag != "--calculate-per-token-loss"]
    with pytest.raises(ValueError, match="--calculate-per-token-loss is required"):
        parse(monkeypatch, [*flags, "--data-path", str(prefix)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "docs|empty holds no document to train on: 0 tokens"),
        ("long", "--data-path holds no document to train on: 2 documents, none with 1 to 512"),
        ("nowhere", "there is no file .*nowhere.bin"),
        ("0.3", "prefixes without weights, got 0.3"),
        ("broken", "broken.idx is not the index of a Megatron IndexedDataset"),
        ("short", "short.bin is cut short: 100 bytes, 524 expected"),
        ("outside", "documents of .*outside.idx reach outside its 3 sequences"),
    ],
)
def test_bad_data(monkeypatch: pytest.MonkeyPatch, prefix: Path, name: str, message: str) -> None:
    path = name if name == "0.3" else str(prefix.parent / name)
    with pytest.raises(ValueError, match=message):
        parse(monkeypatch, [*MODEL, "--data-path", path])
    with pytest.raises(ValueError, match="--data-path is required"):
        parse(monkeypatch, MODEL)


@pytest.mark.parametrize("text", [None, "no json", "[1]", "{}", '{"block_configs": [3]}'])
def test_a_file_of_layers_that_holds_none(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, text: str | None
) -> None:
    path = prefix.with_name("layers.json")
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        parse(
            monkeypatch,
            [*MODEL, "--data-path", str(prefix), "--heterogeneous-layers-config-path", str(path)],
        )


def test_exit_code_two_and_one_line(prefix: Path) -> None:
    flags = [*MODEL, "--data-path", str(prefix), "--context-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "pretrain_nsp.py"), *flags],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "pretrain_nsp.py: error: --context-parallel-size must be 1 with nested sequence "
        "parallelism, which shares samples over the data-parallel ranks itself; got 2"
    ]
    assert "Traceback" not in done.stderr


def test_one_line_from_rank_zero_under_torchrun(prefix: Path) -> None:
    flags = [*MODEL, "--data-path", str(prefix), "--nsp-max-degree", "4"]
    done = subprocess.run(
        command(2, ROOT / "pretrain_nsp.py", *flags),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    message = "pretrain_nsp.py: error: --nsp-max-degree: degree 4 does not divide the 2 ranks"
    assert done.returncode and (done.stderr + done.stdout).count(message) == 1
