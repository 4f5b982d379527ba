"""Everything a job can get wrong, checked before any process group exists and before Megatron.

Each check raises ValueError with one line that names the flag and the numbers; all ranks come to
the same verdict, since they look at the same flags and the same index file.
"""

import argparse
from dataclasses import replace

from megatron_nsp.config import NSPConfig, Range, build_tree, flag
from megatron_nsp.cost.profile import Profile
from megatron_nsp.mcore.check_layers import check_hybrid, check_latent, check_norms, check_window
from megatron_nsp.mcore.documents import Documents
from megatron_nsp.mcore.model import recomputed_layers
from megatron_nsp.plan.split import NATIVE
from megatron_nsp.plan.static_layout import static_groups
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.runtime.kernels import AttentionKernel, require_lse


def domain_size(args: argparse.Namespace) -> int:
    """Ranks of the data-parallel domain.

    Raises:
        ValueError: context parallelism is on, or the ranks do not divide.
    """
    if args.context_parallel_size != 1:
        raise ValueError(
            f"--context-parallel-size must be 1 with nested sequence parallelism, which shares "
            f"samples over the data-parallel ranks itself; got {args.context_parallel_size}"
        )
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % model_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} times "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} does not divide "
            f"the {args.world_size} ranks"
        )
    return int(args.world_size) // model_parallel


def heads_per_rank(args: argparse.Namespace) -> tuple[int, int]:
    """Query and key/value heads on a tensor-parallel rank.

    Raises:
        ValueError: the heads do not divide over tensor parallelism.
    """
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is None:
        raise ValueError("--num-attention-heads must be given")
    kv_heads = args.num_query_groups if args.group_query_attention else heads
    if heads % kv_heads:
        raise ValueError(
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {kv_heads}"
        )
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} cannot split {heads} query and {kv_heads} "
            "key/value heads evenly"
        )
    return heads // tp, max(1, kv_heads // tp)


_DEFAULT_SPLIT = "969, 30, 1"
"""What Megatron's validation fills in for --split, where it runs before ours."""

RANGES: dict[str, Range] = dict.fromkeys(
    (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_attention_heads",
        "num_query_groups",
        "global_batch_size",
        "seed",
        "num_layers",
        "hidden_size",
        "seq_length",
        "num_experts",
    ),
    (1, None),
)
"""Numbers that later checks divide by, by parser destination."""


def check_loop(args: argparse.Namespace, num_ranks: int) -> int:
    """Checks the loss and batch flags; returns the number of micro-batches of a step.

    Raises:
        ValueError: per-token loss is off, or the batch sizes do not fit.
    """
    if not args.calculate_per_token_loss:
        raise ValueError(
            "--calculate-per-token-loss is required: ranks hold different numbers of tokens"
        )
    if args.micro_batch_size not in (None, 1):
        raise ValueError(
            f"--micro-batch-size must be 1, got {args.micro_batch_size}: a micro-batch is one "
            f"packed buffer; {flag('batch_tokens')} sets the size of a step"
        )
    args.micro_batch_size = 1
    if args.global_batch_size is None:
        args.global_batch_size = num_ranks
    if args.global_batch_size % num_ranks:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is no multiple of the {num_ranks} "
            "data-parallel ranks; it sets the micro-batches of a step, one for each multiple"
        )
    if args.rampup_batch_size is not None:
        raise ValueError(
            "--rampup-batch-size cannot be used: the micro-batches of a step are fixed"
        )
    if args.eval_iters and not (args.valid_data_path and args.train_data_path):
        raise ValueError(
            f"--eval-iters {args.eval_iters} needs --valid-data-path, and --train-data-path in "
            "place of --data-path"
        )
    if args.train_samples is not None:
        raise ValueError(
            f"--train-samples {args.train_samples} cannot be used: steps hold different numbers of "
            "samples; give --train-iters"
        )
    for name in ("split", "test_data_path", "data_args_path", "per_split_data_args_path"):
        if getattr(args, name) not in (None, _DEFAULT_SPLIT):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} cannot be used: whole documents "
                "come from --data-path, or from --train-data-path and --valid-data-path"
            )
    if args.mock_data:
        raise ValueError("--mock-data cannot be used: documents come from --data-path")
    if args.dataloader_type not in (None, "external"):
        raise ValueError(f"--dataloader-type must be external, got {args.dataloader_type}")
    args.dataloader_type = "external"
    return int(args.global_batch_size) // num_ranks


# Parser destination -> the one value that is allowed, and what to say of another.
_REFUSED: dict[str, tuple[object, str]] = {
    "attention_dropout": (0.0, "--attention-dropout must be 0"),
    "mtp_num_layers": (None, "--mtp-num-layers is not supported yet"),
    "experimental_attention_variant": (None, "--experimental-attention-variant is not supported"),
    "qk_clip": (False, "--qk-clip is not supported: it needs the largest attention score"),
    "log_max_attention_logit": (False, "--log-max-attention-logit is not supported"),
    "check_for_spiky_loss": (
        False,
        "--check-for-spiky-loss cannot be used: ranks and steps hold different numbers of tokens",
    ),
    "cuda_graph_impl": ("none", "--cuda-graph-impl must be none: boundaries change every step"),
    "enable_cuda_graph": (
        False,
        "--enable-cuda-graph cannot be used: boundaries change every step",
    ),
    "external_cuda_graph": (False, "--external-cuda-graph cannot be used: boundaries change"),
    "fp8": (None, "--fp8-format is not supported yet"),
    "fp4": (None, "--fp4-format is not supported yet"),
    "num_layers_per_virtual_pipeline_stage": (
        None,
        "--num-layers-per-virtual-pipeline-stage is not supported yet",
    ),
    "num_virtual_stages_per_pipeline_rank": (
        None,
        "--num-virtual-stages-per-pipeline-rank is not supported yet",
    ),
    "pipeline_model_parallel_layout": (
        None,
        "--pipeline-model-parallel-layout is not supported yet",
    ),
}


def check_attention(args: argparse.Namespace) -> None:
    """Refuses attention and loops that nested attention does not serve.

    Raises:
        ValueError: names the flag and its value.
    """
    for name, (allowed, message) in _REFUSED.items():
        value = getattr(args, name, allowed)
        if value != allowed and value is not None:
            raise ValueError(f"{message}, got {value}")
    if args.position_embedding_type not in ("rope", "yarn", "none", "learned_absolute"):
        raise ValueError(
            "--position-embedding-type must be rope, yarn, learned_absolute or none, got "
            f"{args.position_embedding_type}"
        )
    if args.attention_backend.name == "local":
        raise ValueError("--attention-backend local would take nested attention out of the model")
    check_hybrid(args)
    check_latent(args)
    check_norms(args)
    check_window(args)
    check_checkpoints(args)
    kernel, is_half = args.nsp_kernel, args.bf16 or args.fp16
    if not args.nsp_cpu and kernel not in ("cpu-flash", "reference") and not is_half:
        raise ValueError(f"--nsp-kernel {kernel} on GPUs needs --bf16 or --fp16")


def check_moe(args: argparse.Namespace) -> None:
    """Refuses routing that depends on which rank a token is on.

    Raises:
        ValueError: names the flag and its value.
    """
    if not args.num_experts:
        return
    coefficients = args.moe_aux_loss_coeff
    if not isinstance(coefficients, list | tuple):
        coefficients = [coefficients]
    if any(coefficients):
        raise ValueError(
            f"--moe-aux-loss-coeff must be 0, got {args.moe_aux_loss_coeff}: the auxiliary loss "
            "would depend on which rank a token is on"
        )
    balancing = args.moe_router_load_balancing_type
    for name in [balancing] if isinstance(balancing, str) else balancing:
        if name in ("sinkhorn", "quantile_balancing"):
            raise ValueError(
                f"--moe-router-load-balancing-type {name} cannot be used: it would route by the "
                "tokens of one rank"
            )
    if args.moe_input_jitter_eps is not None:
        raise ValueError(
            f"--moe-input-jitter-eps {args.moe_input_jitter_eps} cannot be used: the noise would "
            "depend on which rank a token is on"
        )
    if args.moe_router_enable_expert_bias:
        raise ValueError(
            "--moe-router-enable-expert-bias cannot be used: Megatron 0.19 counts tokens wrongly "
            "where filler tokens are masked from the router"
        )
    if args.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"--moe-expert-capacity-factor must not be set, got {args.moe_expert_capacity_factor}:"
            " it drops tokens by the counts of one rank"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with experts needs "
            "--sequence-parallel: Megatron 0.19 trains no experts without it"
        )
    if args.sequence_parallel and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            "--sequence-parallel with experts and --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} is not supported yet: later stages would see "
            "filler tokens as real ones"
        )
    if args.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "--moe-token-dispatcher-type must be alltoall or flex, got allgather, which needs the "
            "same number of tokens on every rank"
        )


def check_positions(args: argparse.Namespace, max_length: int) -> None:
    """Checks that learned positions reach as far as the longest sample.

    Raises:
        ValueError: names both flags and their values.
    """
    positions = args.max_position_embeddings
    if args.position_embedding_type != "learned_absolute" or positions is None:
        return
    if max_length > positions:
        raise ValueError(
            f"--max-position-embeddings {positions} does not reach the longest sample of "
            f"{max_length} tokens that {flag('max_length')} or --seq-length allows"
        )


def check_lengths(
    config: NSPConfig,
    documents: Documents,
    max_length: int,
    tree: SPTree,
    data_flag: str = "--data-path",
    is_chunked: bool = False,
) -> None:
    """Checks the documents of `data_flag` against the longest length and the token budget.

    `is_chunked` says that nodes of the largest degree always have ring members, which hold two
    chunks of a sample.

    Raises:
        ValueError: names the document, its length and the limit.
    """
    lengths = documents.lengths
    over_long = (lengths > max_length).nonzero()[0]
    if config.over_long == "error" and len(over_long):
        first = int(over_long[0])
        raise ValueError(
            f"document {first} of {data_flag} has {lengths[first]} tokens, over "
            f"{flag('max_length')} {max_length}; {len(over_long)} of {len(lengths)} documents are"
        )
    usable = lengths[(lengths > 0) & (lengths <= max_length)]
    if not len(usable):
        raise ValueError(
            f"{data_flag} holds no document to train on: {len(lengths)} documents, none with 1 to "
            f"{max_length} tokens"
        )
    longest = int(usable.max())
    chunks = 2 if is_chunked else 1
    needed = chunks * -(-longest // (chunks * tree.max_degree))
    if config.token_budget is not None and needed > config.token_budget:
        raise ValueError(
            f"{flag('token_budget')} {config.token_budget} is too small: the longest sample of "
            f"{data_flag}, {longest} tokens, puts {needed} on a rank at the largest degree "
            f"{tree.max_degree}"
        )


def job_tree(args: argparse.Namespace, config: NSPConfig, profile: Profile) -> SPTree:
    """The SP tree of a job's flags.

    A profile that holds one model's times knows Ulysses alone, whose degrees heads limit.

    Raises:
        ValueError: see `config.build_tree`, `domain_size` and `heads_per_rank`.
    """
    if profile.fitted is not None:
        if config.backend not in ("auto", "ulysses"):
            raise ValueError(
                f"{flag('backend')} must be auto or ulysses with {flag('profile')} {profile.name}, "
                f"which holds the times of one model with Ulysses, got {config.backend}"
            )
        config = replace(config, backend="ulysses")
    return build_tree(config, domain_size(args), *heads_per_rank(args))


def check_input_layout(config: NSPConfig, num_ranks: int) -> None:
    """Checks that the static groups of the input layout, if any, fit the domain.

    Raises:
        ValueError: names the flag, its degree and the ranks.
    """
    if config.static_degree is None:
        return
    try:
        static_groups(num_ranks, config.static_degree)
    except ValueError as error:
        raise ValueError(f"{flag('input_layout')} {config.input_layout}: {error}") from error


def check_native(args: argparse.Namespace, config: NSPConfig) -> None:
    """Checks that Transformer Engine's context parallelism can do what the model asks for.

    Raises:
        ValueError: names both flags.
    """
    if config.backend not in NATIVE:
        return
    asked = f"{flag('backend')} {config.backend}"
    if args.softmax_type != "vanilla":
        raise ValueError(f"{asked} serves no attention sinks: --softmax-type {args.softmax_type}")
    if config.backend == "te-p2p" and args.window_size is not None:
        raise ValueError(f"{asked} has no sliding window: --window-size {args.window_size}")


def check_sinks(args: argparse.Namespace, kernel: AttentionKernel) -> None:
    """Checks that sinks can be added to what the kernel gives.

    Raises:
        ValueError: names the flag and the kernel.
    """
    if args.softmax_type != "vanilla":
        require_lse(kernel, f"--softmax-type {args.softmax_type}")


def check_checkpoints(args: argparse.Namespace) -> None:
    """Refuses checkpoints that Megatron would only fail to write once it gets there.

    Raises:
        ValueError: names the flags.
    """
    if args.use_megatron_fsdp and args.swiglu and args.save and not (args.bf16 or args.fp16):
        raise ValueError(
            "--use-megatron-fsdp with --swiglu and --save needs --bf16 or --fp16: Megatron 0.19 "
            "cannot write its checkpoint in float32"
        )


def check_saving(args: argparse.Namespace, config: NSPConfig, kernel: AttentionKernel) -> None:
    """Checks that there is something to save from being recomputed, and that it can be.

    Raises:
        ValueError: names the flag and its value.
    """
    if not config.save_budget_gb:
        return
    require_lse(kernel, f"{flag('save_budget_gb')} {config.save_budget_gb:g}")
    if not recomputed_layers(args):
        raise ValueError(
            f"{flag('save_budget_gb')} {config.save_budget_gb:g} would do nothing: attention is "
            "not recomputed; it needs --recompute-granularity full, or selective with core_attn "
            "among --recompute-modules"
        )
