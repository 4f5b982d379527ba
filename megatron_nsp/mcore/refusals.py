"""What flags may not ask for: one table, from which jobs are checked and a page is written.

A row is checked before any process group exists and before Megatron's own validation, on all
ranks alike. Rows stand in the order in which they are checked, so a row may rely on those before
it. What more than flags decides (documents, profiles, recorded plans, what a kernel needs) is
checked where that is opened.

`python -m megatron_nsp.mcore.limits_page docs/limits.md` writes them into that page.
"""

import argparse
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import HAVE_APEX

from megatron_nsp.mcore.cpu.args import CPU_ARGS, CpuArgument
from megatron_nsp.mcore.data_paths import is_split
from megatron_nsp.mcore.layers import ATTENTION_LAYERS, LAYERS
from megatron_nsp.mcore.refusal import Refusal, Values
from megatron_nsp.plan.backends import backends_of
from megatron_nsp.runtime.kernels import AttentionKernel, takes_32_bits


def _least_one(flag: str, name: str) -> Refusal:
    return Refusal(
        flag,
        lambda number: number is not None and number < 1,
        f"{flag} must be at least 1, got {{{name}}}",
        "a size; what comes after divides by it",
        (name,),
    )


def _not_on_cpu(name: str, argument: CpuArgument) -> Refusal:
    flag, value = argument
    message = f"{flag} cannot be used with --nsp-cpu, got {{{name}}}"
    if isinstance(value, bool) and flag.startswith("--no-"):
        message = f"{flag} is needed with --nsp-cpu"
    elif isinstance(value, str):
        message = f"{flag} must be {value} with --nsp-cpu, got {{{name}}}"
    return Refusal(
        flag,
        lambda is_cpu, given: is_cpu and given != value,
        message,
        "CPU ranks run none of the kernels for GPUs",
        ("nsp_cpu", name),
    )


def _only(
    flag: str, name: str, message: str, reason: str, allowed: Any = None, **absent: Any
) -> Refusal:
    """Refuses every value of an argument but one, and but None."""
    return Refusal(
        flag,
        lambda given: given is not None and given != allowed,
        f"{message}, got {{{name}}}",
        reason,
        (name,),
        absent,
    )


def _off(flag: str, why: str, reason: str) -> Refusal:
    """Refuses whatever an argument is set to."""
    name = flag[2:].replace("-", "_")
    return Refusal(flag, bool, f"{flag} cannot be used: {why}", reason, (name,))


def _one_stack(flag: str, whole: str) -> Refusal:
    """Refuses a size of one stack of two; Megatron's validation sets it to that of the model."""
    names = [each[2:].replace("-", "_") for each in (flag, whole)]
    return Refusal(
        flag,
        lambda given, of_model: given not in (None, of_model),
        f"{flag} cannot be used: give {whole}",
        "there is one stack of layers",
        tuple(names),
    )


def _needs_te(flag: str, reason: str) -> Refusal:
    """Refuses whatever an argument is set to, where Transformer Engine is missing."""
    return Refusal(
        flag,
        lambda given: given is not None and not HAVE_TE,
        f"{flag} needs Transformer Engine, which is not installed",
        reason,
        (flag[2:].replace("-", "_"),),
    )


def _more_shards(flag: str, name: str, tensor_parallel: str) -> Refusal:
    return Refusal(
        flag,
        lambda shards, ranks: shards is not None and ranks is not None and shards > ranks,
        f"{flag} {{{name}}} cannot be used: it takes ranks out of the domain to shard weights over",
        "what one rank of the domain keeps of a weight, all of them keep",
        (name, tensor_parallel),
    )


def _sources(**given: Any) -> list[str]:
    """The flags that name documents; those of the three parts are one source."""
    apart = [name for name in _PARTS if given[name] is not None]
    names = [*(name for name in _WHOLE if given[name]), *apart[:1]]
    return ["--" + name.replace("_", "-") for name in names]


def _two_sources(*values: Any) -> str | None:
    found = _sources(**dict(zip(_DATA, values, strict=True)))
    return " and ".join(found) if len(found) > 1 else None


def _no_source(*values: Any) -> bool:
    return not _sources(**dict(zip(_DATA, values, strict=True)))


_OTHER_DATA = (
    (
        "--fim-data",
        "documents are trained on as they are in the data set",
        "Megatron fills in the middle of samples that it has cut to one length",
    ),
    (
        "--sft",
        "documents come as tokens, not as conversations",
        "Megatron tokenizes, packs and masks conversations in a data set of its own; whole "
        "documents with a target at every token are what is planned",
    ),
    (
        "--phase-transition-iterations",
        "the order of documents runs over all steps",
        "a resumed run goes over the draws of all steps before it, which other data would change",
    ),
    (
        "--perform-rl-step",
        "steps are planned before they run",
        "samples of a step of reinforcement learning do not exist before it",
    ),
    (
        "--logits-save-dir",
        "logits would be saved in the order of a rank's buffer",
        "Megatron pairs logits of teacher and student by their places in a batch",
    ),
    (
        "--logits-load-dir",
        "logits were saved in the order of another run's batches",
        "Megatron pairs logits of teacher and student by their places in a batch",
    ),
    (
        "--multiple-validation-sets",
        "one list of documents is validated on",
        "Megatron 0.19 loses the test set then, and takes it with --full-validation alone",
    ),
)
"""Flags of Megatron's other data sets and loops: the flag, what a user reads, and why."""

_PARTS = ("train_data_path", "valid_data_path", "test_data_path")
_WHOLE = ("data_path", "data_args_path", "per_split_data_args_path", "mock_data")
_DATA = (*_WHOLE, *_PARTS)


def _missing_spec(spec: Sequence[str] | None) -> str | None:
    """What `--spec` names, if it is not there."""
    if spec is None:
        return None
    module, *names = spec or ("",)
    try:
        is_there = len(names) == 1 and hasattr(importlib.import_module(module), names[0])
    except ImportError:
        is_there = False
    return None if is_there else " ".join(spec) or "without a module"


def _bad_window(window: Sequence[int] | None) -> str | None:
    """The window as one types it, if it is none that a causal layer can have."""
    if window is None or (len(window) == 2 and window[0] >= -1 and window[1] == 0):
        return None
    return ",".join(str(side) for side in window)


def _wrong_length(per_layer: Any, num_layers: int) -> int | None:
    """The layers that a list of layers has, if they are not the model's."""
    is_wrong = isinstance(per_layer, list) and len(per_layer) != num_layers
    return len(per_layer) if is_wrong else None


def _local_balancing(balancing: str | Sequence[str]) -> str | None:
    """The way of balancing experts that looks at the tokens of one rank, if it is given."""
    given = [balancing] if isinstance(balancing, str) else balancing
    return "quantile_balancing" if "quantile_balancing" in given else None


def _beside_sinkhorn(
    balancing: str | Sequence[str], coefficients: float | Sequence[float]
) -> str | None:
    """What is given beside Sinkhorn routing, if anything."""
    given = [balancing] if isinstance(balancing, str) else list(balancing)
    values = coefficients if isinstance(coefficients, list | tuple) else [coefficients]
    if "sinkhorn" not in given:
        return None
    if len(given) > 1:
        return " ".join(given)
    return f"--moe-aux-loss-coeff {values[0]}" if any(values) else None


def _wrong_stages(pattern: str | None, stages: int) -> int | None:
    """The stages that a hybrid pattern marks, if the job's ranks cannot have equally many."""
    marked = (pattern or "").count("|") + 1
    return marked if marked > 1 and marked % stages else None


def _waits_for_ever(
    overlap_p2p_comm: bool,
    virtual_stages: int,
    num_micro_batches: int,
    micro_batch_group: int,
    pipeline_model_parallel_size: int,
) -> bool:
    """Whether a rank's forward passes before its first backward are just all that it has."""
    if overlap_p2p_comm or virtual_stages == 1:
        return False
    later = range(1, pipeline_model_parallel_size)
    first_passes = (2 * ranks + (virtual_stages - 1) * micro_batch_group for ranks in later)
    return num_micro_batches * virtual_stages in first_passes


def _are_all_ends(
    virtual_stages: int,
    pipeline_model_parallel_size: int,
    decoder_first_pipeline_num_layers: int | None,
    decoder_last_pipeline_num_layers: int | None,
) -> bool:
    ends = decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers
    return virtual_stages > 1 and pipeline_model_parallel_size == 2 and None not in ends


def _short_group(
    virtual_stages: int,
    num_micro_batches: int,
    micro_batch_group: int,
    pipeline_model_parallel_size: int,
) -> int:
    """The micro-batches of a step's last group, if a pipeline has more ranks."""
    last = num_micro_batches % micro_batch_group
    return last if virtual_stages > 1 and last < pipeline_model_parallel_size else 0


def _splits_local_norms(
    sequence_parallel: bool,
    tensor_model_parallel_size: int,
    transformer_impl: str,
    spec: Sequence[str] | None,
    normalization: str,
) -> bool:
    is_split = sequence_parallel and tensor_model_parallel_size > 1
    is_local = transformer_impl == "local" and spec is None  # a spec brings norms of its own
    return is_split and is_local and (normalization == "RMSNorm" or not HAVE_APEX)


def _splits_latent_keys(
    multi_latent_attention: bool,
    tensor_model_parallel_size: int,
    sequence_parallel: bool,
    transformer_impl: str,
) -> bool:
    is_whole = sequence_parallel and transformer_impl == "transformer_engine"
    return multi_latent_attention and tensor_model_parallel_size > 1 and not is_whole


def _quantized(flag: str, name: str) -> tuple[Refusal, ...]:
    """What linear layers in few bits may not meet."""
    reason = "ranks would reduce the maxima of different modules together"
    return (
        Refusal(
            flag,
            lambda given, backend: given and all(each.is_native for each in backends_of(backend)),
            f"{flag} {{{name}}} cannot be used with --nsp-backend {{nsp_backend}}",
            reason,
            (name, "nsp_backend"),
        ),
        Refusal(
            flag,
            lambda given, kernel: given and kernel == "te-module",
            f"{flag} {{{name}}} cannot be used with --nsp-kernel {{nsp_kernel}}",
            reason,
            (name, "nsp_kernel"),
        ),
        Refusal(
            flag,
            lambda given, implementation: given and implementation != "transformer_engine",
            f"{flag} {{{name}}} needs --transformer-impl transformer_engine, got "
            "{transformer_impl}",
            "Megatron would train in 16 bits and not say so",
            (name, "transformer_impl"),
        ),
        Refusal(
            flag,
            lambda given: given and not HAVE_TE,
            f"{flag} {{{name}}} needs Transformer Engine, which is not installed",
            "Megatron would train in 16 bits and not say so",
            (name,),
        ),
    )


_SIZES = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-attention-heads"),
    *("--num-query-groups", "--global-batch-size", "--seed", "--num-layers", "--hidden-size"),
    *("--seq-length", "--num-experts", "--context-parallel-size", "--micro-batch-size"),
    *("--eval-micro-batch-size", "--eval-global-batch-size"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
)

_GRAPHS = "a graph has fixed sizes"

YAML_CFG = _off(
    "--yaml-cfg",
    "it takes the place of the command line, and of what is said of nested sequence parallelism "
    "on it",
    "Megatron reads the file in place of the flags that it has parsed",
)

REFUSALS: Mapping[str, Sequence[Refusal]] = {
    "Sizes": [_least_one(flag, flag[2:].replace("-", "_")) for flag in _SIZES],
    "CPU ranks": [_not_on_cpu(name, argument) for name, argument in CPU_ARGS.items()],
    "Parallelism": [
        Refusal(
            "--tensor-model-parallel-size",
            lambda world_size, tensor_model_parallel_size, pipeline_model_parallel_size: (
                world_size % (tensor_model_parallel_size * pipeline_model_parallel_size)
            ),
            "--tensor-model-parallel-size {tensor_model_parallel_size} times "
            "--pipeline-model-parallel-size {pipeline_model_parallel_size} does not divide the "
            "{world_size} ranks",
            "every rank belongs to one domain",
        ),
        Refusal(
            "--context-parallel-size",
            lambda context_parallel_size, num_ranks: num_ranks % context_parallel_size,
            "--context-parallel-size {context_parallel_size} does not divide the {num_ranks} "
            "data-parallel ranks",
            "batches are counted by context-parallel groups, though samples are not shared by them",
        ),
        Refusal(
            "--num-attention-heads",
            lambda num_attention_heads: num_attention_heads is None,
            "--num-attention-heads must be given",
            "heads decide which degrees there are",
        ),
        Refusal(
            "--num-layers",
            lambda num_layers: num_layers is None,
            "--num-layers must be given, or --hybrid-layer-pattern",
            "there is one stack of layers",
        ),
        Refusal(
            "--num-query-groups",
            lambda num_attention_heads, kv_heads: num_attention_heads % kv_heads,
            "--num-attention-heads {num_attention_heads} is no multiple of --num-query-groups "
            "{kv_heads}",
            "query heads share key/value heads evenly",
        ),
        Refusal(
            "--tensor-model-parallel-size",
            lambda tensor_model_parallel_size, num_attention_heads, kv_heads: (
                num_attention_heads % tensor_model_parallel_size
                or (kv_heads % tensor_model_parallel_size and tensor_model_parallel_size % kv_heads)
            ),
            "--tensor-model-parallel-size {tensor_model_parallel_size} cannot split "
            "{num_attention_heads} query and {kv_heads} key/value heads evenly",
            "tensor-parallel ranks hold equal heads",
        ),
        _more_shards(
            "--tensor-parallel-num-weight-shards",
            "tensor_parallel_num_weight_shards",
            "tensor_model_parallel_size",
        ),
        _more_shards(
            "--expert-tensor-parallel-num-weight-shards",
            "expert_tensor_parallel_num_weight_shards",
            "expert_tensor_ranks",
        ),
        Refusal(
            "--sequence-parallel",
            _splits_local_norms,
            "--sequence-parallel needs --transformer-impl transformer_engine, which CPU ranks do "
            "not run, or a --spec: the norm of Megatron's local layers refuses it",
            "the torch norm of Megatron's local layers runs on whole rows alone",
        ),
    ],
    "Batches and data": [
        Refusal(
            "--data-path",
            _no_source,
            "--data-path is required: the prefix of a .bin and .idx file; or --mock-data",
            "lengths are needed before the first step",
            _DATA,
        ),
        Refusal(
            "--data-path",
            _two_sources,
            "documents come from one place, got {found}",
            "Megatron would take the first and say nothing of the second",
            _DATA,
        ),
        Refusal(
            "--split",
            lambda split: split is not None and not is_split(split),
            "--split must be one to three shares with commas, for training, validation and test, "
            "got {split}",
            "Megatron would read the numbers in it and leave out what is none",
        ),
        Refusal(
            "--split",
            lambda split, train_data_path, valid_data_path, per_split_data_args_path: (
                split is not None
                and (train_data_path or valid_data_path or per_split_data_args_path)
            ),
            "--split {split} cuts --data-path, but each part has data sets of its own",
            "nothing is left to cut",
        ),
        *(_off(*row) for row in _OTHER_DATA),
        Refusal(
            "--test-data-path",
            lambda test_data_path, valid_data_path: test_data_path and not valid_data_path,
            "--test-data-path needs --valid-data-path",
            "Megatron tests only where it also validates",
        ),
        Refusal(
            "--seq-length",
            lambda longest: longest is None,
            "--seq-length is required: the longest sample to train on, in tokens",
            "nothing else says it, `--nsp-max-length` apart",
        ),
    ],
    "Pipelines": [
        Refusal(
            "--num-layers-per-virtual-pipeline-stage",
            lambda num_layers_per_virtual_pipeline_stage, layers_of_a_rank: (
                num_layers_per_virtual_pipeline_stage is not None
                and layers_of_a_rank % num_layers_per_virtual_pipeline_stage
            ),
            "--num-layers-per-virtual-pipeline-stage {num_layers_per_virtual_pipeline_stage} does "
            "not divide the {layers_of_a_rank} layers of a pipeline rank",
            "virtual stages of a rank are equal",
        ),
        Refusal(
            "--num-layers",
            lambda num_layers, pipeline_model_parallel_size, stage_error: stage_error,
            "--num-layers {num_layers} cannot be shared out as asked over "
            "--pipeline-model-parallel-size {pipeline_model_parallel_size}: {found}",
            "what follows is what Megatron says of layouts and uneven stages",
        ),
        Refusal(
            "--decoder-last-pipeline-num-layers",
            _are_all_ends,
            "--decoder-last-pipeline-num-layers {decoder_last_pipeline_num_layers} must be left "
            "out: --decoder-first-pipeline-num-layers {decoder_first_pipeline_num_layers} says "
            "enough with {virtual_stages} virtual stages on two ranks",
            "Megatron 0.19 divides by the ranks between them",
        ),
        Refusal(
            "--no-overlap-p2p-communication",
            lambda virtual_stages, overlap_p2p_comm, pipeline_model_parallel_size: (
                virtual_stages > 1 and not overlap_p2p_comm and pipeline_model_parallel_size == 2
            ),
            "--no-overlap-p2p-communication with {virtual_stages} virtual stages needs "
            "--pipeline-model-parallel-size of at least 3, got {pipeline_model_parallel_size}",
            "two ranks would send each other two tensors at once",
        ),
        Refusal(
            "--overlap-p2p-communication-warmup-flush",
            lambda overlap_p2p_comm_warmup_flush, virtual_stages, overlap_p2p_comm: (
                overlap_p2p_comm_warmup_flush and (virtual_stages == 1 or not overlap_p2p_comm)
            ),
            "--overlap-p2p-communication-warmup-flush needs virtual stages and must not go with "
            "--no-overlap-p2p-communication",
            "Megatron overlaps the exchanges of virtual stages alone",
        ),
        Refusal(
            "--use-ring-exchange-p2p",
            lambda use_ring_exchange_p2p, pipeline_model_parallel_size: (
                use_ring_exchange_p2p
                and pipeline_model_parallel_size > 1
                and not hasattr(torch.distributed, "ring_exchange")
            ),
            "--use-ring-exchange-p2p needs a torch with torch.distributed.ring_exchange",
            "a torch of one's own has it, none that is shipped",
        ),
        Refusal(
            "--use-megatron-fsdp",
            lambda use_megatron_fsdp, pipeline_model_parallel_size: (
                use_megatron_fsdp and pipeline_model_parallel_size > 1
            ),
            "--use-megatron-fsdp cannot be used with --pipeline-model-parallel-size "
            "{pipeline_model_parallel_size}, only with 1",
            "Megatron 0.19 shards over all ranks of a job as if they had one stage",
        ),
        Refusal(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            lambda virtual_stages, micro_batch_group, pipeline_model_parallel_size: (
                virtual_stages > 1 and micro_batch_group < pipeline_model_parallel_size
            ),
            "--microbatch-group-size-per-virtual-pipeline-stage {micro_batch_group} must be at "
            "least --pipeline-model-parallel-size {pipeline_model_parallel_size}",
            "a rank takes the next virtual stage when the first micro-batch is back",
        ),
        Refusal(
            "--global-batch-size",
            lambda virtual_stages, num_micro_batches, micro_batch_group, num_ranks: (
                virtual_stages > 1
                and num_micro_batches < micro_batch_group
                and micro_batch_group * num_ranks
            ),
            "--global-batch-size must be at least {found} with {virtual_stages} virtual stages on "
            "{num_ranks} data-parallel ranks: they run {micro_batch_group} micro-batches at a "
            "time, a step has {num_micro_batches}",
            "a rank takes the next virtual stage when the first micro-batch is back",
        ),
        Refusal(
            "--global-batch-size",
            _short_group,
            "--global-batch-size gives {num_micro_batches} micro-batches a step, {found} more than "
            "whole groups of {micro_batch_group}: virtual stages need none more, or at least "
            "--pipeline-model-parallel-size {pipeline_model_parallel_size}",
            "a rank takes the next virtual stage when the first micro-batch is back",
        ),
        Refusal(
            "--no-overlap-p2p-communication",
            _waits_for_ever,
            "--no-overlap-p2p-communication hangs with {num_micro_batches} micro-batches a step in "
            "groups of {micro_batch_group}, {virtual_stages} virtual stages and "
            "--pipeline-model-parallel-size {pipeline_model_parallel_size}; --global-batch-size "
            "sets the first",
            "where a rank has no forward pass left just when its neighbour begins with backward, "
            "one waits to send a tensor and the other for the shape of the next",
        ),
    ],
    "Attention": [
        _only(
            "--attention-dropout",
            "attention_dropout",
            "--attention-dropout must be 0",
            "kernels would need one random stream for all ranks of a node",
            0.0,
        ),
        Refusal(
            "--position-embedding-type",
            lambda position_embedding_type: (
                position_embedding_type not in ("rope", "yarn", "none", "learned_absolute")
            ),
            "--position-embedding-type must be rope, yarn, learned_absolute or none, got "
            "{position_embedding_type}",
            "`relative` is a bias on the scores (as ALiBi is, which Megatron has no flag for), "
            "`mrope` has three positions a token",
        ),
        Refusal(
            "--max-position-embeddings",
            lambda position_embedding_type, max_position_embeddings, longest: (
                position_embedding_type == "learned_absolute"
                and max_position_embeddings is not None
                and longest > max_position_embeddings
            ),
            "--max-position-embeddings {max_position_embeddings} does not reach the longest sample "
            "of {longest} tokens that --nsp-max-length or --seq-length allows",
            "there is one learned vector for each place in a document",
        ),
        Refusal(
            "--attention-backend",
            lambda attention_backend: attention_backend.name == "local",
            "--attention-backend local would take nested attention out of the model",
            "Megatron then exchanges core attention itself",
        ),
        _only(
            "--experimental-attention-variant",
            "experimental_attention_variant",
            "--experimental-attention-variant is not supported",
            "sparse and linear attention see more than their own rows",
        ),
        _only(
            "--qk-clip",
            "qk_clip",
            "--qk-clip is not supported: it needs the largest attention score",
            "kernels do not give the largest score",
            False,
        ),
        _only(
            "--log-max-attention-logit",
            "log_max_attention_logit",
            "--log-max-attention-logit is not supported",
            "kernels do not give the largest score",
            False,
        ),
        _off(
            "--use-kitchen-attention",
            "--nsp-kernel runs attention",
            "core attention is exchanged, and with it the kernel",
        ),
        _off(
            "--batch-invariant-mode",
            "it is a property of the kernels that Megatron's own core attention calls",
            "core attention is exchanged, and with it the kernel",
        ),
        Refusal(
            "--multi-latent-attention",
            _splits_latent_keys,
            "--multi-latent-attention with --tensor-model-parallel-size "
            "{tensor_model_parallel_size} needs --transformer-impl transformer_engine and "
            "--sequence-parallel: without them Megatron 0.19 gets its gradients wrong",
            "elsewhere Megatron 0.19 keeps one rank's part of the shared rotary key's gradient and "
            "counts that of the query norm twice",
        ),
        Refusal(
            "--window-size",
            _bad_window,
            "--window-size must be LEFT,0 with LEFT at least 0, or -1 for all tokens before, got "
            "{found}: attention is causal",
            "attention is causal; Megatron's own modules disagree on a RIGHT of -1",
            ("window_size",),
        ),
        Refusal(
            "--window-attn-skip-freq",
            lambda window_attn_skip_freq, num_layers, window_size: (
                window_size is not None and _wrong_length(window_attn_skip_freq, num_layers)
            ),
            "--window-attn-skip-freq lists {found} layers, --num-layers is {num_layers}",
            "a list has an entry for every layer",
        ),
        Refusal(
            "--window-attn-skip-freq",
            lambda window_attn_skip_freq, window_size: (
                window_size is not None
                and isinstance(window_attn_skip_freq, int)
                and window_attn_skip_freq < 1
            ),
            "--window-attn-skip-freq must be at least 1, got {window_attn_skip_freq}",
            "every N-th layer has no window",
        ),
        Refusal(
            "--nsp-backend",
            lambda nsp_backend, softmax_type: (
                softmax_type != "vanilla"
                and not any(backend.serves_sinks for backend in backends_of(nsp_backend))
            ),
            "--nsp-backend {nsp_backend} serves no attention sinks: --softmax-type {softmax_type}",
            "Transformer Engine's context parallelism takes no sink",
        ),
        Refusal(
            "--nsp-backend",
            lambda nsp_backend, window_size: (
                window_size is not None
                and not any(backend.serves_windows for backend in backends_of(nsp_backend))
            ),
            "--nsp-backend {nsp_backend} has no sliding window: --window-size {window_size}",
            "Transformer Engine's ring takes no window",
        ),
    ],
    "Layers": [
        Refusal(
            "--hybrid-layer-pattern",
            lambda hybrid_layer_pattern: "".join(
                sorted(set(hybrid_layer_pattern or "") - set(LAYERS + "|"))
            ),
            "--hybrid-layer-pattern {hybrid_layer_pattern}: {found} cannot be used: only attention "
            "(*), latent attention (+), MLPs (-) and experts (E) run on a part of a sample",
            "Mamba (M) and gated delta layers (G) carry state along a sequence, sparse attention "
            "(D) picks keys of all of it, `/` predicts further tokens",
        ),
        Refusal(
            "--hybrid-layer-pattern",
            lambda hybrid_layer_pattern: (
                hybrid_layer_pattern is not None
                and not set(hybrid_layer_pattern) & set(ATTENTION_LAYERS)
            ),
            "--hybrid-layer-pattern {hybrid_layer_pattern} holds no attention layer, * or +",
            "attention is what is nested",
        ),
        Refusal(
            "--hybrid-layer-pattern",
            lambda hybrid_layer_pattern, pipeline_model_parallel_size: _wrong_stages(
                hybrid_layer_pattern, pipeline_model_parallel_size
            ),
            "--hybrid-layer-pattern {hybrid_layer_pattern} marks {found} stages, no multiple of "
            "--pipeline-model-parallel-size {pipeline_model_parallel_size}",
            "`|` ends a pipeline stage",
        ),
        Refusal(
            "--spec",
            _missing_spec,
            "--spec {found} cannot be imported",
            "Megatron would go on with its default",
            ("spec",),
        ),
        Refusal(
            "--hybrid-layer-pattern",
            lambda hybrid_layer_pattern, spec: (
                hybrid_layer_pattern is not None and spec is None and not HAVE_TE
            ),
            "--hybrid-layer-pattern needs Transformer Engine, which is not installed, or --spec "
            "with a stack of other modules",
            "Megatron ships a stack of Transformer Engine's modules alone",
        ),
        Refusal(
            "--mtp-num-layers",
            lambda mtp_num_layers: mtp_num_layers is not None and mtp_num_layers < 0,
            "--mtp-num-layers must be at least 0, got {mtp_num_layers}",
            "a number of depths",
        ),
        Refusal(
            "--mtp-num-layers",
            lambda mtp_num_layers, hybrid_layer_pattern: (
                mtp_num_layers and hybrid_layer_pattern is not None
            ),
            "--mtp-num-layers {mtp_num_layers} cannot be used with --hybrid-layer-pattern "
            "{hybrid_layer_pattern}",
            "further tokens are predicted by GPT models alone",
        ),
        Refusal(
            "--mtp-num-layers",
            lambda depths, path, text: depths and (path or text),
            "--mtp-num-layers {mtp_num_layers} cannot be used with "
            "--heterogeneous-layers-config-path or --heterogeneous-layers-config-encoded-json",
            "Megatron would predict further tokens with a layer that is not among those",
            (
                *("mtp_num_layers", "heterogeneous_layers_config_path"),
                "heterogeneous_layers_config_encoded_json",
            ),
        ),
        Refusal(
            "--mtp-num-layers",
            lambda mtp_num_layers, eod_mask_loss: mtp_num_layers and eod_mask_loss,
            "--mtp-num-layers {mtp_num_layers} cannot be used with --eod-mask-loss",
            "the targets of a depth are counted by the lengths of documents",
        ),
        Refusal(
            "--mtp-num-layers",
            lambda mtp_num_layers, position_embedding_type: (
                mtp_num_layers and position_embedding_type not in ("rope", "none")
            ),
            "--mtp-num-layers {mtp_num_layers} needs --position-embedding-type rope or none, got "
            "{position_embedding_type}",
            "Megatron 0.19 takes no other",
        ),
        Refusal(
            "--mtp-num-layers",
            lambda mtp_num_layers, recompute_granularity, recompute_method, recompute_num_layers: (
                mtp_num_layers
                and (recompute_granularity, recompute_method) == ("full", "uniform")
                and recompute_num_layers != 1
            ),
            "--mtp-num-layers {mtp_num_layers} with --recompute-method uniform needs "
            "--recompute-num-layers 1, got {recompute_num_layers}",
            "Megatron refuses it in the first step",
        ),
    ],
    "Experts": [
        Refusal(
            "--moe-layer-freq",
            lambda num_experts, moe_layer_freq, num_layers, hybrid_layer_pattern: (
                num_experts
                and hybrid_layer_pattern is None
                and _wrong_length(moe_layer_freq, num_layers)
            ),
            "--moe-layer-freq lists {found} layers, --num-layers is {num_layers}",
            "a list has an entry for every layer",
        ),
        Refusal(
            "--moe-layer-freq",
            lambda num_experts, moe_layer_freq: (
                num_experts
                and (
                    bool(set(moe_layer_freq) - {0, 1})
                    if isinstance(moe_layer_freq, list)
                    else moe_layer_freq < 1
                )
            ),
            "--moe-layer-freq must be at least 1 or a list of 0 and 1, got {moe_layer_freq}",
            "every N-th layer has experts, or those with a 1",
        ),
        Refusal(
            "--moe-router-topk",
            lambda num_experts, moe_router_topk: num_experts and moe_router_topk > num_experts,
            "--moe-router-topk {moe_router_topk} is more than --num-experts {num_experts}",
            "Megatron fails in the first step",
        ),
        Refusal(
            "--moe-router-load-balancing-type",
            lambda num_experts, moe_router_load_balancing_type: (
                num_experts and _local_balancing(moe_router_load_balancing_type)
            ),
            "--moe-router-load-balancing-type {found} cannot be used: it would route by the tokens "
            "of one rank",
            "where a token goes would depend on the plan",
        ),
        Refusal(
            "--moe-router-load-balancing-type",
            lambda num_experts, moe_router_load_balancing_type, moe_aux_loss_coeff: (
                num_experts and _beside_sinkhorn(moe_router_load_balancing_type, moe_aux_loss_coeff)
            ),
            "--moe-router-load-balancing-type sinkhorn stands alone, got {found}",
            "Megatron fails in the first step, or leaves it out without a word",
        ),
        Refusal(
            "--moe-input-jitter-eps",
            lambda num_experts, moe_input_jitter_eps: (
                num_experts and moe_input_jitter_eps is not None
            ),
            "--moe-input-jitter-eps {moe_input_jitter_eps} cannot be used: the noise would depend "
            "on which rank a token is on",
            "every rank has a random stream of its own",
        ),
        Refusal(
            "--moe-expert-capacity-factor",
            lambda num_experts, moe_expert_capacity_factor: (
                num_experts and moe_expert_capacity_factor is not None
            ),
            "--moe-expert-capacity-factor must not be set, got {moe_expert_capacity_factor}: it "
            "drops tokens by the counts of one rank",
            "which tokens are dropped would depend on the plan",
        ),
        _off(
            "--moe-use-upcycling",
            "convert the checkpoint first, with Megatron's own script",
            "Megatron would build the dense model from the configuration of the one with experts",
        ),
        _off(
            "--moe-expert-rank-capacity-factor",
            "it drops tokens by the counts of one rank",
            "which tokens are dropped would depend on the plan",
        ),
        Refusal(
            "--mlp-chunks-for-training",
            lambda num_experts, mlp_chunks_for_training: (
                num_experts and mlp_chunks_for_training > 1
            ),
            "--mlp-chunks-for-training {mlp_chunks_for_training} with experts cannot be used: "
            "chunks hide from the router which tokens are filler",
            "Megatron passes the mask of filler tokens to whole buffers alone",
        ),
        Refusal(
            "--moe-token-dispatcher-type",
            lambda num_experts, nsp_cpu, moe_token_dispatcher_type: (
                num_experts and nsp_cpu and moe_token_dispatcher_type == "flex"
            ),
            "--moe-token-dispatcher-type flex cannot be used with --nsp-cpu: its kernels are for "
            "GPUs",
            "CPU ranks run none of the kernels for GPUs",
        ),
        Refusal(
            "--moe-flex-dispatcher-backend",
            lambda num_experts, moe_flex_dispatcher_backend: (
                num_experts and moe_flex_dispatcher_backend == "ncclep"
            ),
            "--moe-flex-dispatcher-backend must be deepep or hybridep, got ncclep, whose buffers "
            "have the size of a rank's first micro-batch",
            "micro-batches differ in size, and so do ranks",
        ),
        Refusal(
            "--num-experts",
            lambda num_experts, tensor_model_parallel_size, sequence_parallel: (
                num_experts and tensor_model_parallel_size > 1 and not sequence_parallel
            ),
            "--tensor-model-parallel-size {tensor_model_parallel_size} with experts needs "
            "--sequence-parallel: Megatron 0.19 trains no experts without it",
            "Megatron refuses it in the first step",
        ),
    ],
    "Other loops": [
        YAML_CFG,
        *(
            _one_stack(f"--{stack}-{whole}", f"--{whole}")
            for whole in ("num-layers", "seq-length")
            for stack in ("encoder", "decoder")
        ),
        _off(
            "--vision-pretraining",
            "documents hold tokens, not images",
            "Megatron asks a model of images for its gradients",
        ),
        _off(
            "--mtp-hybrid-override-pattern",
            "further tokens are predicted with layers of a GPT model, by --mtp-num-layers",
            "Megatron appends it to --hybrid-layer-pattern behind a `/`",
        ),
        _off(
            "--config-logger-dir",
            "Megatron 0.19 fails when it writes the process groups of a model",
            "it takes them for numbers and lists",
        ),
        Refusal(
            "--rerun-mode",
            lambda rerun_mode: rerun_mode == "report_stats",
            "--rerun-mode {rerun_mode} cannot be used: Megatron 0.19 knows no such mode when it "
            "starts",
            "its parser and its engine call the mode by two names",
        ),
        _needs_te("--moe-latent-size", "Megatron has these layers of Transformer Engine alone"),
        _needs_te("--save-activations-interval", "Megatron looks for its layers"),
        _needs_te("--save-dgrads-interval", "Megatron looks for its layers"),
        _off(
            "--freeze-all-layers",
            "Megatron 0.19 trains the layers of a configured model all the same",
            "its model builder does not look at the flag",
        ),
        _off(
            "--inprocess-restart",
            "nothing starts the run again",
            "the training script has to wrap itself",
        ),
        _off(
            "--fake-process-group",
            "attention needs what other ranks send",
            "nothing would be exchanged",
        ),
        _off(
            "--lazy-mpu-init",
            "Megatron 0.19 trains without groups then, and fails",
            "its loop does not finish what the flag puts off",
        ),
    ],
    "Precision, graphs and checkpoints": [
        Refusal(
            "--fp32-residual-connection",
            lambda fp32_residual_connection, transformer_impl, spec: (
                fp32_residual_connection
                and transformer_impl == "local"
                and spec is None
                and not HAVE_APEX
            ),
            "--fp32-residual-connection needs --transformer-impl transformer_engine, which CPU "
            "ranks do not run, or a --spec",
            "the torch norm of Megatron's local layers gives what it gets, and the linear layer "
            "behind it takes 16 bits",
        ),
        _off(
            "--use-torch-fsdp2",
            "Megatron 0.19 never divides its gradients by tokens; --use-megatron-fsdp does",
            "torch averages them over ranks, and what scales them by tokens does nothing there",
        ),
        *_quantized("--fp8-format", "fp8"),
        *_quantized("--fp4-format", "fp4"),
        _only(
            "--cuda-graph-impl",
            "cuda_graph_impl",
            "--cuda-graph-impl must be none: samples begin elsewhere in every step; "
            "--optimizer-cuda-graph captures the optimizer",
            _GRAPHS,
            "none",
        ),
        # Where these two are set, Megatron's validation removes them and sets --cuda-graph-impl.
        _only(
            "--enable-cuda-graph",
            "enable_cuda_graph",
            "--enable-cuda-graph cannot be used: samples begin elsewhere in every step; "
            "--optimizer-cuda-graph captures the optimizer",
            _GRAPHS,
            False,
            enable_cuda_graph=False,
        ),
        _only(
            "--external-cuda-graph",
            "external_cuda_graph",
            "--external-cuda-graph cannot be used: samples begin elsewhere in every step; "
            "--optimizer-cuda-graph captures the optimizer",
            _GRAPHS,
            False,
            external_cuda_graph=False,
        ),
        _only(
            "--check-for-spiky-loss",
            "check_for_spiky_loss",
            "--check-for-spiky-loss cannot be used: ranks and steps hold different numbers of "
            "tokens",
            "it compares sums of losses",
            False,
        ),
        Refusal(
            "--use-megatron-fsdp",
            lambda use_megatron_fsdp, swiglu, save, bf16, fp16: (
                use_megatron_fsdp and swiglu and save and not (bf16 or fp16)
            ),
            "--use-megatron-fsdp with --swiglu and --save needs --bf16 or --fp16: Megatron 0.19 "
            "cannot write its checkpoint in float32",
            "Megatron fails when it writes the checkpoint",
        ),
        Refusal(
            "--nsp-kernel",
            lambda nsp_kernel, nsp_cpu, bf16, fp16: (
                not nsp_cpu and not takes_32_bits(nsp_kernel) and not (bf16 or fp16)
            ),
            "--nsp-kernel {nsp_kernel} on GPUs needs --bf16 or --fp16",
            "attention kernels for GPUs take 16-bit floats",
        ),
        Refusal(
            "--nsp-save-budget-gb",
            lambda idle_save_budget_gb: idle_save_budget_gb,
            "--nsp-save-budget-gb {found:g} would do nothing: attention is not recomputed; it "
            "needs --recompute-granularity full, or selective with core_attn among "
            "--recompute-modules",
            "what is not computed again need not be kept twice",
            # Megatron's validation turns it into --recompute-granularity, and removes it.
            absent={"recompute_activations": False},
        ),
    ],
}
"""By topic; rows of a topic, and topics, in the order in which they are checked."""

KERNEL_REFUSALS: Sequence[Refusal] = [
    Refusal(
        "--softmax-type",
        lambda kernel, softmax_type: softmax_type != "vanilla" and not kernel.returns_lse,
        "--nsp-kernel {kernel.name} gives no LSE, which --softmax-type {softmax_type} needs",
        "the sink is one more term of each row's sum",
    ),
    Refusal(
        "--nsp-save-budget-gb",
        lambda kernel, nsp_save_budget_gb: nsp_save_budget_gb and not kernel.returns_lse,
        "--nsp-kernel {kernel.name} gives no LSE, which --nsp-save-budget-gb "
        "{nsp_save_budget_gb:g} needs",
        "the backward pass of a saved sample starts from its LSE",
    ),
]
"""Checked once the kernel is chosen, which flags, the GPU and what is installed decide."""


def all_refusals() -> Iterator[Refusal]:
    """Every row."""
    for rows in REFUSALS.values():
        yield from rows
    yield from KERNEL_REFUSALS


def check_words(argv: Sequence[str]) -> None:
    """Checks what would keep a command line from being parsed.

    Args:
        argv: its words.

    Raises:
        ValueError: a flag cannot be used; one line that names it.
    """
    if any(word.partition("=")[0] == YAML_CFG.flag for word in argv):
        raise ValueError(YAML_CFG.message)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks all that flags alone decide.

    Args:
        args: Megatron's arguments with ours, validated or not.

    Raises:
        ValueError: a flag cannot be used; one line that names it.
        AssertionError: Megatron has no such argument any more.
    """
    values = Values(args)
    for rows in REFUSALS.values():
        _check(rows, values)


def check_micro_batches(args: argparse.Namespace, numbers: Iterable[int]) -> None:
    """Checks that pipelines can run all numbers of micro-batches that steps have.

    Args:
        args: Megatron's arguments with ours, validated or not.
        numbers: of the steps of a schedule, and of evaluation steps.

    Raises:
        ValueError: they cannot; one line that names flag and numbers.
    """
    for number in numbers:
        _check(REFUSALS["Pipelines"], Values(args, num_micro_batches=number))


def check_kernel(args: argparse.Namespace, kernel: AttentionKernel) -> None:
    """Checks that the chosen kernel gives what flags ask for.

    Raises:
        ValueError: it does not; one line that names flag and kernel.
    """
    _check(KERNEL_REFUSALS, Values(args, kernel=kernel))


def _check(rows: Sequence[Refusal], values: Values) -> None:
    for row in rows:
        message = row.of(values)
        if message is not None:
            raise ValueError(message)
