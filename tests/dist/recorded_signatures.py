"""Signatures of the functions that our kernels call, written down from the packages.

`make te` compares them with what is installed there; `make test` binds our calls to them, so that
no package is needed to notice a call that none of them would take. An argument is a name, or a
name=default.
"""

import ast
import inspect


def signature(text: str) -> inspect.Signature:
    """The signature of a function whose arguments are written with blanks between them."""
    parameters = []
    for word in text.split():
        name, _, default = word.partition("=")
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=ast.literal_eval(default) if default else inspect.Parameter.empty,
            )
        )
    return inspect.Signature(parameters)


# flash-attn 2.8.3.post2, flash_attn/flash_attn_interface.py
FLASH_ATTN_2_FORWARD = signature(
    """
    q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal
    window_size_left=-1 window_size_right=-1 softcap=0.0 alibi_slopes=None
    return_softmax=False block_table=None leftpad_k=None seqused_k=None zero_tensors=False
    """
)
FLASH_ATTN_2_BACKWARD = signature(
    """
    dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k
    dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes
    deterministic rng_state=None zero_tensors=False
    """
)
# Its folder hopper, flash_attn_interface.py
FLASH_ATTN_3_FIRST_FORWARD = signature(
    """
    q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
    max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin
    seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size=(-1,-1)
    attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None
    num_splits=1 pack_gqa=None sm_margin=0
    """
)
FLASH_ATTN_3_FIRST_BACKWARD = signature(
    """
    dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q
    max_seqlen_k dq dk dv softmax_scale causal window_size=(-1,-1) softcap=0.0
    deterministic=False sm_margin=0
    """
)
# The interface of 3.0.0. It stands in no package index: as other projects call it and as forks
# carry it on.
FLASH_ATTN_3_SECOND_FORWARD = signature(
    """
    q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None
    cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None
    page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None
    seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None
    causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0
    rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0
    """
)
FLASH_ATTN_3_SECOND_BACKWARD = signature(
    """
    dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None
    max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None
    is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 deterministic=False
    sm_margin=0
    """
)
# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py
FLASH_ATTN_4_FORWARD = signature(
    """
    q k v qv=None cu_seqlens_q=None cu_seqlens_k=None seqused_q=None seqused_k=None
    max_seqlen_q=None max_seqlen_k=None min_seqlen_k=None page_table=None softmax_scale=None
    causal=False softcap=None window_size_left=None window_size_right=None
    learnable_sink=None tile_mn=None mma_pv_is_rs=None intra_wg_overlap=None num_threads=384
    num_splits=1 pack_gqa=None _arch=None score_mod=None mask_mod=None
    block_sparse_tensors=None return_lse=False out=None lse=None aux_tensors=None
    aux_scalars=None q_descale=None k_descale=None v_descale=None gather_kv_indices=None
    scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False
    gather_bwd_recompute_p=False
    """
)
FLASH_ATTN_4_BACKWARD = signature(
    """
    q k v out dout lse softmax_scale=None causal=False softcap=0.0 window_size_left=None
    window_size_right=None m_block_size=64 n_block_size=128 num_threads=256 pack_gqa=False
    num_stages_Q=2 num_stages_dO=2 SdP_swapAB=False dKV_swapAB=False dQ_swapAB=False
    AtomLayoutMSdP=2 AtomLayoutNdKV=2 AtomLayoutMdQ=2 V_in_regs=False cu_seqlens_q=None
    cu_seqlens_k=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None
    deterministic=False dq=None dk=None dv=None score_mod=None score_mod_bwd=None
    mask_mod=None aux_tensors=None aux_scalars=None block_sparse_tensors=None dlse=None
    learnable_sink=None
    """
)
# Transformer Engine 2.20.2, pytorch/cpp_extensions/fused_attn.py
TE_FORWARD = signature(
    """
    is_training max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v fake_dtype
    fused_attention_backend attn_bias=None cu_seqlens_q_padded=None
    cu_seqlens_kv_padded=None page_table_k=None page_table_v=None s_quantizer=None
    o_quantizer=None attn_scale=None dropout=0.0 fast_zero_fill=True qkv_layout='sbh3d'
    o_format='sbhd' qkv_scale_inv_format=None attn_bias_type='no_bias'
    attn_mask_type='padding' softmax_type='vanilla' window_size=(-1,-1)
    bottom_right_diagonal=None rng_gen=None softmax_offset=None return_max_logit=False
    cuda_graph=False
    """
)
TE_BACKWARD = signature(
    """
    max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype
    aux_ctx_tensors fused_attention_backend cu_seqlens_q_padded=None
    cu_seqlens_kv_padded=None s_quantizer=None dp_quantizer=None dqkv_quantizer=None
    attn_scale=None dropout=0.0 fast_zero_fill=True qkv_layout='sbh3d' o_format='sbhd'
    do_format='sbhd' dqkv_layout='sbh3d' qkv_scale_inv_format=None do_scale_inv_format=None
    attn_bias_type='no_bias' attn_mask_type='padding' softmax_type='vanilla'
    window_size=(-1,-1) bottom_right_diagonal=None deterministic=False cuda_graph=False
    """
)
# Its pytorch/attention/dot_product_attention/dot_product_attention.py, without self
TE_MODULE = signature(
    """
    num_attention_heads kv_channels num_gqa_groups=None attention_dropout=0.0
    qkv_format='sbhd' attn_mask_type='causal' window_size=None bottom_right_diagonal=None
    softcap=0.0 sequence_parallel=False tp_size=1 get_rng_state_tracker=None tp_group=None
    layer_number=None attention_type='self' cp_group=None cp_global_ranks=None
    cp_stream=None cp_comm_type='p2p' softmax_scale=None softmax_type='vanilla'
    return_max_logit=False name=None
    """
)
TE_MODULE_FORWARD = signature(
    """
    query_layer=None key_layer=None value_layer=None attention_mask=None qkv_format=None
    cu_seqlens_q=None cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None
    max_seqlen_q=None max_seqlen_kv=None attn_mask_type=None window_size=None
    bottom_right_diagonal=None softcap=None checkpoint_core_attention=False
    core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None
    fast_zero_fill=True inference_params=None pad_between_seqs=None fp8_output=False
    bf16_backward=False num_splits=1 score_mod=None score_mod_bprop=None
    score_mod_tensors=None score_mod_bprop_tensors=None qkv_layer=None kv_layer=None
    qkv_interleave_dim=-3 thd_attention_policies=None thd_attention_policy_dispatch='auto'
    """
)
# The strategy is a member of an enumeration, written here by its name.
TE_MODULE_SET_GROUP = signature(
    """
    cp_group cp_global_ranks cp_stream cp_comm_type='p2p'
    load_balancing_strategy='DUAL_CHUNK_SWAP'
    """
)
