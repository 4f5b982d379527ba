"""CPU mode runs Megatron's own training loop: plain GPT, plain data, nothing nested.

The file is the test and, started as a script, one rank of the jobs it compares. Three jobs see the
same global batches: one rank; two ranks with the distributed optimizer, saving after half of the
steps; and one rank that goes on from there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

STEPS = 4
SAVED_AT = 2
SEQ_LENGTH = 32
VOCAB_SIZE = 64
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope
    --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
    --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 1
    --micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --lr 1e-2
    --hidden-dropout 0 --attention-dropout 0 --calculate-per-token-loss --seed 7
    --dataloader-type external --eval-iters 0 --eval-interval 1000 --log-interval 1000
"""

STAND_INS = """
import torch
from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

cpu = torch.device("cpu")
enable_cpu_mode()
enable_cpu_mode()
placed = [
    torch.zeros(2, device="cuda"),
    torch.zeros(2, device=torch.cuda.current_device()),
    torch.zeros(2, device=torch.device("cuda", 1)),
    torch.zeros(2).cuda(),
    torch.zeros(2).to("cuda:0", torch.bfloat16),
    torch.nn.Linear(2, 2).cuda().weight,
]
assert all(tensor.device == cpu for tensor in placed), placed
assert placed[0].type() == "torch.cuda.FloatTensor"
assert placed[4].type() == "torch.cuda.BFloat16Tensor"
assert torch.zeros(2, dtype=torch.int32).type() == "torch.IntTensor"
assert placed[4].type("torch.cuda.FloatTensor").dtype is torch.float32

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

tracker = CudaRNGStatesTracker()
tracker.add("one", 1)
torch.manual_seed(0)
before = torch.get_rng_state()
with tracker.fork("one"):
    first = torch.rand(3, device="cuda")
assert torch.equal(before, torch.get_rng_state())
with tracker.fork("one"):
    second = torch.rand(3, device="cuda")
torch.manual_seed(1)
assert torch.equal(first, torch.rand(3)) and torch.equal(second, torch.rand(3))



class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((), 2.0, device="cuda")


x = torch.ones(3, requires_grad=True)
Double.apply(x).sum().backward()
torch.autograd.backward(Double.apply(x).sum())
assert x.grad.tolist() == [4, 4, 4]
assert torch.autograd.grad(Double.apply(x).sum(), x)[0].tolist() == [2, 2, 2]

try:
    enable_cpu_mode(float64=True)
except RuntimeError as error:
    assert "float64=False" in str(error)
else:
    raise AssertionError("a change of float64 was accepted")
print("ok")
"""

WIDE = """
import torch
from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

enable_cpu_mode(float64=True)
x = torch.rand(3, dtype=torch.float32, device="cuda")
wide = [x, x.float(), x.to(torch.float32), x.type(torch.float32), x.softmax(0, dtype=torch.float32)]
assert all(tensor.dtype is torch.float64 for tensor in [*wide, torch.nn.LayerNorm(3).weight])
assert x.type() == "torch.cuda.FloatTensor"
print("ok")
"""


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def train(num_ranks: int, flags: str, cwd: Path) -> dict[int, float]:
    """Returns the loss of each step that a job ran."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), str(Path(__file__).resolve())]
    output = run(command + FLAGS.split() + flags.split(), cwd)
    lines = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("STEP ")]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.parametrize("script", [STAND_INS, WIDE], ids=["stand-ins", "float64"])
def test_answers_for_the_gpu(script: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-c", script], tmp_path).endswith("ok\n")


@pytest.mark.slow
def test_one_rank_two_ranks_and_a_resumed_job_agree(tmp_path: Path) -> None:
    save = f"--use-distributed-optimizer --save checkpoints --save-interval {SAVED_AT}"
    with ThreadPoolExecutor() as pool:  # their imports take longer than their steps
        jobs = [pool.submit(train, *job, tmp_path) for job in ((1, ""), (2, save))]
        one, two = (job.result() for job in jobs)
    assert sorted(one) == list(range(1, STEPS + 1))
    assert one[STEPS] < one[1]
    assert two == pytest.approx(one, abs=1e-5)

    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    load = "--use-distributed-optimizer --load checkpoints --exit-on-missing-checkpoint"
    resumed = train(1, load, tmp_path)
    assert resumed == pytest.approx({s: two[s] for s in range(SAVED_AT + 1, STEPS + 1)}, abs=1e-5)


def main() -> None:
    """One rank of a job."""
    from megatron_nsp.mcore.cpu.args import set_cpu_defaults
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode()

    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_nsp.mcore.fixes import at_start

    def batches() -> Iterator[torch.Tensor]:
        """Samples of one increasing sequence each, the same on any number of ranks."""
        step, rank = get_args().iteration, mpu.get_data_parallel_rank()
        num_ranks = mpu.get_data_parallel_world_size()
        while True:
            for sample in range(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks):
                yield (torch.arange(SEQ_LENGTH + 1) + 4 * step + sample).unsqueeze(0) % VOCAB_SIZE
            step += 1

    def provide(num_samples: Any) -> tuple[Any, None, None]:
        return batches(), None, None

    provide.is_distributed = True  # type: ignore[attr-defined]

    def sum_losses(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens = next(data_iterator).cuda()
        positions = torch.arange(SEQ_LENGTH, device="cuda").unsqueeze(0)
        hidden = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool, device="cuda").triu(1)
        return model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:]), sum_losses

    def log(losses: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            step = args[2]
            print("STEP " + json.dumps({"step": step, "loss": losses["loss"].item()}), flush=True)
        return megatron_log(losses, *args, **kwargs)

    megatron_log, training.training_log = training.training_log, log
    at_start.apply()
    args = parse_and_validate_args(lambda parser: set_cpu_defaults(parser) or parser)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, provide, ModelType.encoder_or_decoder, forward_step)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
