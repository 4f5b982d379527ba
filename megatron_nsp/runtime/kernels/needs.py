"""What attention code runs on, and the line that says why it cannot be had here."""

import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Needs:
    """What must be there before a kernel can be made.

    Attributes:
        device: type of the tensors it runs on; None = any.
        module: module that must be importable.
        package: how people call what brings that module.
        least: compute capability of the GPU from which on it runs.
        last: the last major capability it runs on; None = all later ones.
    """

    device: str | None = None
    module: str = "torch"
    package: str = "torch"
    least: tuple[int, int] = (8, 0)
    last: int | None = None

    def is_installed(self) -> bool:
        """Whether the module is there; it may still not load."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ImportError:  # a parent package is missing or does not load
            return False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this capability will do."""
        if self.device != "cuda":
            return True
        return capability >= self.least and (self.last is None or capability[0] <= self.last)

    def check(self, asked: str, device: torch.device) -> None:
        """Refuses what is not there.

        Args:
            asked: the flag that asks for it, with its value.
            device: where it is to run.

        Raises:
            ValueError: it does not run on `device`, or the module is not installed.
        """
        if self.device not in (None, device.type):
            raise ValueError(
                f"{asked} runs on {self.device} tensors, this job's device is {device}"
            )
        if not self.is_installed():
            raise ValueError(
                f"{asked} needs the package {self.module} ({self.package}), which is not installed"
            )
        capability = capability_of(device)
        if capability is not None and not self.runs_on(capability):
            limit = f"from {self.least[0]}.{self.least[1]}"
            if self.last is not None:
                limit += f" to {self.last}.x"
            raise ValueError(
                f"{asked} runs on GPUs of compute capability {limit}, this one has "
                f"{capability[0]}.{capability[1]}"
            )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None for a CPU and where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)
