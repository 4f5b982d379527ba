"""What each exchange of a node sends, exactly: the closed form that sent bytes are held to.

Elements that one rank sends to others, of T own tokens, S tokens in its member's stream, u ranks a
member, R members; h = H/u query heads and n = max(K/u, 1) key/value heads a rank, of D and V
elements:

    forward    prologue 0     T (u-1) (h D + n (D + V))           q, k, v to heads
               prologue r     S of the member r-1 places before, n (D + V)     ring
               prologue 1     rows of own keys that each other member sees, n (D + V)   gather
               epilogue       (S - T) h V                         the output to tokens
    backward   prologue 0     T (u-1) h V, and of saved samples T (u-1) (h D + n (D + V) + h V)
               prologue r, 1  as forward
               return r       rows of the keys computed with, n (D + V)        ring
               return 1       rows of the others' keys seen, n (D + V)                  gather
               epilogue       (S - T) (h D + n (D + V))           dq, dk, dv to tokens
"""

from megatron_nsp.plan.heads import HeadShape
from megatron_nsp.plan.layout import NodeSlice
from megatron_nsp.plan.phases import Pass, Phase
from megatron_nsp.plan.ring_rows import KeyMask
from megatron_nsp.plan.schedule import Step


def sent_elements(
    step: Step, part: NodeSlice, heads: HeadShape, mask: KeyMask | None = None, num_saved: int = 0
) -> int:
    """Elements that a rank sends to others in one step of one layer; 0 for compute.

    Args:
        step: the step.
        part: the rank's slice of the node, of the samples that the pass runs.
        heads: the layer's heads.
        mask: the layer's mask; a causal one by default.
        num_saved: samples at the head of the stream whose output was saved; counts in backward.
    """
    mask = mask or KeyMask()
    own_q = heads.num_heads // part.member_ranks
    own_kv = max(heads.num_kv_heads // part.member_ranks, 1)
    kv_width = own_kv * (heads.head_dim + heads.value_dim)
    qkv_width = own_q * heads.head_dim + kv_width
    out_width = own_q * heads.value_dim
    if step.phase is Phase.COMPUTE:
        return 0
    if step.is_between_members:
        backend = part.split.under(mask).backend
        rows = backend.gradients_sent if step.phase is Phase.RETURN else backend.keys_sent
        return rows(part.dealing, part.member, step.round, mask) * kv_width
    if step.phase is Phase.EPILOGUE:
        width = out_width if step.pass_ is Pass.FWD else qkv_width
        return (part.stream_tokens - part.num_tokens) * width
    width = qkv_width if step.pass_ is Pass.FWD else out_width
    first = part.num_tokens - part.without_first(num_saved).num_tokens
    others_inside = part.member_ranks - 1
    return others_inside * (part.num_tokens * width + first * (qkv_width + out_width))
