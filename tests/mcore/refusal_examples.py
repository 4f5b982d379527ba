"""A command line for every refusal of `megatron_nsp.mcore.refusals`, and the line it says.

Flags stand behind those of MODEL, for a job of six ranks on CPU.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A command line that is refused.

    Attributes:
        flags: what is typed beside MODEL and `--data-path`.
        message: the whole line that is said.
        without: flags of MODEL that are left out, with their values.
        has_data: whether `--data-path` is given.
        sets_cpu_defaults: whether `--nsp-cpu` sets the defaults of Megatron's parser, as it does
            but for scripts with a parser of their own.
        kernel: a kernel without LSE that stands in for the chosen one: none of those runs on CPU.
    """

    flags: str
    message: str
    without: str = ""
    has_data: bool = True
    sets_cpu_defaults: bool = True
    kernel: str | None = None


LOCAL = "--transformer-impl local --distributed-backend gloo"
NOT_FUSED = (
    "--no-rope-fusion",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
)
NO_SHARES = (
    "cannot be used: whole documents come from --data-path, or from --train-data-path and "
    "--valid-data-path"
)

VIRTUAL = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"

EXAMPLES = (
    Example("--num-attention-heads 0", "--num-attention-heads must be at least 1, got 0"),
    Example("--num-query-groups 0", "--num-query-groups must be at least 1, got 0"),
    Example(
        "--tensor-model-parallel-size 0", "--tensor-model-parallel-size must be at least 1, got 0"
    ),
    Example(
        "--pipeline-model-parallel-size -2",
        "--pipeline-model-parallel-size must be at least 1, got -2",
    ),
    Example("--global-batch-size 0", "--global-batch-size must be at least 1, got 0"),
    Example("--seed 0", "--seed must be at least 1, got 0"),
    Example("--num-layers 0", "--num-layers must be at least 1, got 0"),
    Example("--hidden-size 0", "--hidden-size must be at least 1, got 0"),
    Example("--seq-length 0", "--seq-length must be at least 1, got 0"),
    Example("--num-experts 0", "--num-experts must be at least 1, got 0"),
    Example(
        "--transformer-impl transformer_engine",
        "--transformer-impl must be local with --nsp-cpu, got transformer_engine",
    ),
    Example(
        "--distributed-backend nccl", "--distributed-backend must be gloo with --nsp-cpu, got nccl"
    ),
    Example("--cuda-graph-impl local", "--cuda-graph-impl must be none with --nsp-cpu, got local"),
    *(
        Example(
            " ".join((LOCAL, *NOT_FUSED[:place])),
            f"{flag} is needed with --nsp-cpu",
            sets_cpu_defaults=False,
        )
        for place, flag in enumerate(NOT_FUSED)
    ),
    Example("--fp8-format hybrid", "--fp8-format cannot be used with --nsp-cpu, got hybrid"),
    Example("--fp4-format e2m1", "--fp4-format cannot be used with --nsp-cpu, got e2m1"),
    *(
        Example(flag, f"{flag} cannot be used with --nsp-cpu, got True")
        for flag in (
            "--optimizer-cuda-graph",
            "--optimizer-cpu-offload",
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--moe-router-fusion",
            "--tp-comm-overlap",
        )
    ),
    *(
        Example(f"{flag} x", f"{flag} x {NO_SHARES}")
        for flag in (
            "--split",
            "--test-data-path",
            "--data-args-path",
            "--per-split-data-args-path",
        )
    ),
    Example(
        "--nsp-backend te-p2p --window-size 4,0",
        "--nsp-backend te-p2p has no sliding window: --window-size (4, 0)",
    ),
    Example(
        "--nsp-backend te-a2a --softmax-type learnable",
        "--nsp-backend te-a2a serves no attention sinks: --softmax-type learnable",
    ),
    Example(
        "--context-parallel-size 2",
        "--context-parallel-size must be 1 with nested sequence parallelism, which shares samples"
        " over the data-parallel ranks itself; got 2",
    ),
    Example(
        "--nsp-save-budget-gb 2",
        "--nsp-save-budget-gb 2 would do nothing: attention is not recomputed; it needs "
        "--recompute-granularity full, or selective with core_attn among --recompute-modules",
    ),
    Example(
        "--nsp-save-budget-gb 2 --recompute-granularity selective --recompute-modules mlp",
        "--nsp-save-budget-gb 2 would do nothing: attention is not recomputed; it needs "
        "--recompute-granularity full, or selective with core_attn among --recompute-modules",
    ),
    Example(
        "--nsp-save-budget-gb inf --recompute-granularity full --recompute-method block",
        "--nsp-save-budget-gb inf would do nothing: attention is not recomputed; it needs "
        "--recompute-granularity full, or selective with core_attn among --recompute-modules",
    ),
    Example(
        "--num-experts 4 --moe-aux-loss-coeff 0.01",
        "--moe-aux-loss-coeff must be 0, got [0.01]: the auxiliary loss would depend on which "
        "rank a token is on",
    ),
    Example(
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type sinkhorn cannot be used: it would route by the tokens "
        "of one rank",
    ),
    Example(
        "--num-experts 4 --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias cannot be used: Megatron 0.19 counts tokens wrongly "
        "where filler tokens are masked from the router",
    ),
    Example(
        "--num-experts 4 --moe-input-jitter-eps 0.1",
        "--moe-input-jitter-eps 0.1 cannot be used: the noise would depend on which rank a token "
        "is on",
    ),
    Example(
        "--num-experts 4 --moe-expert-capacity-factor 1.0",
        "--moe-expert-capacity-factor must not be set, got 1.0: it drops tokens by the counts of "
        "one rank",
    ),
    Example(
        "--num-experts 4 --moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type must be alltoall or flex, got allgather, which needs the "
        "same number of tokens on every rank",
    ),
    Example(
        "--micro-batch-size 2",
        "--micro-batch-size must be 1, got 2: a micro-batch is one packed buffer; "
        "--nsp-batch-tokens sets the size of a step",
    ),
    Example(
        "--global-batch-size 7",
        "--global-batch-size 7 is no multiple of the 6 data-parallel ranks; it sets the "
        "micro-batches of a step, one for each multiple",
    ),
    Example("--attention-dropout 0.1", "--attention-dropout must be 0, got 0.1"),
    Example(
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size 4 times --pipeline-model-parallel-size 1 does not divide "
        "the 6 ranks",
    ),
    Example(
        "--num-query-groups 3", "--num-attention-heads 8 is no multiple of --num-query-groups 3"
    ),
    Example(
        "--eval-iters 2",
        "--eval-iters 2 needs --valid-data-path, and --train-data-path in place of --data-path",
    ),
    Example(
        "--position-embedding-type mrope",
        "--position-embedding-type must be rope, yarn, learned_absolute or none, got mrope",
    ),
    Example(
        "--multi-latent-attention --tensor-model-parallel-size 2",
        "--multi-latent-attention with --tensor-model-parallel-size 2 needs --transformer-impl "
        "transformer_engine and --sequence-parallel: without them Megatron 0.19 gets its "
        "gradients wrong",
    ),
    Example(
        "--position-embedding-type relative",
        "--position-embedding-type must be rope, yarn, learned_absolute or none, got relative",
    ),
    Example(
        "--window-size 8,8",
        "--window-size must be LEFT,0 with LEFT at least 0, or -1 for all tokens before, got 8,8:"
        " attention is causal",
    ),
    Example(
        "--window-size=-2,0",
        "--window-size must be LEFT,0 with LEFT at least 0, or -1 for all tokens before, got "
        "-2,0: attention is causal",
    ),
    Example(
        "--window-size 8",
        "--window-size must be LEFT,0 with LEFT at least 0, or -1 for all tokens before, got 8: "
        "attention is causal",
    ),
    Example(
        "--window-size 8,0 --window-attn-skip-freq 0",
        "--window-attn-skip-freq must be at least 1, got 0",
    ),
    Example(
        "--window-size 8,0 --window-attn-skip-freq [1,0,1]",
        "--window-attn-skip-freq lists 3 layers, --num-layers is 2",
    ),
    Example(
        "--hybrid-layer-pattern M*-",
        "--hybrid-layer-pattern M*-: M cannot be used: only attention (*), latent attention (+), "
        "MLPs (-) and experts (E) run on a part of a sample",
    ),
    Example(
        "--hybrid-layer-pattern *-GD/**",
        "--hybrid-layer-pattern *-GD/**: /DG cannot be used: only attention (*), latent attention"
        " (+), MLPs (-) and experts (E) run on a part of a sample",
    ),
    Example(
        "--hybrid-layer-pattern=-E", "--hybrid-layer-pattern -E holds no attention layer, * or +"
    ),
    Example(
        "--hybrid-layer-pattern *-|*|- --pipeline-model-parallel-size 2",
        "--hybrid-layer-pattern *-|*|- marks 3 stages, no multiple of "
        "--pipeline-model-parallel-size 2",
    ),
    Example(
        "--hybrid-override-pattern *-",
        "--hybrid-override-pattern is deprecated: give --hybrid-layer-pattern",
    ),
    Example(
        "--hybrid-layer-pattern *-",
        "--hybrid-layer-pattern needs Transformer Engine, which is not installed, or --spec with "
        "a stack of other modules",
    ),
    Example("--spec nowhere SPEC", "--spec nowhere SPEC cannot be imported"),
    Example(
        "--attention-backend local",
        "--attention-backend local would take nested attention out of the model",
    ),
    Example(
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--sequence-parallel needs --transformer-impl transformer_engine, which CPU ranks do not "
        "run, or a --spec: the norm of Megatron's local layers refuses it",
    ),
    Example(
        "--num-experts 4 --tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 with experts needs --sequence-parallel: Megatron 0.19 "
        "trains no experts without it",
    ),
    Example(
        "--check-for-spiky-loss",
        "--check-for-spiky-loss cannot be used: ranks and steps hold different numbers of tokens,"
        " got True",
    ),
    Example(
        "--use-megatron-fsdp --save x",
        "--use-megatron-fsdp with --swiglu and --save needs --bf16 or --fp16: Megatron 0.19 "
        "cannot write its checkpoint in float32",
    ),
    Example(
        "--qk-clip", "--qk-clip is not supported: it needs the largest attention score, got True"
    ),
    Example(
        "--enable-cuda-graph",
        "--enable-cuda-graph cannot be used: boundaries change every step, got True",
    ),
    Example("--mtp-num-layers 1", "--mtp-num-layers is not supported yet, got 1"),
    Example(
        "--eval-iters 2 --valid-data-path x",
        "--eval-iters 2 needs --valid-data-path, and --train-data-path in place of --data-path",
    ),
    Example(
        "--position-embedding-type learned_absolute --nsp-max-length 1024",
        "--max-position-embeddings 512 does not reach the longest sample of 1024 tokens that "
        "--nsp-max-length or --seq-length allows",
    ),
    Example("--mock-data", "--mock-data cannot be used: documents come from --data-path"),
    Example(
        "--train-samples 100",
        "--train-samples 100 cannot be used: steps hold different numbers of samples; give "
        "--train-iters",
    ),
    Example("--dataloader-type cyclic", "--dataloader-type must be external, got cyclic"),
    Example("", "--num-attention-heads must be given", without="--num-attention-heads 8"),
    Example(
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 3 cannot split 8 query and 2 key/value heads evenly",
    ),
    Example(
        "--num-layers-per-virtual-pipeline-stage 0",
        "--num-layers-per-virtual-pipeline-stage must be at least 1, got 0",
    ),
    Example(
        "--num-virtual-stages-per-pipeline-rank 0",
        "--num-virtual-stages-per-pipeline-rank must be at least 1, got 0",
    ),
    Example("", "--num-layers must be given", without="--num-layers 2"),
    Example(
        "--num-layers 12 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 4",
        "--num-layers-per-virtual-pipeline-stage 4 does not divide the 6 layers of a pipeline rank",
    ),
    Example(
        "--num-layers 7 --pipeline-model-parallel-size 2",
        "--num-layers 7 cannot be shared out as asked over --pipeline-model-parallel-size 2: "
        "num_layers=7 should be divisible by config.pipeline_model_parallel_size=2",
    ),
    Example(
        "--num-layers 7 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9",
        "--num-layers 7 cannot be shared out as asked over --pipeline-model-parallel-size 2: the "
        "ranks would have 9, -2 layers",
    ),
    Example(
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers 2 cannot be shared out as asked over --pipeline-model-parallel-size 1: 2 "
        "virtual stages take turns on at least 2 ranks",
    ),
    Example(
        f"{VIRTUAL} --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
        "--decoder-last-pipeline-num-layers 2 must be left out: "
        "--decoder-first-pipeline-num-layers 2 says enough with 2 virtual stages on two ranks",
    ),
    Example(
        f"{VIRTUAL} --no-overlap-p2p-communication",
        "--no-overlap-p2p-communication with 2 virtual stages needs --pipeline-model-parallel-size "
        "of at least 3, got 2",
    ),
    Example(
        "--pipeline-model-parallel-size 2 --overlap-p2p-communication-warmup-flush",
        "--overlap-p2p-communication-warmup-flush needs virtual stages and must not go with "
        "--no-overlap-p2p-communication",
    ),
    Example(
        "--pipeline-model-parallel-size 2 --use-megatron-fsdp",
        "--use-megatron-fsdp cannot be used with --pipeline-model-parallel-size 2, only with 1",
    ),
    Example(
        "--num-layers 6 --pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2 "
        "--no-overlap-p2p-communication --microbatch-group-size-per-virtual-pipeline-stage 4 "
        "--global-batch-size 8",
        "--no-overlap-p2p-communication hangs with 4 micro-batches a step in groups of 4, 2 "
        "virtual stages and --pipeline-model-parallel-size 3; --global-batch-size sets the first",
    ),
    Example(
        "--pipeline-model-parallel-size 2 --use-ring-exchange-p2p",
        "--use-ring-exchange-p2p needs a torch with torch.distributed.ring_exchange",
    ),
    Example(
        f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 1",
        "--microbatch-group-size-per-virtual-pipeline-stage 1 must be at least "
        "--pipeline-model-parallel-size 2",
    ),
    Example(
        f"{VIRTUAL} --global-batch-size 3",
        "--global-batch-size must be at least 6 with 2 virtual stages on 3 data-parallel ranks: "
        "they run 2 micro-batches at a time, a step has 1",
    ),
    Example(
        f"{VIRTUAL} --global-batch-size 15",
        "--global-batch-size gives 5 micro-batches a step, 1 more than whole groups of 2: virtual "
        "stages need none more, or at least --pipeline-model-parallel-size 2",
    ),
    Example(
        "",
        "--calculate-per-token-loss is required: ranks hold different numbers of tokens",
        without="--calculate-per-token-loss",
    ),
    Example(
        "--rampup-batch-size 6 6 60",
        "--rampup-batch-size cannot be used: the micro-batches of a step are fixed, got [6, 6, 60]",
    ),
    Example("", "--data-path is required: the prefix of a .bin and .idx file", has_data=False),
    Example("--data-path x 0.3 y", "--data-path takes prefixes without weights, got 0.3"),
    Example(
        "--train-data-path 1 x",
        "--train-data-path takes prefixes without weights, got 1",
        has_data=False,
    ),
    Example(
        "--train-data-path x --valid-data-path 0.5 y --eval-iters 1",
        "--valid-data-path takes prefixes without weights, got 0.5",
        has_data=False,
    ),
    Example(
        "",
        "--seq-length is required: the longest sample to train on, in tokens",
        without="--seq-length 512",
    ),
    Example(
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant is not supported, got dsa",
    ),
    Example("--log-max-attention-logit", "--log-max-attention-logit is not supported, got True"),
    Example(
        "--multi-latent-attention --bf16",
        "--multi-latent-attention needs --no-rope-fusion: the fused kernel rotates by row and not"
        " by position",
        without="--nsp-cpu",
    ),
    Example(
        "--num-experts 4 --moe-layer-freq [0,1,1]",
        "--moe-layer-freq lists 3 layers, --num-layers is 2",
    ),
    Example(
        "--num-experts 4 --moe-layer-freq [0,2]",
        "--moe-layer-freq must be at least 1 or a list of 0 and 1, got [0, 2]",
    ),
    Example(
        "--num-experts 4 --moe-layer-freq 0",
        "--moe-layer-freq must be at least 1 or a list of 0 and 1, got 0",
    ),
    Example(
        "--num-experts 4 --sequence-parallel --tensor-model-parallel-size 2 "
        "--num-layers 3 --pipeline-model-parallel-size 3 --spec tests.mcore.local_stack SPEC",
        "--sequence-parallel with experts and --pipeline-model-parallel-size 3 is not supported "
        "yet: later stages would see filler tokens as real ones",
    ),
    Example(
        "--bf16 --fp8-format hybrid",
        "--fp8-format is not supported yet, got hybrid",
        without="--nsp-cpu",
    ),
    Example(
        "--bf16 --fp4-format e2m1",
        "--fp4-format is not supported yet, got e2m1",
        without="--nsp-cpu",
    ),
    Example(
        "--bf16 --cuda-graph-impl local",
        "--cuda-graph-impl must be none: boundaries change every step, got local",
        without="--nsp-cpu",
    ),
    Example(
        "--external-cuda-graph", "--external-cuda-graph cannot be used: boundaries change, got True"
    ),
    Example("--spec local", "--spec local cannot be imported"),
    Example(
        "--spec tests.mcore.local_stack NOTHING",
        "--spec tests.mcore.local_stack NOTHING cannot be imported",
    ),
    Example(
        "--nsp-kernel auto", "--nsp-kernel auto on GPUs needs --bf16 or --fp16", without="--nsp-cpu"
    ),
    Example(
        "--nsp-kernel te", "--nsp-kernel te on GPUs needs --bf16 or --fp16", without="--nsp-cpu"
    ),
    Example(
        "--nsp-kernel flash-attn-2",
        "--nsp-kernel flash-attn-2 on GPUs needs --bf16 or --fp16",
        without="--nsp-cpu",
    ),
    Example(
        "--softmax-type learnable",
        "--nsp-kernel te-module gives no LSE, which --softmax-type learnable needs",
        kernel="te-module",
    ),
    Example(
        "--nsp-save-budget-gb 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "--nsp-kernel te-module gives no LSE, which --nsp-save-budget-gb 2 needs",
        kernel="te-module",
    ),
)
