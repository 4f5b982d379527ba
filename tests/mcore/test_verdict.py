"""Whatever Megatron raises while it looks at flags: one line that names them, and exit code 2."""

import sys
from pathlib import Path

import pytest
from megatron.training.global_vars import unset_global_variables

from megatron_nsp.mcore import pretrain
from tests.mcore.launch import MODEL

pytestmark = pytest.mark.usefixtures("help_texts")

# Behind the flags of MODEL, but for those with a "!".
SAID = {
    # by Megatron's parser
    "--num-layers two": "--num-layers: invalid int value: 'two'",
    "--optimizer adamw": "--optimizer: invalid choice: 'adamw'",
    "--no-such-flag 1": "unrecognized arguments: --no-such-flag 1",
    "--enable-msc": "--enable-msc was passed but the multistorageclient package is not installed",
    # by its validation: with words and without, and by an exit without an error
    "--non-persistent-ckpt-type local": (
        "--non-persistent-ckpt-type: nvidia_resiliency_ext is required for local checkpointing"
    ),
    "--checkpoint-activations": "--checkpoint-activations: Megatron exits without an error",
    "--batch-size 4": "--batch-size argument is no longer valid, use --micro-batch-size instead",
    "--weight-decay-incr-style linear": (
        "--start-weight-decay, --weight-decay-incr-style: Megatron asks for: "
        "args.start_weight_decay is not None"
    ),
    "--position-embedding-type none --no-position-embedding": (
        "--no-position-embedding is deprecated, use --position-embedding-type"
    ),
    "--max-position-embeddings 100": (
        "--max-position-embeddings, --seq-length: max_position_embeddings (100) must be greater"
    ),
    "--save-interval 0 --save checkpoints": (
        "--save-interval, --save: Megatron asks for: args.save_interval > 0"
    ),
    "--fp16 --bf16": "--fp16, --bf16: Megatron asks for: not args.bf16",
    # by its tokenizer, its model configuration, and its container of configurations
    "--tokenizer-type SentencePieceTokenizer": "Tokenizer path must be specified.",
    "--squared-relu": "--squared-relu, --swiglu: Megatron asks for: not args.swiglu",
    "--rope-type yarn": "--rope-type, --multi-latent-attention: Common attention only support",
    "--recompute-granularity full": (
        "--recompute-granularity, --recompute-method: Using recompute_granularity: full so "
    ),
    "!--disable-bias-linear --num-experts 6 --expert-tensor-parallel-size 2": (
        "--disable-bias-linear, --expert-tensor-parallel-size: Bias in Moe is only supported when"
    ),
    "--use-precision-aware-optimizer": (
        "--use-precision-aware-optimizer only supported with distributed optimizer"
    ),
}


@pytest.mark.parametrize("flags", SAID)
def test_one_line_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prefix: Path,
    flags: str,
) -> None:
    def train(*_: object) -> None:
        pytest.fail(f"{flags} is not refused")

    monkeypatch.setattr(pretrain, "pretrain", train)
    less = [flag.removeprefix("!") for flag in flags.split() if flag.startswith("!")]
    more = [flag for flag in flags.split() if not flag.startswith("!")]
    model = [flag for flag in MODEL if flag not in less]
    monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", *model, "--data-path", str(prefix), *more])
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    unset_global_variables()
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    assert stop.value.code == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error: " in each]
    assert line.startswith(f"pretrain_nsp.py: error: {SAID[flags]}"), line


def test_help_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_nsp.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        pretrain.main()
    assert stop.value.code == 0
    assert "--nsp-backend" in capsys.readouterr().out
