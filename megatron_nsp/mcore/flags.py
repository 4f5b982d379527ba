"""Every flag of Megatron's parser and of ours, and what becomes of it: one table.

A flag stands where it does by what Megatron's training and core code do with it once it is read,
not by its name. A flag of which single values are refused stands under what becomes of the others;
every refusal is a row of `refusals.py`. A test holds the table against the parser: a flag that is
new or renamed fails it, and has to be looked at.

`python -m megatron_nsp.mcore.flags_page docs/flags.md` writes the table into that page.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """What becomes of a flag."""

    OWN = "Megatron's own"
    DONE = "done here"
    REPLACED = "replaced"
    IDLE = "without effect"
    REFUSED = "refused"
    OURS = "ours"


@dataclass(frozen=True)
class Flags:
    """Flags of one fate.

    Attributes:
        fate: what becomes of them.
        names: the flags, in every spelling that the parser takes.
        reason: why, where it is not plain.
    """

    fate: Fate
    names: tuple[str, ...]
    reason: str


def _own(names: str, reason: str = "") -> Flags:
    return Flags(Fate.OWN, tuple(names.split()), reason)


def _done(names: str, reason: str) -> Flags:
    return Flags(Fate.DONE, tuple(names.split()), reason)


def _replaced(names: str, reason: str) -> Flags:
    return Flags(Fate.REPLACED, tuple(names.split()), reason)


def _idle(names: str, reason: str) -> Flags:
    return Flags(Fate.IDLE, tuple(names.split()), reason)


def _refused(names: str, reason: str) -> Flags:
    return Flags(Fate.REFUSED, tuple(names.split()), reason)


_MEGATRON_TOO = "Megatron's own GPT training reads it nowhere"
_OLD = "an old name, which Megatron refuses itself"

FLAGS: Mapping[str, Sequence[Flags]] = {
    "The model": [
        _own(
            """
            --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups
            --group-query-attention --kv-channels --norm-epsilon --apply-layernorm-1p
            --disable-bias-linear --add-qkv-bias --glu-linear-offset --activation-func-clamp-value
            --normalization --qk-layernorm --qk-l2-norm --attention-output-gate --swiglu
            --squared-relu --quick-geglu --hidden-dropout --untie-embeddings-and-output-weights
            --make-vocab-size-divisible-by --fp32-residual-connection --no-bias-gelu-fusion
            --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm
            --cross-entropy-loss-fusion --cross-entropy-fusion-impl --use-te-activation-func
            --use-fused-weighted-squared-relu --fused-residual-rmsnorm
            --use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp --transformer-impl
            --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding
            --symmetric-ar-type --heterogeneous-layers-config-path
            --heterogeneous-layers-config-encoded-json --enable-experimental --test-mode
            --disable-jit-fuser
            """,
            "norms, projections, MLPs and losses run on the rows of a buffer as on any others",
        ),
        _own(
            """
            --no-initialization --use-cpu-initialization --init-model-with-meta-device
            --init-method-std --embedding-init-method-std --init-method-xavier-uniform --use-mup
            --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult
            --mup-base-head-dim --mup-attn-scale-power
            """,
            "weights and their scales; the softmax scale is Megatron's",
        ),
        _done(
            "--num-layers --spec --hybrid-layer-pattern",
            "core attention is exchanged in every layer that has it",
        ),
        _idle(
            """
            --apply-residual-connection-post-layernorm --openai-gelu --onnx-safe
            --bert-no-binary-head --is-hybrid-model --use-mcore-models
            """,
            _MEGATRON_TOO,
        ),
        _idle(
            """
            --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
            --disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype
            """,
            "Mamba layers are refused in --hybrid-layer-pattern",
        ),
        _replaced("--hybrid-override-pattern", "--hybrid-layer-pattern is its newer name"),
        _refused(
            "--encoder-num-layers --decoder-num-layers",
            "there is one stack of layers",
        ),
        _refused("--freeze-all-layers", "Megatron's model builder does not look at it"),
    ],
    "Positions": [
        _done(
            """
            --position-embedding-type --use-rotary-position-embeddings --no-position-embedding
            --max-position-embeddings --rotary-interleaved --rotary-base --rotary-percent
            --rotary-seq-len-interpolation-factor --use-rope-scaling --rope-scaling-factor
            --no-rope-freq --rope-type --rotary-scaling-factor --mscale --mscale-all-dim
            --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
            --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int
            """,
            "the angles are Megatron's; a row takes those of its place in its own document",
        ),
        _replaced(
            "--no-rope-fusion", "latent attention runs without the fused kernel, which goes by row"
        ),
        _idle(
            "--relative-attention-num-buckets --relative-attention-max-distance --mrope-section",
            "relative and multimodal positions are refused in --position-embedding-type",
        ),
    ],
    "Attention": [
        _done(
            "--window-size --window-attn-skip-freq --softmax-type --attention-dropout",
            "by the kernel of --nsp-kernel, layer by layer; dropout is 0, and Megatron's default "
            "of 0.1 is named among what has no effect",
        ),
        _done(
            """
            --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim
            --qk-pos-emb-head-dim --v-head-dim --mla-down-proj-fusion
            """,
            "the exchange carries keys and values after their up-projection",
        ),
        _idle(
            """
            --attention-backend --use-flash-attn --flash-attention-version
            --attention-softmax-in-fp32 --no-masked-softmax-fusion --apply-query-key-layer-scaling
            """,
            "--nsp-kernel runs attention, with scores in float32, where scaling by layers cancels",
        ),
        _idle(
            "--qk-clip-alpha --qk-clip-threshold --kitchen-attention-backend",
            "belongs to flags that are refused",
        ),
        _idle("--flash-decode --cache-mla-latents", "for inference"),
        _refused("--qk-clip --log-max-attention-logit", "kernels do not give the largest score"),
        _refused(
            "--experimental-attention-variant",
            "sparse and linear attention see more than their own rows",
        ),
        _idle(
            """
            --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-topk-freq
            --dsa-indexer-skip-topk-offset --dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss
            --dsa-kernel-backend --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation
            --disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu
            --disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon
            --dsa-indexer-k-norm-fp32 --linear-conv-kernel-dim --linear-key-head-dim
            --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
            --linear-attention-freq
            """,
            "belongs to --experimental-attention-variant, which is refused",
        ),
        _refused("--use-kitchen-attention", "--nsp-kernel runs attention"),
        _refused("--batch-invariant-mode", "it is a property of Megatron's own attention kernels"),
    ],
    "Experts": [
        _own(
            """
            --num-experts --moe-layer-freq --moe-ffn-hidden-size --moe-router-topk
            --moe-router-num-groups --moe-router-group-topk --moe-router-pre-softmax
            --moe-router-topk-scaling-factor --moe-router-score-function --moe-router-dtype
            --moe-shared-expert-intermediate-size --moe-shared-expert-gate
            --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert
            --moe-shared-expert-glu-interleave-size --moe-mlp-glu-interleave-size --moe-grouped-gemm
            --moe-single-grouped-weight --moe-single-grouped-bias --moe-permute-fusion
            --moe-router-fusion --moe-apply-probs-on-input --moe-latent-size --moe-layer-recompute
            --moe-enable-routing-replay --moe-router-padding-for-quantization
            --moe-router-padding-for-fp8 --overlap-dispatch-backward-with-experts-wgrad
            --moe-flex-dispatcher-backend --moe-enable-deepep --moe-flex-dispatcher-num-sms
            --moe-deepep-num-sms --moe-hybridep-num-sms --moe-hybridep-num-blocks-permute
            --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms-preprocessing
            --moe-permute-fusion-into-hybridep
            """,
            "the router and the experts see a token's row alone; filler rows are masked",
        ),
        _own(
            "--moe-router-force-load-balancing --moe-router-force-biased",
            "for benchmarks: routes at random, on every rank by its own stream, as there",
        ),
        _done(
            """
            --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
            --moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-per-layer-logging
            """,
            "counted over the whole domain, without filler rows",
        ),
        _replaced(
            "--moe-token-dispatcher-type",
            "allgather wants equal rows on every rank: alltoall computes the same",
        ),
        _replaced(
            "--moe-hybridep-pad-uneven-dispatch-inputs",
            "switched on where that backend runs: ranks hold different numbers of rows",
        ),
        _idle(
            "--moe-ncclep-static-shape --moe-ncclep-zero-copy",
            "belongs to ncclep, which is refused in --moe-flex-dispatcher-backend",
        ),
        _refused("--moe-use-upcycling", "the dense model would be built from the one with experts"),
        _idle("--moe-upcycling-granularity", "belongs to --moe-use-upcycling"),
        _refused("--moe-input-jitter-eps", "the noise would depend on which rank a token is on"),
        _refused(
            "--moe-expert-capacity-factor --moe-expert-rank-capacity-factor",
            "which tokens are dropped would depend on the plan",
        ),
        _idle(
            """
            --moe-pad-expert-input-to-capacity --moe-token-drop-policy --moe-paged-stash
            --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
            --moe-paged-stash-buffer-size-factor-cpu
            """,
            "belongs to capacity factors, which are refused",
        ),
        _idle(
            "--moe-router-quantile-balancing-ema",
            "belongs to quantile balancing, which is refused",
        ),
        _idle("--moe-pad-experts-for-cuda-graph-inference", "for inference"),
    ],
    "Parallelism": [
        _own(
            """
            --tensor-model-parallel-size --pipeline-model-parallel-size --sequence-parallel
            --expert-model-parallel-size --expert-tensor-parallel-size
            --pipeline-model-parallel-comm-backend --use-tp-pp-dp-mapping --use-ring-exchange-p2p
            --distributed-backend --distributed-timeout-minutes
            --distributed-timeout-seconds-after-init --local-rank --use-sharp --sharp-enabled-group
            --disable-gloo-process-groups --flight-recorder-dump-path
            --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout
            --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
            --no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active
            --no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec
            """,
            "the domain is Megatron's data-parallel group, whatever the order of ranks",
        ),
        _done(
            "--nccl-communicator-config-path --high-priority-stream-groups",
            "the tree's groups take part as `nsp`",
        ),
        _done(
            """
            --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
            --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers
            --decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
            --account-for-loss-in-pipeline-split --microbatch-group-size-per-virtual-pipeline-stage
            """,
            "stages exchange the rows of each micro-batch's plan",
        ),
        _own("--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush"),
        _done(
            """
            --mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads
            """,
            "the tokens after a row are those of its own document",
        ),
        _idle(
            "--mtp-standalone --mtp-hybrid-override-pattern",
            "the first is set by the layout, the second belongs to old hybrid checkpoints",
        ),
        _replaced(
            """
            --context-parallel-size --hybrid-context-parallel --cp-comm-type
            --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank
            """,
            "the plan says how many ranks share a sample, and how they exchange",
        ),
        _replaced(
            """
            --tp-comm-overlap --overlap-moe-expert-parallel-comm --delay-wgrad-compute
            --ep-overlap-early-attn-memory-release --defer-embedding-wgrad-compute
            """,
            "switched off: these overlaps keep buffers of one number of rows, or take the layers "
            "of two micro-batches apart; the result is the same",
        ),
        _idle(
            """
            --no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad
            --disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag
            --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
            --no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs
            --disable-tp-comm-split-rs --tp-comm-bootstrap-backend --tp-comm-overlap-cfg
            --wgrad-deferral-limit --high-priority-a2a-comm-stream
            """,
            "belongs to overlaps that are switched off",
        ),
        _refused(
            "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards",
            "weights sharded over data-parallel ranks take these out of the domain",
        ),
        _refused(
            "--fake-process-group --lazy-mpu-init",
            "ranks that exchange nothing train on nothing that is real",
        ),
        _own("--model-parallel-size", _OLD),
    ],
    "Data parallelism": [
        _own(
            """
            --use-distributed-optimizer --overlap-grad-reduce --no-align-grad-reduce
            --disable-align-grad-reduce --ddp-num-buckets --ddp-bucket-size
            --ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation
            --ddp-param-name-patterns-for-fp32-local-accumulation --overlap-param-gather
            --overlap-param-gather-with-optimizer-step --no-align-param-gather --use-nccl-ub
            --disable-symmetric-registration --num-distributed-optimizer-instances
            --use-megatron-fsdp --fsdp-manual-registration --data-parallel-sharding-strategy
            --outer-dp-sharding-strategy --no-gradient-reduce-div-fusion --fsdp-double-buffer
            --suggested-communication-unit-size --keep-fp8-transpose-cache
            --enable-full-sharding-in-hsdp --megatron-fsdp-main-params-dtype
            --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype
            --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
            --fsdp-db-use-persist-buf-on-alloc-fail --grad-reduce-in-bf16
            --accumulate-allreduce-grads-in-fp32 --no-gradient-accumulation-fusion
            """,
            "gradients are summed over the domain and divided by its tokens, by Megatron",
        ),
        _replaced(
            "--ddp-average-in-collective",
            "switched off: a sum over tokens is divided by tokens, not by ranks",
        ),
        _refused("--use-torch-fsdp2", "its gradients are never divided by tokens"),
        _idle("--torch-fsdp2-no-reshard-after-forward", "belongs to --use-torch-fsdp2"),
        _idle(
            "--create-all-gather-group --no-use-layer-wise-param-layout",
            "Megatron's builder of configured models reads neither",
        ),
    ],
    "Recomputation and memory": [
        _done(
            """
            --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
            --recompute-activations
            """,
            "attention's output may be kept: --nsp-save-budget-gb",
        ),
        _own(
            """
            --distribute-saved-activations --cpu-offloading-num-layers
            --cpu-offloading-retain-pinned-cpu-buffers --fine-grained-activation-offloading
            --offload-modules --min-offloaded-tensor-size --delay-offload-until-cuda-graph
            --delta-offload-bytes-across-pp-ranks --activation-offload-fraction
            --fine-grained-offloading-max-inflight-offloads --mlp-chunks-for-training
            --empty-unused-memory-level
            """
        ),
        _own("--checkpoint-activations", _OLD),
    ],
    "Precision": [
        _own(
            """
            --fp16 --bf16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window
            --hysteresis --fp16-lm-cross-entropy --disable-bf16-reduced-precision-matmul
            --deterministic-mode
            """
        ),
        _done(
            "--fp8-format --fp4-format --te-precision-config-file",
            "for linear layers; attention stays in 16 bits",
        ),
        _own(
            """
            --fp8-recipe --fp8-quantizer-factory --fp8-margin --fp8-interval --fp8-amax-history-len
            --fp8-amax-compute-algo --no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj
            --first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16
            --fp4-recipe --fp4-quantizer-factory --fp8-param-gather --fp4-param-gather
            --reuse-grad-buf-for-mxfp8-param-ag
            """
        ),
    ],
    "Graphs": [
        _refused(
            "--cuda-graph-impl --enable-cuda-graph --external-cuda-graph",
            "a graph has fixed sizes",
        ),
        _idle("--cuda-graph-modules --cuda-graph-scope", "belongs to --cuda-graph-impl"),
        _own("--optimizer-cuda-graph --cuda-graph-warmup-steps", "an optimizer's sizes are fixed"),
    ],
    "Batches": [
        _done(
            """
            --micro-batch-size --global-batch-size --step-batch-size-schedule
            --decrease-batch-size-if-needed --train-iters --train-samples --eval-global-batch-size
            --eval-micro-batch-size --seq-length
            """,
            "a step holds as many tokens as its samples would, in as many micro-batches",
        ),
        _replaced(
            "--calculate-per-token-loss", "switched on: ranks hold different numbers of tokens"
        ),
        _idle("--rampup-batch-size", "Megatron 0.19 reads it nowhere"),
        _refused("--encoder-seq-length --decoder-seq-length", "there is one stack of layers"),
        _own("--batch-size", _OLD),
        _refused("--phase-transition-iterations", "a phase would start its documents anew"),
    ],
    "Data": [
        _done(
            """
            --data-path --train-data-path --valid-data-path --test-data-path --data-args-path
            --per-split-data-args-path --split --mock-data --eval-iters --full-validation
            --no-mmap-bin-files
            """,
            "whole documents, each once an epoch, read where the plan puts them",
        ),
        _done(
            """
            --reset-position-ids --reset-attention-mask --eod-mask-loss
            --dataloader-inter-document-masking
            """,
            "always so: a document sees itself alone, and its last token has no target",
        ),
        _replaced("--dataloader-type", "the plan says which rank reads what"),
        _idle(
            """
            --num-workers --data-cache-path --object-storage-cache-path --per-dataset-sequences-path
            --no-create-attention-mask-in-dataloader --num-dataset-builder-threads
            --mid-level-dataset-surplus --allow-ambiguous-pad-tokens --dataloader-fast-cache-load
            --dataloader-defer-npy-index-mmap
            """,
            "documents are read where a rank needs them, without an index of samples",
        ),
        _refused("--multiple-validation-sets", "documents are evaluated in one list"),
        _idle("--validation-set-names", "belongs to --multiple-validation-sets"),
        _refused("--fim-data --sft", "documents are trained on as they stand"),
        _idle(
            """
            --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
            --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
            --sft-tokenizer-prompt-format
            """,
            "belongs to --fim-data and --sft",
        ),
        _idle("--sample-rate --mask-prob --short-seq-prob --vocab-extra-ids", _MEGATRON_TOO),
        _own(
            """
            --vocab-size --padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size
            --vocab-file --merge-file --tokenizer-type --tokenizer-model --tokenizer-metadata
            --tokenizer-special-tokens --tiktoken-pattern --tiktoken-num-special-tokens
            --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
            --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast
            --tokenizer-hf-no-include-special-tokens --trust-remote-code --null-tokenizer-eod-id
            --null-tokenizer-pad-id --chat-template
            """,
            "the tokenizer gives the size of the vocabulary; documents hold tokens already",
        ),
    ],
    "Optimizer and schedule": [
        _own(
            """
            --optimizer --lr --min-lr --lr-decay-style --lr-wsd-decay-style --lr-decay-iters
            --lr-decay-samples --lr-wsd-decay-iters --lr-wsd-decay-samples --lr-warmup-fraction
            --lr-warmup-iters --lr-warmup-samples --lr-warmup-init --decoupled-lr --decoupled-min-lr
            --override-opt_param-scheduler --override-opt-param-scheduler
            --use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler --weight-decay
            --start-weight-decay --end-weight-decay --weight-decay-incr-style
            --no-weight-decay-cond-type --apply-wd-to-qk-layernorm --clip-grad --adam-beta1
            --adam-beta2 --adam-eps --sgd-momentum --muon-momentum --muon-no-split-qkv
            --muon-nesterov --muon-scale-mode --muon-fp32-matmul-prec --muon-coefficient-type
            --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor --muon-scalar-optimizer
            --lion-beta1 --lion-beta2 --optimizer-cpu-offload --optimizer-offload-fraction
            --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
            --no-pin-cpu-params --dump-param-to-param-group-map --use-precision-aware-optimizer
            --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
            --check-for-large-grads --no-check-for-nan-in-loss-and-grad
            """,
            "what is counted in samples counts Megatron's global batch a step",
        ),
        _own("--warmup", _OLD),
    ],
    "The run": [
        _own(
            """
            --seed --te-rng-tracker --inference-rng-tracker --data-parallel-random-init
            --exit-interval --exit-duration-in-mins --exit-signal-handler --exit-signal
            --exit-signal-handler-for-training --manual-gc --manual-gc-interval --no-manual-gc-eval
            --disable-manual-gc-eval --train-sync-interval --eval-interval --start-eval-at-iter
            --skip-train --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval
            --adlr-autoresume --adlr-autoresume-interval --rerun-mode --error-injection-rate
            --error-injection-type --result-rejected-tracker-filename --enable-ft-package
            --calc-ft-timeouts --ft-num-warmup-iters --fault-injector-ranks
            --fault-injector-num-ranks --fault-injector-fault-types
            --fault-injector-fault-probabilities --fault-injector-fault-delay
            --fault-injector-delay-start-iteration --fault-injector-mtti-seconds
            --fault-injector-offset-seconds --fault-injector-seed
            """
        ),
        _done("--iterations-to-skip", "the documents of these steps are drawn and left out"),
        _refused("--config-logger-dir", "Megatron 0.19 fails on process groups when it writes it"),
        _refused("--check-for-spiky-loss", "it compares sums of losses"),
        _refused("--perform-rl-step", "a step's samples would come from a policy, not from files"),
        _refused("--vision-pretraining", "there are no images here"),
        _refused("--yaml-cfg", "a file of arguments would leave the --nsp-* flags out"),
        _refused(
            "--inprocess-restart", "it would wrap the run, and the tree's groups outlive a restart"
        ),
        _idle(
            """
            --inprocess-max-iterations --inprocess-monitor-thread-interval
            --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
            --inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
            --inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout
            --inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity
            --inprocess-active-world-size --inprocess-empty-cuda-cache
            """,
            "belongs to --inprocess-restart, which is refused",
        ),
        _idle("--exit-signal-handler-for-dataloader", "there are no dataloader workers"),
    ],
    "Checkpoints": [
        _own(
            """
            --save --save-interval --persistent-save-interval --save-retain-interval --load
            --load-main-params-from-ckpt --non-persistent-save-interval --non-persistent-ckpt-type
            --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
            --non-persistent-local-ckpt-algo --finetune --pretrained-checkpoint --ckpt-step
            --use-checkpoint-args --use-mp-args-from-checkpoint-args
            --no-use-tokenizer-model-from-checkpoint-args
            --disable-use-tokenizer-model-from-checkpoint-args --exit-on-missing-checkpoint
            --ckpt-format --auto-detect-ckpt-format --ckpt-convert-format --ckpt-convert-save
            --ckpt-convert-update-legacy-dist-opt-format --no-ckpt-fully-parallel-save --async-save
            --async-strategy --use-persistent-ckpt-worker --async-ckpt-cpu-priority
            --async-ckpt-io-priority --async-ckpt-use-cpu-shm --ckpt-fully-parallel-load
            --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group
            --ckpt-fully-parallel-load-process-group --ckpt-assume-constant-structure
            --no-ckpt-load-validate-sharding-integrity
            --disable-ckpt-load-validate-sharding-integrity --no-strict-fsdp-dtensor-load
            --disable-strict-fsdp-dtensor-load --dist-ckpt-strictness --dist-ckpt-save-pre-mcore-014
            --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient
            --replication --replication-jump --replication-factor --verify-integrity
            --no-stream-ckpt-dequant --disable-stream-ckpt-dequant --no-save-optim --no-save-rng
            --no-load-optim --no-load-rng --override-ckpt-iteration --dist-ckpt-workers --enable-msc
            """,
            "files are Megatron's; what the draw of documents depends on is kept in them",
        ),
        _idle(
            "--use-dist-ckpt --dist-ckpt-format --ckpt-fully-parallel-save --disable-msc",
            "Megatron has taken them out of use",
        ),
    ],
    "Logging and profiling": [
        _own(
            """
            --log-interval --log-params-norm --timing-log-level --timing-log-option
            --tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size
            --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard
            --disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
            --log-memory-to-tensorboard --log-memory-interval --log-device-memory-used
            --log-num-zeros-in-grad --no-barrier-with-level-1-timing --log-world-size-to-tensorboard
            --wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity --logging-level
            --log-energy --profile --profile-step-start --profile-step-end --use-pytorch-profiler
            --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
            --pytorch-profiler-collect-chakra --profile-ranks --record-memory-history
            --memory-snapshot-path --record-shapes --nvtx-ranges --straggler-ctrlr-port
            --straggler-minmax-count --disable-straggler-on-startup --run-workload-inspector-server
            --no-one-logger --one-logger-project --one-logger-run-name --one-logger-async
            --app-tag-run-name --app-tag-run-version
            """
        ),
        _done(
            "--log-throughput --log-progress --log-straggler",
            "counted by the true tokens of a step and the squares of its lengths",
        ),
        _own(
            """
            --save-params-interval --save-activations-interval --save-tokens-per-expert-interval
            --save-wgrads-interval --save-dgrads-interval --moe-routing-trace-path
            --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits
            --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
            """,
            "rows stand in the files as they stand in a rank's buffer",
        ),
        _refused(
            "--logits-save-dir --logits-load-dir", "files of logits go by samples of one length"
        ),
        _idle(
            """
            --logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dtype
            --logits-load-decode-threads --logits-load-prefetch-factor
            --logits-load-msc-prefetch-depth --logits-load-kd-loss-alpha --logits-load-ignore-errors
            """,
            "belongs to --logits-save-dir and --logits-load-dir, which are refused",
        ),
    ],
    "Other programs": [
        _idle(
            """
            --inference-batch-times-seqlen-threshold --max-tokens-to-oom --output-bert-embeddings
            --bert-embedder-type --use-legacy-static-engine --inference-max-requests
            --inference-max-seq-length --inference-dynamic-batching
            --inference-dynamic-batching-buffer-size-gb
            --inference-dynamic-batching-paused-buffer-size-gb
            --inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-block-size
            --inference-dynamic-batching-max-requests --inference-dynamic-batching-max-tokens
            --inference-dynamic-batching-num-cuda-graphs
            --inference-dynamic-batching-track-paused-request-events
            --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
            --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens
            --inference-dynamic-batching-unified-memory-level --enable-chunked-prefill
            --num-speculative-tokens --inference-dynamic-batching-prefix-caching
            --no-inference-dynamic-batching-prefix-caching
            --inference-dynamic-batching-prefix-caching-eviction-policy
            --inference-dynamic-batching-prefix-caching-coordinator-policy
            --inference-dynamic-batching-prefix-caching-routing-alpha
            --inference-dynamic-batching-prefix-caching-mamba-gb
            --inference-dynamic-batching-cuda-graph-mixed-prefill-count
            --inference-dynamic-batching-cuda-graph-sizing-distribution
            --inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks
            --inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode
            --inference-logging-step-interval --inference-text-gen-server-logging
            --no-inference-text-gen-server-logging --inference-wandb-logging
            --no-inference-wandb-logging --inference-coordinator-port
            --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
            --inference-use-synchronous-zmq-collectives
            --no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus
            --no-inference-disable-ep-consensus --inference-shards --inference-cuda-graph-scope
            --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
            --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend
            --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type
            --mlp-chunks-for-prefill
            """,
            "for inference",
        ),
        _idle(
            """
            --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size --rl-generation-lag
            --rl-submission-granularity --rl-consumption-granularity --grpo-iterations
            --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight
            --grpo-filter-groups-with-same-reward --langrl-env-config --rl-default-temperature
            --rl-default-top-p --rl-default-top-k --rl-offload-optimizer-during-inference
            --rl-kv-cache-management-mode --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs
            --rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction
            --no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef
            --rl-use-sequence-packing --no-rl-use-sequence-packing
            --rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo
            --rl-training-cuda-graphs --no-rl-training-cuda-graphs
            --rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size
            --rl-inference-expert-model-parallel-size
            --rl-inference-expert-tensor-model-parallel-size
            --rl-inference-model-unified-memory-level --rl-offload-inference-model-weights-when-idle
            --no-rl-offload-inference-model-weights-when-idle --refit-method
            --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token
            --no-rl-skip-bos-token --rl-profile --rl-profile-dir --rl-inference-parsers
            """,
            "belongs to --perform-rl-step, which is refused",
        ),
        _idle(
            """
            --ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model
            --ict-load --bert-load --titles-data-path --query-in-block-prob --use-one-sent-docs
            --evidence-data-path --retriever-report-topk-accuracies --retriever-score-scaling
            --block-data-path --embedding-path --indexer-batch-size --indexer-log-interval
            --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction
            --data-per-class-fraction --no-data-sharding --head-lr-mult --vision-pretraining-type
            --vision-backbone-type --swin-backbone-type --mask-type --mask-factor --iter-per-epoch
            --dino-local-img-size --dino-local-crops-number --dino-head-hidden-size
            --dino-bottleneck-size --dino-freeze-last-layer --dino-norm-last-layer
            --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
            """,
            "for models of images and of retrieval",
        ),
    ],
    "Nested sequence parallelism": [
        Flags(
            Fate.OURS,
            (
                *("--nsp-max-degree", "--nsp-degrees", "--nsp-backend", "--nsp-batch-tokens"),
                *("--nsp-max-length", "--nsp-over-long", "--nsp-token-budget"),
                *("--nsp-save-budget-gb", "--nsp-profile", "--nsp-policy", "--nsp-plan-ahead"),
                *("--nsp-input-layout", "--no-nsp-overlap", "--nsp-kernel", "--nsp-record-plans"),
                "--nsp-cpu",
                "--nsp-check",
            ),
            "`python pretrain_nsp.py --help` says what each does",
        )
    ],
}
"""By theme."""


def flags_of(fate: Fate) -> Iterator[str]:
    """The flags of one fate."""
    for groups in FLAGS.values():
        for group in groups:
            if group.fate is fate:
                yield from group.names


def without_effect(argv: Sequence[str]) -> list[str]:
    """The line that names what a command line asks for and nothing here does, if there is such.

    Megatron's default of attention dropout is among it where the command line says nothing else.

    Args:
        argv: the words of the command line.
    """
    typed = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
    idle = frozenset(flags_of(Fate.IDLE))
    named = [flag for flag in typed if flag in idle]
    if "--attention-dropout" not in typed:
        named.append("--attention-dropout 0.1 (the default)")
    return [f"without effect: {', '.join(named)}"] if named else []
