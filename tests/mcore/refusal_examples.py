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
    *(
        Example(f"{flag} 0", f"{flag} must be at least 1, got 0")
        for flag in (
            "--context-parallel-size",
            "--micro-batch-size",
            "--eval-micro-batch-size",
            "--eval-global-batch-size",
        )
    ),
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
            "--log-straggler",
            "--use-persistent-ckpt-worker",
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
        "--context-parallel-size 4",
        "--context-parallel-size 4 does not divide the 6 data-parallel ranks",
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
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing",
        "--moe-router-load-balancing-type quantile_balancing cannot be used: it would route by "
        "the tokens of one rank",
    ),
    Example(
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type sinkhorn stands alone, got --moe-aux-loss-coeff 0.1",
    ),
    Example(
        "--num-experts 4 --moe-router-load-balancing-type sinkhorn aux_loss",
        "--moe-router-load-balancing-type sinkhorn stands alone, got sinkhorn aux_loss",
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
        "--num-experts 4 --moe-token-dispatcher-type flex",
        "--moe-token-dispatcher-type flex cannot be used with --nsp-cpu: its kernels are for GPUs",
    ),
    Example(
        "--num-experts 4 --moe-flex-dispatcher-backend ncclep",
        "--moe-flex-dispatcher-backend must be deepep or hybridep, got ncclep, whose buffers have "
        "the size of a rank's first micro-batch",
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
        "--enable-cuda-graph cannot be used: samples begin elsewhere in every step; "
        "--optimizer-cuda-graph captures the optimizer, got True",
    ),
    Example("--mtp-num-layers -1", "--mtp-num-layers must be at least 0, got -1"),
    Example(
        "--mtp-num-layers 1 --hybrid-layer-pattern *- --spec tests.mcore.local_stack SPEC",
        "--mtp-num-layers 1 cannot be used with --hybrid-layer-pattern *-",
    ),
    Example(
        "--mtp-num-layers 1 --heterogeneous-layers-config-path x",
        "--mtp-num-layers 1 cannot be used with --heterogeneous-layers-config-path or "
        "--heterogeneous-layers-config-encoded-json",
    ),
    Example(
        "--mtp-num-layers 1 --position-embedding-type learned_absolute",
        "--mtp-num-layers 1 needs --position-embedding-type rope or none, got learned_absolute",
    ),
    Example(
        "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
        "--mtp-num-layers 1 with --recompute-method uniform needs --recompute-num-layers 1, got 2",
    ),
    Example(
        "--position-embedding-type learned_absolute --nsp-max-length 1024",
        "--max-position-embeddings 512 does not reach the longest sample of 1024 tokens that "
        "--nsp-max-length or --seq-length allows",
    ),
    Example(
        "--mtp-num-layers 1 --eod-mask-loss",
        "--mtp-num-layers 1 cannot be used with --eod-mask-loss",
    ),
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
        "--data-path is required: the prefix of a .bin and .idx file; or --mock-data",
        without="--split 1",
        has_data=False,
    ),
    Example("--mock-data", "documents come from one place, got --data-path and --mock-data"),
    Example(
        "--per-split-data-args-path x --valid-data-path x",
        "documents come from one place, got --per-split-data-args-path and --valid-data-path",
        has_data=False,
    ),
    *(
        Example(
            f"--split={split}",
            "--split must be one to three shares with commas, for training, validation and test, "
            f"got {split}",
        )
        for split in ("0,0", "-1,2", "98,1,1,0", "most", "1e9", ".9.9")
    ),
    Example(
        "--split 9,1 --train-data-path x",
        "--split 9,1 cuts --data-path, but each part has data sets of its own",
        has_data=False,
    ),
    Example(
        "--train-data-path x --test-data-path y",
        "--test-data-path needs --valid-data-path",
        without="--split 1",
        has_data=False,
    ),
    *(
        Example(flag, f"{flag.split()[0]} cannot be used: {message}")
        for flag, message in {
            "--fim-data": "documents are trained on as they are in the data set",
            "--sft": "documents come as tokens, not as conversations",
            "--phase-transition-iterations 2": "the order of documents runs over all steps",
            "--perform-rl-step": "steps are planned before they run",
            "--logits-save-dir x": "logits would be saved in the order of a rank's buffer",
            "--logits-load-dir x": "logits were saved in the order of another run's batches",
            "--multiple-validation-sets": "one list of documents is validated on",
        }.items()
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
    *(
        Example(
            f"--bf16 {flag} {formats} {more}",
            f"{flag} {formats} {message}",
            without="--nsp-cpu",
        )
        for flag, formats in (("--fp8-format", "hybrid"), ("--fp4-format", "e2m1"))
        for more, message in (
            ("--nsp-backend te-p2p", "cannot be used with --nsp-backend te-p2p"),
            ("--nsp-kernel te-module", "cannot be used with --nsp-kernel te-module"),
            (
                "--transformer-impl local",
                "needs --transformer-impl transformer_engine, got local",
            ),
            ("", "needs Transformer Engine, which is not installed"),
        )
    ),
    Example(
        "--bf16 --cuda-graph-impl local",
        "--cuda-graph-impl must be none: samples begin elsewhere in every step; "
        "--optimizer-cuda-graph captures the optimizer, got local",
        without="--nsp-cpu",
    ),
    Example(
        "--external-cuda-graph",
        "--external-cuda-graph cannot be used: samples begin elsewhere in every step; "
        "--optimizer-cuda-graph captures the optimizer, got True",
    ),
    Example("--spec local", "--spec local cannot be imported"),
    Example(
        "--spec tests.mcore.local_stack NOTHING",
        "--spec tests.mcore.local_stack NOTHING cannot be imported",
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
    Example("", "--num-layers must be given, or --hybrid-layer-pattern", without="--num-layers 2"),
    Example(
        "--tensor-parallel-num-weight-shards 2",
        "--tensor-parallel-num-weight-shards 2 cannot be used: it takes ranks out of the domain to "
        "shard weights over",
    ),
    Example(
        "--expert-tensor-parallel-num-weight-shards 2",
        "--expert-tensor-parallel-num-weight-shards 2 cannot be used: it takes ranks out of the "
        "domain to shard weights over",
    ),
    Example(
        "--bf16 --fp32-residual-connection",
        "--fp32-residual-connection needs --transformer-impl transformer_engine, which CPU ranks "
        "do not run, or a --spec",
    ),
    Example(
        "--gpu-sniff-test-interval 5",
        "--gpu-sniff-test-interval cannot be used with --nsp-cpu, got 5",
    ),
    Example(
        "--rerun-mode report_stats",
        "--rerun-mode report_stats cannot be used: Megatron 0.19 knows no such mode when it starts",
    ),
    *(
        Example(flags, f"{flags.split()[0]} needs Transformer Engine, which is not installed")
        for flags in (
            "--moe-latent-size 16 --num-experts 4",
            "--save-activations-interval 1",
            "--save-dgrads-interval 1",
        )
    ),
    Example(
        "--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4"
    ),
    Example(
        "--num-experts 4 --mlp-chunks-for-training 2",
        "--mlp-chunks-for-training 2 with experts cannot be used: chunks hide from the router "
        "which tokens are filler",
    ),
    *(
        Example(flags, f"{flags.split()[0]} cannot be used: {why}")
        for flags, why in (
            (
                "--yaml-cfg job.yaml",
                "it takes the place of the command line, and of what is said of nested sequence "
                "parallelism on it",
            ),
            ("--encoder-num-layers 3", "give --num-layers"),
            ("--decoder-num-layers 3", "give --num-layers"),
            ("--encoder-seq-length 256", "give --seq-length"),
            ("--decoder-seq-length 256", "give --seq-length"),
            ("--vision-pretraining", "documents hold tokens, not images"),
            (
                "--freeze-all-layers",
                "Megatron 0.19 trains the layers of a configured model all the same",
            ),
            ("--inprocess-restart", "nothing starts the run again"),
            ("--fake-process-group", "attention needs what other ranks send"),
            ("--lazy-mpu-init", "Megatron 0.19 trains without groups then, and fails"),
            (
                "--use-torch-fsdp2",
                "Megatron 0.19 never divides its gradients by tokens; --use-megatron-fsdp does",
            ),
            ("--use-kitchen-attention", "--nsp-kernel runs attention"),
            (
                "--batch-invariant-mode",
                "it is a property of the kernels that Megatron's own core attention calls",
            ),
            (
                "--mtp-hybrid-override-pattern *-",
                "further tokens are predicted with layers of a GPT model, by --mtp-num-layers",
            ),
            (
                "--config-logger-dir configs",
                "Megatron 0.19 fails when it writes the process groups of a model",
            ),
            ("--moe-use-upcycling", "convert the checkpoint first, with Megatron's own script"),
            (
                "--moe-expert-rank-capacity-factor 1.5",
                "it drops tokens by the counts of one rank",
            ),
        )
    ),
)
