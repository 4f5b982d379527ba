"""What a machine can do, as numbers the planner works with.

A profile is data: a built-in one in `data/profiles/`, or a JSON file that a measurement wrote.
Every profile says whether it was measured or estimated, where its numbers come from, and when.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

_POSITIVE = (
    "attention_flops_per_s",
    "dense_flops_per_s",
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "ranks_per_host",
)


_OPTIONAL = {"bias_us", "all_to_all_bytes_per_s"}


@dataclass(frozen=True)
class Profile:
    """Throughputs and overheads of one kind of machine.

    Attributes:
        name: how `--profile` calls it.
        is_estimate: True when the numbers were not measured on the machine they describe.
        provenance: where the numbers come from.
        date: when they were measured or written down, YYYY-MM-DD.
        attention_flops_per_s: attention kernel throughput of one rank, forward and backward.
        dense_flops_per_s: throughput of one rank in projections and MLP.
        intra_bytes_per_s: all-to-all bytes one rank sends a second inside a host.
        inter_bytes_per_s: bytes one rank sends a second to other hosts.
        ranks_per_host: nodes of up to this many ranks stay inside one host.
        latency_us: time of one phase of an active node beyond its work, per layer and pass.
        bias_us: time of a micro-batch beyond its work (parameter traffic, launches).
        all_to_all_bytes_per_s: measured throughput by degree; it goes before the two tiers.
    """

    name: str
    is_estimate: bool
    provenance: str
    date: str
    attention_flops_per_s: float
    dense_flops_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    ranks_per_host: int
    latency_us: float
    bias_us: float = 0.0
    all_to_all_bytes_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuses numbers that would divide by zero or turn time backwards.

        Raises:
            ValueError: one line naming the field and its number.
        """
        for name in (*_POSITIVE, "latency_us", "bias_us"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            is_positive = value > 0 if name in _POSITIVE else value >= 0
            if not (is_positive and math.isfinite(value)):
                sign = "positive" if name in _POSITIVE else "at least 0"
                raise ValueError(f"{name} must be {sign} and finite, got {value}")
        for degree, rate in self.all_to_all_bytes_per_s.items():
            if not (degree > 1 and rate > 0 and math.isfinite(rate)):
                raise ValueError(
                    f"all_to_all_bytes_per_s has {rate} at degree {degree}; "
                    "degrees start at 2, rates are positive and finite"
                )

    def all_to_all_rate_bytes_per_s(self, degree: int) -> float:
        """Bytes one rank sends a second in an all-to-all over `degree` ranks, itself left out.

        Above `ranks_per_host` (h) the ranks of other hosts get (d - h) / d of the data through the
        slower network, so that the whole exchange runs at inter * d / (d - h).

        Args:
            degree: ranks of the node, at least 2.
        """
        assert degree > 1, f"{degree=} sends nothing"
        if degree in self.all_to_all_bytes_per_s:
            return float(self.all_to_all_bytes_per_s[degree])
        if degree <= self.ranks_per_host:
            return float(self.intra_bytes_per_s)
        return self.inter_bytes_per_s * degree / (degree - self.ranks_per_host)

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values."""
        data = asdict(self)
        table = sorted(self.all_to_all_bytes_per_s.items())
        data["all_to_all_bytes_per_s"] = {str(degree): rate for degree, rate in table}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Profile":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown, or holds an impossible number.
        """
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"a profile has no field {', '.join(unknown)}")
        values = dict(data)
        table = values.get("all_to_all_bytes_per_s", {})
        try:
            values["all_to_all_bytes_per_s"] = {int(d): float(rate) for d, rate in table.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"all_to_all_bytes_per_s must map degrees to rates, got {table!r}"
            ) from error
        if missing := sorted(known - _OPTIONAL - set(data)):
            raise ValueError(f"a profile needs the field {', '.join(missing)}")
        return cls(**values)


def built_in_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with the package."""
    folder = files("megatron_nsp.planner") / "data" / "profiles"
    return tuple(
        sorted(
            entry.name.removesuffix(".json")
            for entry in folder.iterdir()
            if entry.name.endswith(".json")
        )
    )


def load_profile(name_or_path: str) -> Profile:
    """A built-in profile by name, or one from a JSON file.

    Raises:
        ValueError: neither a built-in name nor a readable profile; names the built-in ones.
    """
    if name_or_path in built_in_profiles():
        folder = files("megatron_nsp.planner") / "data" / "profiles"
        text = (folder / f"{name_or_path}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"no profile {name_or_path}: neither a file nor one of "
                f"{', '.join(built_in_profiles())}"
            ) from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"profile {name_or_path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"profile {name_or_path} must be a JSON object")
    try:
        return Profile.from_dict(data)
    except ValueError as error:
        raise ValueError(f"profile {name_or_path}: {error}") from error
