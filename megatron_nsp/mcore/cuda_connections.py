"""CUDA_DEVICE_MAX_CONNECTIONS: how many hardware queues the streams of a process share.

We never set it. With 1, kernels start in the order in which the host launches them, whatever their
stream: an exchange that was launched behind an attention kernel waits for it to start. Megatron
asks for 1 with tensor parallelism on GPUs before Blackwell, and then that is the value to run with.
"""


def describe_connections(value: str | None, overlap: bool) -> list[str]:
    """The lines a run on GPUs prints when it starts.

    Args:
        value: the environment variable.
        overlap: whether phases are streamed.
    """
    lines = [f"nsp: CUDA_DEVICE_MAX_CONNECTIONS is {'not set' if value is None else value}"]
    if value == "1" and overlap:
        lines.append(
            "nsp: warning: with CUDA_DEVICE_MAX_CONNECTIONS=1 exchanges and attention kernels start"
            " in the order of their launch, so streaming hides less communication; results are the "
            "same. Use 8 or more, unless Megatron asks for 1 (tensor parallelism before Blackwell)"
        )
    return lines
