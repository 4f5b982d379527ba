"""What else cannot be used, beside `refusals.py`: one clear line, before any process group."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_nsp.plan.plan import CARRIED, Plan
from megatron_nsp.plan.tree import Node, SPTree
from tests.data_maker import write_documents
from tests.mcore.command_line import parse
from tests.mcore.launch import MODEL, ROOT, command, environment, model_flags

pytestmark = pytest.mark.usefixtures("help_texts")

BAD = {
    "--nsp-max-degree 4": "--nsp-max-degree: degree 4 does not divide the 6 ranks",
    "--nsp-max-degree 3": "--nsp-max-degree: the largest degree must be a power of two, got 3",
    "--nsp-degrees 1,2,3": "--nsp-degrees: each degree must divide the next larger one: 2 and 3",
    "--nsp-degrees 1,3 --nsp-backend ulysses": "--nsp-degrees: degree 3 cannot split 8 query and 2"
    " key/value heads evenly, as --nsp-backend ulysses must",
    "--nsp-backend te-p2p": "--nsp-backend te-p2p runs on cuda tensors, this job's device is cpu",
    "--nsp-degrees 1,3 --nsp-backend te-a2a": "degree 3 cannot split .*as --nsp-backend te-a2a",
    "--nsp-backend rings": "--nsp-backend must be one of auto, ulysses, ring, usp, gather, te-p",
    "--nsp-backend ring --nsp-profile flexsp-gpt-7b-a100": "--nsp-backend must be auto or ulysses "
    "with --nsp-profile flexsp-gpt-7b-a100",
    "--nsp-degrees 1,2 --nsp-max-degree 2": "--nsp-max-degree 2 must not be given",
    "--nsp-token-budget 100": "--nsp-token-budget 100 is too small: the longest sample of --data-pa"
    "th, 512 tokens, puts 256 on a rank at the largest degree 2",
    "--nsp-token-budget 0": "--nsp-token-budget must be 1 to 2147483647, got 0",
    "--nsp-batch-tokens -5": "--nsp-batch-tokens must be 1 to 2147483647, got -5",
    "--nsp-batch-tokens 100000000000000000000": "--nsp-batch-tokens must be 1 to 2147483647, got 1",
    "--nsp-token-budget 3000000000": "--nsp-token-budget must be 1 to 2147483647, got 3",
    "--nsp-save-budget-gb -1": "--nsp-save-budget-gb must be at least 0, got -1.0",
    "--nsp-save-budget-gb nan": "--nsp-save-budget-gb must be at least 0, got nan",
    "--nsp-plan-ahead -1": "--nsp-plan-ahead must be at least 0, got -1",
    "--nsp-check -1": "--nsp-check must be at least 0, got -1",
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
    "--nsp-profile nowhere": "--nsp-profile: no profile nowhere: neither a file of text nor one of",
    "--nsp-record-plans /no/such/plans": "--nsp-record-plans /no/such/plans: there is no folder",
    "--max-position-embeddings 100": "512|seq_length|max_position_embeddings",
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


def test_no_gpu_is_asked_for_anything_before_the_rank_has_its_own(
    monkeypatch: pytest.MonkeyPatch, prefix: Path
) -> None:
    """Rank 5 of 6 on a host whose GPUs are all too old: it looks at its own before it says so."""
    asked: list[tuple[str, object]] = []

    def watch(name: str, answer: object) -> None:
        def watched(*device: object) -> object:
            asked.append((name, *device))
            return answer

        monkeypatch.setattr(torch.cuda, name, watched)

    for name in (
        "current_device",
        "get_device_name",
        "get_device_properties",
        "init",
        "_lazy_init",
    ):
        watch(name, None)
    watch("get_device_capability", (7, 5))
    watch("set_device", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("LOCAL_RANK", "5")
    flags = [*(flag for flag in MODEL if flag != "--nsp-cpu"), "--bf16", "--data-path", str(prefix)]
    flags += ["--nsp-kernel", "cuda-varlen"]
    with pytest.raises(ValueError, match=r"runs on GPUs of compute capability from 8\.0, this one"):
        parse(monkeypatch, flags)
    assert asked == [("set_device", 5), ("get_device_capability", torch.device("cuda"))]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(
        ValueError, match="local rank 5 has no GPU: this host has 4, one for each ra"
    ):
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
    data = ["--train-data-path", str(prefix), "--eval-iters", "1", "--valid-data-path"]
    flags = model_flags(data)
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "docs|empty holds no document to train on: 0 tokens"),
        ("long", "--data-path holds no document to train on: 2 documents, none with 1 to 512"),
        ("nowhere", "there is no file .*nowhere.bin"),
        ("broken", "broken.idx is not the index of a Megatron IndexedDataset"),
        ("short", "short.bin is cut short: 100 bytes, 524 expected"),
        ("outside", "documents of .*outside.idx reach outside its 3 sequences"),
    ],
)
def test_bad_data(monkeypatch: pytest.MonkeyPatch, prefix: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(monkeypatch, [*MODEL, "--data-path", str(prefix.parent / name)])


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
        "pretrain_nsp.py: error: --context-parallel-size 2 does not divide the 1 data-parallel "
        "ranks"
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
