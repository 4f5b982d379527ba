"""Megatron's batch flags as the sizes of steps: tokens to draw, micro-batches to divide them into.

Megatron counts samples of `--seq-length` tokens. A step of ours draws whole documents until it
holds as many tokens as its samples would, and runs as many micro-batches as Megatron would; all
that Megatron counts in samples (schedules, `--train-samples`, its log) goes on as before.
"""

import argparse
from typing import NamedTuple

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    NumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
)

from megatron_nsp.mcore.sizes import counted_ranks, sequence_tokens
from megatron_nsp.plan.arrays import IntArray
from megatron_nsp.steps.sampler import StepSize

_SILENT_RANK = 1
"""Megatron's calculators print on rank 0; its own have said it already."""


class _Counted(NamedTuple):
    """A step as Megatron counts it.

    Attributes:
        samples: its samples.
        num_micro_batches: its micro-batches.
        consumed: samples of the run once it is over.
    """

    samples: int
    num_micro_batches: int
    consumed: int


class BatchSizes:
    """How large the steps of a run are.

    Args:
        calculator: Megatron's own, for the training steps.
        valid_samples: samples of an evaluation step.
        valid_micro_batches: its micro-batches.
        sample_tokens: tokens that a sample stands for.
        whence: what a step's tokens come from, if not from its samples.
    """

    def __init__(
        self,
        calculator: NumMicroBatchesCalculator,
        valid_samples: int,
        valid_micro_batches: int,
        sample_tokens: float,
        whence: str | None = None,
    ) -> None:
        """Counts no step yet."""
        self._calculator, self._counted = calculator, list[_Counted]()
        self._sample_tokens, self._whence = sample_tokens, whence
        self._valid = self._size(valid_samples, valid_micro_batches)

    @classmethod
    def from_args(cls, args: argparse.Namespace, lengths: IntArray) -> "BatchSizes":
        """Reads them off checked arguments, whether Megatron has validated them or not.

        Args:
            args: Megatron's arguments with ours.
            lengths: `[n]` tokens of each document that can be trained on.

        Raises:
            ValueError: a batch does not divide into micro-batches; names flags and numbers.
        """
        size, ranks = args.micro_batch_size, counted_ranks(args)
        global_size = args.global_batch_size or size * ranks
        if args.step_batch_size_schedule is not None:
            calculator: NumMicroBatchesCalculator = _scheduled(args, size, ranks)
            largest = max(samples for _, samples in calculator.schedule)
        else:
            decreases = args.decrease_batch_size_if_needed and global_size >= size * ranks
            if not decreases:
                check_batch("--global-batch-size", global_size, size, ranks)
            calculator = ConstantNumMicroBatchesCalculator(
                global_size, size, ranks, decreases, _SILENT_RANK
            )
            largest = calculator.get_current_running_global_batch_size()
        valid_size = args.eval_micro_batch_size or size
        valid_global = args.eval_global_batch_size or global_size
        check_batch("--eval-global-batch-size", valid_global, valid_size, ranks)
        valid = valid_global, valid_global // (valid_size * ranks)
        if args.nsp_batch_tokens is not None:  # the largest step of a schedule holds so many
            sample_tokens = args.nsp_batch_tokens / largest
            return cls(calculator, *valid, sample_tokens, "--nsp-batch-tokens")
        # Hybrid context parallelism counts documents, everything else buffers of --seq-length.
        tokens = lengths.mean() if args.hybrid_context_parallel else sequence_tokens(args)
        return cls(calculator, *valid, float(tokens))

    @property
    def micro_batch_numbers(self) -> set[int]:
        """All numbers of micro-batches that training steps have, those of a schedule too."""
        if not isinstance(self._calculator, StepBatchsizeNumMicroBatchesCalculator):
            return {self._calculator.get()}
        whole = self._calculator.micro_batch_times_data_parallel_size
        return {samples // whole for _, samples in self._calculator.schedule}

    def train(self, step: int) -> StepSize:
        """The size of a training step, counted from 0."""
        while len(self._counted) <= step:
            consumed = self._counted[-1].consumed if self._counted else 0
            self._calculator.update(consumed, consistency_check=True)
            samples = self._calculator.get_current_running_global_batch_size()
            self._counted.append(_Counted(samples, self._calculator.get(), consumed + samples))
        counted = self._counted[step]
        return self._size(counted.samples, counted.num_micro_batches)

    def valid(self, step: int) -> StepSize:
        """The size of an evaluation step, whichever it is."""
        return self._valid

    def _size(self, samples: int, num_micro_batches: int) -> StepSize:
        return StepSize(max(1, round(samples * self._sample_tokens)), num_micro_batches)

    def __str__(self) -> str:
        """What the first step holds, and by which flag."""
        first = self.train(0)
        counted = f"{self._counted[0].samples} samples of {self._sample_tokens:.10g} tokens"
        whence = self._whence or counted
        return f"{first.num_micro_batches} micro-batches a step of {first.tokens} tokens ({whence})"


def check_batch(flag: str, global_size: int, size: int, ranks: int) -> None:
    """Checks that a batch divides into micro-batches of the same size on all ranks.

    Args:
        flag: what sets the batch.
        global_size: samples of the batch.
        size: samples of a rank's micro-batch.
        ranks: data-parallel ranks as Megatron counts them.

    Raises:
        ValueError: names flag and numbers.
    """
    if global_size % (size * ranks):
        raise ValueError(
            f"{flag} {global_size} is no multiple of --micro-batch-size {size} times the {ranks} "
            "data-parallel ranks"
        )


def _scheduled(args: argparse.Namespace, size: int, ranks: int) -> NumMicroBatchesCalculator:
    schedule = args.step_batch_size_schedule
    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            size, ranks, args.decrease_batch_size_if_needed, _SILENT_RANK, schedule, args.seq_length
        )
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--step-batch-size-schedule {schedule}: {error}") from error
    for _, samples in calculator.schedule:
        check_batch(f"--step-batch-size-schedule {schedule}:", samples, size, ranks)
    return calculator
