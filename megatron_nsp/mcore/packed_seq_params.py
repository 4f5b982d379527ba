"""What Megatron carries through the layers of one micro-batch.

Megatron hands `packed_seq_params` unchanged to the rotary embedding, to every layer and to core
attention, in the first forward of a layer and in the one that recomputes it. Our subclass travels
there, so that no module holds state.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_nsp.mcore.further_tokens import FurtherTokens
from megatron_nsp.mcore.moe.rows import RoutedRows
from megatron_nsp.runtime.attention import AttentionRuntime, NestedBatch


@dataclass
class NestedSeqParams(PackedSeqParams):
    """One micro-batch of a plan and what to run it with.

    `qkv_format` stays 'sbhd': Megatron then hands over q, k and v as `[T, 1, heads, D]` and applies
    rotary frequencies row by row. `cp_group` stays None: only attention sees a node's group.

    Attributes:
        nested: the micro-batch.
        runtime: groups, kernel and queue.
        positions: `[T]` int64 place of each token in its own sample.
        rows: what routers know of the rows; None in a model without experts.
        further: what each depth of multi-token prediction sees, depth 1 first.
        depth: the depth that runs; 0 = the model itself.
    """

    nested: NestedBatch | None = None
    runtime: AttentionRuntime | None = None
    positions: torch.Tensor | None = None
    rows: RoutedRows | None = None
    further: tuple[FurtherTokens, ...] = ()
    depth: int = 0

    @classmethod
    def of(
        cls,
        nested: NestedBatch,
        runtime: AttentionRuntime,
        positions: torch.Tensor,
        rows: RoutedRows | None = None,
        further: tuple[FurtherTokens, ...] = (),
    ) -> "NestedSeqParams":
        """The parameters of a forward pass of one micro-batch.

        What layers save belongs to this one pass: chunks of a model that share a pipeline rank run
        the same micro-batch one after the other, and a batch that runs once more, because Megatron
        repeats a step or something failed midway, begins without what was saved the time before.
        """
        nested = replace(nested, saved_outputs={})
        longest = nested.layout.max_length
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            nested=nested,
            runtime=runtime,
            positions=positions,
            rows=rows,
            further=further,
        )
