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
from megatron_nsp.plan.ring_rows import ring_block, seen_keys
from megatron_nsp.plan.schedule import Pass, Phase, Step
from megatron_nsp.plan.split import Split


def sent_elements(
    step: Step,
    part: NodeSlice,
    heads: HeadShape,
    split: Split,
    is_causal: bool = True,
    window_left: int | None = None,
    num_saved: int = 0,
) -> int:
    """Elements that a rank sends to others in one step of one layer; 0 for compute.

    Args:
        step: the step.
        part: the rank's slice of the node, of the samples that the pass runs.
        heads: the layer's heads.
        split: how the node divides attention under the layer's mask.
        is_causal: whether the mask is causal.
        window_left: most tokens before itself that a token sees; None = all.
        num_saved: samples at the head of the stream whose output was saved; counts in backward.
    """
    assert step.phase is not Phase.NATIVE, "what Transformer Engine sends is not predicted"
    own_q = heads.num_heads // part.ulysses_degree
    own_kv = max(heads.num_kv_heads // part.ulysses_degree, 1)
    kv_width = own_kv * (heads.head_dim + heads.value_dim)
    qkv_width = own_q * heads.head_dim + kv_width
    out_width = own_q * heads.value_dim
    others_inside = part.ulysses_degree - 1
    if step.phase is Phase.COMPUTE:
        return 0
    if step.phase is Phase.EPILOGUE:
        width = out_width if step.pass_ is Pass.FWD else qkv_width
        return (part.stream_tokens - part.num_tokens) * width
    if step.round == 0:
        width = qkv_width if step.pass_ is Pass.FWD else out_width
        first = part.num_tokens - part.without_first(num_saved).num_tokens
        return others_inside * (part.num_tokens * width + first * (qkv_width + out_width))
    if split.outer == "gather":
        others = [member for member in range(part.ring_degree) if member != part.member]
        is_forth = step.phase is Phase.PROLOGUE
        pairs = [(other, part.member) if is_forth else (part.member, other) for other in others]
        rows = sum(len(seen_keys(part, *pair, is_causal, window_left)) for pair in pairs)
        return rows * kv_width
    if step.phase is Phase.PROLOGUE:
        streams = part.member_tokens
        return streams[(part.member - step.round + 1) % part.ring_degree] * kv_width
    source = (part.member - step.round) % part.ring_degree
    return len(ring_block(part, part.member, source, is_causal).kv_rows) * kv_width
