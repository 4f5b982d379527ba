"""Pretrain a GPT model with nested sequence parallelism, in Megatron-Core's own training loop.

    torchrun --nproc-per-node 8 pretrain_nsp.py --nsp-batch-tokens 2097152 ... (Megatron's flags)

`python pretrain_nsp.py --help` lists Megatron's flags and, at the end, the `--nsp-*` ones.
"""

import sys

if __name__ == "__main__":
    if "--nsp-cpu" in sys.argv:
        from megatron_nsp.mcore.cpu.mode import enable_cpu_mode

        enable_cpu_mode()  # before Megatron is imported
    from megatron_nsp.mcore.pretrain import main

    main()
