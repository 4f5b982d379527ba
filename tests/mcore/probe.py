"""Runs pretrain_nsp's main and writes down what each step did, from outside.

    torchrun --nproc-per-node N tests/mcore/probe.py OUT [PROBE FLAGS] FLAGS OF PRETRAIN_NSP

Each rank writes OUT/rank<R>.pt: a list of steps with the reported loss, every parameter's gradient
as the optimizer sees it (under its name in a model of one rank, with NaN where another rank holds
it), each token's loss by document and position, and the all-to-alls of the nested groups.
"""

import argparse
import os
import sys
from pathlib import Path


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The probe's own flags, and those it leaves for pretrain_nsp."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("--probe-float64", action="store_true", help="all in double precision")
    parser.add_argument("--probe-fail", metavar="RANK:STEP", help="a rank raises in a prologue")
    parser.add_argument("--probe-other-plan", metavar="RANK:STEP", help="a rank plans otherwise")
    parser.add_argument("--probe-mask-before", type=int, help="no targets before this position")
    parser.add_argument(
        "--probe-layer-inputs", action="store_true", help="gradients of layer inputs"
    )
    parser.add_argument("--probe-one-expert", action="store_true", help="all tokens to expert 0")
    parser.add_argument(
        "--probe-recompute", action="store_true", help="kernel calls, routing, what is kept"
    )
    parser.add_argument("--probe-tied-experts", action="store_true", help="experts 0 and 1 alike")
    parser.add_argument("--probe-rerun", action="store_true", help="every step runs twice")
    parser.add_argument("--probe-other-marks", metavar="RANK", type=int, help="a rank saves less")
    parser.add_argument("--probe-blocks", type=int, help="rows of a block, as in FP8")
    parser.add_argument("--probe-delays", type=float, help="longest of random delays, in ms")
    parser.add_argument("--probe-experts", action="store_true", help="biases and logged figures")
    parser.add_argument(
        "--probe-megatron-routing", action="store_true", help="Megatron's own losses on one rank"
    )
    return parser.parse_known_args(argv)


def watch_recomputation(options: argparse.Namespace) -> None:
    """Puts the wrappers in place that have to do with recomputation."""
    from tests.mcore import watch_recompute

    if options.probe_recompute:
        watch_recompute.watch_recompute()
    if options.probe_tied_experts:
        watch_recompute.make_experts_tie()
    if options.probe_rerun:
        watch_recompute.run_every_step_twice()
    if options.probe_other_marks is not None:
        watch_recompute.mark_otherwise(options.probe_other_marks)


def watch_experts(options: argparse.Namespace) -> None:
    """Puts the wrappers in place that have to do with experts."""
    from tests.mcore import watch_experts

    if options.probe_experts:
        watch_experts.watch_figures()
        watch_experts.watch_biases()
    if options.probe_megatron_routing:
        watch_experts.route_as_megatron()


def main(argv: list[str]) -> None:
    """Trains under the probe."""
    options, sys.argv[1:] = parse(argv)
    from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

    enable_cpu_mode(float64=options.probe_float64)
    import torch

    from tests.mcore import watch

    watch.watch_optimizer()
    watch.watch_loss()
    watch.watch_further_losses()
    watch.watch_tokens()
    watch.watch_groups()
    watch.watch_rotary()
    watch.watch_reads()
    watch.save_without_a_process()
    if options.probe_layer_inputs:
        watch.watch_layer_inputs()
    if options.probe_one_expert:
        watch.route_to_one_expert()
    if options.probe_blocks is not None:
        watch.fill_blocks(options.probe_blocks)
    if options.probe_delays is not None:
        watch.delay_at_random(options.probe_delays)
    if options.probe_mask_before is not None:
        watch.mask_targets(options.probe_mask_before)
    if options.probe_fail is not None:
        failing = (int(part) for part in options.probe_fail.split(":"))
        watch.fail_on_purpose(*failing, options.out / "failed_at")
    if options.probe_other_plan is not None:
        watch.plan_otherwise(*(int(part) for part in options.probe_other_plan.split(":")))
    watch_recomputation(options)
    watch_experts(options)
    watch.pretrain.main()
    torch.save(watch.STEPS, options.out / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
