"""What a machine can do, as numbers the planner works with.

A profile is data: a built-in one in `data/profiles/`, or a JSON file that `megatron-nsp profile`
wrote. Every profile says whether it was measured or estimated, where its numbers come from, and
when. What was not measured is absent: a profile of one rank has no rate of exchanges and plans
degree 1 alone, one of a single host no rate between hosts. Units are in the names of the fields.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nsp.plan.arrays import FloatArray, IntArray
from megatron_nsp.plan.split import Split


@dataclass(frozen=True)
class AttentionRate:
    """Throughput of the attention kernel of one rank, for samples of one length."""

    fwd_flops_per_s: float
    bwd_flops_per_s: float


@dataclass(frozen=True)
class ExchangeRate:
    """What an exchange among the ranks of one degree does.

    Attributes:
        bytes_per_s: bytes one rank sends a second to the others.
        latency_us: time of an exchange beyond its bytes.
    """

    bytes_per_s: float
    latency_us: float


@dataclass(frozen=True)
class FittedModel:
    """One model's times as somebody fitted them, in place of throughputs and flops.

    A sample of L tokens at degree d takes (quadratic_us L^2 + linear_us L) / d, and its exchanges
    exchange_bytes_per_token L / d bytes at the profile's rate for d. Both passes, all layers; heads
    limit no degree.

    Attributes:
        quadratic_us: microseconds for each pair of tokens.
        linear_us: microseconds for each token.
        exchange_bytes_per_token: bytes of all exchanges for each token.
        fwd_share: share of it all that is forward.
        activation_bytes_per_token: activation memory.
    """

    quadratic_us: float
    linear_us: float
    exchange_bytes_per_token: float
    fwd_share: float
    activation_bytes_per_token: float


@dataclass(frozen=True)
class Profile:
    """Throughputs and overheads of one kind of machine.

    Attributes:
        name: how `--profile` calls it.
        is_estimate: True when the numbers were not measured on the machine they describe.
        provenance: where the numbers come from.
        date: when they were measured or written down, YYYY-MM-DD.
        attention: by length in tokens; in between the rates are interpolated.
        dense_flops_per_s: throughput of one rank in projections and MLP.
        intra_bytes_per_s: bytes one rank sends a second in an exchange inside a host; None = not
            measured, and refused where a plan needs it.
        inter_bytes_per_s: bytes one rank sends a second to other hosts; None as above.
        ranks_per_host: GPUs of a host, or CPU ranks.
        latency_us: time of one phase of an active node beyond its work, per layer and pass.
        bias_us: time of a micro-batch beyond its work (parameter traffic, launches).
        exchanges: by SP backend and degree, measured; goes before the two tiers above.
        memory_bytes: memory of one rank; None = unknown.
        fitted: times of one model, in place of attention and dense throughput.
        merged_elements_per_s: elements of attention output that a rank adds a second to what it
            has of other keys; None = unknown, taken to cost nothing.
        residuals: relative error of each fit, root of the mean square, by what was fitted.
    """

    name: str
    is_estimate: bool
    provenance: str
    date: str
    attention: Mapping[int, AttentionRate] = field(hash=False)
    dense_flops_per_s: float
    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None
    ranks_per_host: int
    latency_us: float
    bias_us: float = 0.0
    exchanges: Mapping[str, Mapping[int, ExchangeRate]] = field(default_factory=dict, hash=False)
    memory_bytes: float | None = None
    fitted: FittedModel | None = None
    merged_elements_per_s: float | None = None
    residuals: Mapping[str, float] = field(default_factory=dict, hash=False)

    def attention_flops_per_s(self, lengths: IntArray | FloatArray, is_fwd: bool) -> FloatArray:
        """`[n]` kernel throughput for samples of these lengths; constant beyond the table."""
        known = sorted(self.attention)
        rates = [self.attention[length] for length in known]
        values = [rate.fwd_flops_per_s if is_fwd else rate.bwd_flops_per_s for rate in rates]
        points, table = (np.array(numbers, dtype=np.float64) for numbers in (known, values))
        return np.asarray(np.interp(np.asarray(lengths, dtype=np.float64), points, table))

    def exchange_rate(self, backend: str, degree: int, stride: int = 1) -> ExchangeRate:
        """What an exchange among the ranks of a node does, the part a rank keeps left out.

        Where the ranks of a node share hosts in equal parts of h, d - h of the d - 1 parts that a
        rank sends leave the host and run at the slower rate, so the whole exchange runs at
        inter * (d - 1) / (d - h). Where hosts cut a node unevenly, h is the smallest part any rank
        may find itself in: 1.

        Args:
            backend: the SP backend.
            degree: ranks of the node, at least 2.
            stride: GPUs from one rank of the node to the next (the tensor-parallel size).

        Raises:
            ValueError: the rate was not measured.
        """
        assert degree > 1, f"{degree=} sends nothing"
        measured = self.exchanges.get(backend, {}).get(degree)
        if measured is not None:
            return measured
        beside = self._beside(degree, stride)
        if beside == degree:
            return ExchangeRate(self.rate_inside(), self.latency_us)
        rate = self.rate_between() * (degree - 1) / (degree - beside)
        return ExchangeRate(rate, self.latency_us)

    def rate_inside(self) -> float:
        """Bytes one rank sends a second inside a host.

        Raises:
            ValueError: the rate was not measured.
        """
        return self._known("intra_bytes_per_s", self.intra_bytes_per_s, "inside a host")

    def rate_between(self) -> float:
        """Bytes one rank sends a second to other hosts.

        Raises:
            ValueError: the rate was not measured.
        """
        return self._known("inter_bytes_per_s", self.inter_bytes_per_s, "between hosts")

    def _known(self, name: str, bytes_per_s: float | None, where: str) -> float:
        if bytes_per_s is None:
            raise ValueError(
                f"profile {self.name} has no {name}: no exchange {where} was measured "
                f"(ranks_per_host {self.ranks_per_host}); profile more ranks or use degree 1 alone"
            )
        return bytes_per_s

    def members_rate(self, split: Split, degree: int, stride: int = 1) -> ExchangeRate:
        """What an exchange between the ring members of a node does.

        What was measured at this degree, with as many members as ranks, counts for any number of
        members to which each sends to as many others. Otherwise the rate follows from what all
        ranks of the node exchange with one another: inside a host every byte is as fast. Across
        hosts d - h of the d - 1 parts that a rank sends leave its host, so the rate between hosts
        is (d - h) / (d - 1) times that. A member that sends to p others has b - 1 of them beside
        it, but one elsewhere at least, as the slowest neighbours of a ring have: what it sends goes
        at p / (p + 1 - b) times the rate between hosts.

        Args:
            split: how the node divides attention; at least two members.
            degree: ranks of the node.
            stride: GPUs from one rank of the node to the next.

        Raises:
            ValueError: the rate was not measured.
        """
        members, beside = split.num_members, self._beside(degree, stride)
        peers = split.backend.num_peers(members)
        measured = self.exchanges.get(split.name, {}).get(degree)
        if measured is not None and peers == split.backend.num_peers(degree):
            return measured
        whole = measured or self.exchange_rate("ulysses", degree, stride)
        if beside == degree:
            return whole
        rate = whole.bytes_per_s * (degree - beside) / (degree - 1)
        near = self._beside(members, stride * (degree // members))
        rate *= peers / (peers + 1 - min(near, peers))
        return ExchangeRate(rate, whole.latency_us)

    def ranks_together(self, stride: int) -> int:
        """Ranks of the domain on one host, `stride` GPUs from one to the next."""
        return max(self.ranks_per_host // stride, 1)

    def _beside(self, degree: int, stride: int) -> int:
        """Ranks of a node that share a host, see `ranks_beside`."""
        return ranks_beside(degree, self.ranks_together(stride))

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values."""
        data = asdict(self)
        data["attention"] = _keyed_by_text(self.attention)
        data["exchanges"] = {
            backend: _keyed_by_text(table) for backend, table in sorted(self.exchanges.items())
        }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Profile":
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown, or holds an impossible value; one line naming
                it.
        """
        values = dict(_checked("", data, cls))
        values["attention"] = _table("attention", values["attention"], AttentionRate, least=1)
        exchanges = _mapping("exchanges", values.get("exchanges", {}))
        values["exchanges"] = {
            backend: _table(f"exchanges.{backend}", table, ExchangeRate, least=2)
            for backend, table in exchanges.items()
        }
        if values.get("fitted") is not None:
            fitted = FittedModel(**_checked("fitted.", values["fitted"], FittedModel))
            if fitted.fwd_share > 1:
                raise ValueError(f"fitted.fwd_share must be at most 1, got {fitted.fwd_share}")
            values["fitted"] = fitted
        if not values["attention"]:
            raise ValueError("attention must hold at least one length")
        _mapping("residuals", values.get("residuals", {}))
        return cls(**values)


_TEXTS = {"name", "provenance", "date"}
_OTHER = {"is_estimate", "attention", "exchanges", "fitted", "residuals"}
_MAY_BE_ZERO = {"latency_us", "bias_us", "quadratic_us", "linear_us", "exchange_bytes_per_token"}
_MAY_BE_UNKNOWN = {"memory_bytes", "merged_elements_per_s"}
_MAY_BE_UNKNOWN |= {"intra_bytes_per_s", "inter_bytes_per_s"}
_MAY_BE_ZERO |= {"activation_bytes_per_token", "fwd_share"}


def _checked(place: str, data: object, cls: type) -> Mapping[str, Any]:
    """The data of one dataclass, with its names and numbers checked."""
    known = {entry.name: entry for entry in fields(cls)}
    checked = _mapping(place.rstrip(".") or "a profile", data)
    if unknown := sorted(set(checked) - set(known)):
        raise ValueError(f"there is no field {place}{', '.join(unknown)}")
    required = [name for name, entry in known.items() if not _has_default(entry)]
    if missing := [name for name in required if name not in checked]:
        raise ValueError(f"the field {place}{', '.join(missing)} is missing")
    for name, value in checked.items():
        if name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"{place}{name} must be text, got {value!r}")
        if name == "is_estimate" and not isinstance(value, bool):
            raise ValueError(f"is_estimate must be true or false, got {value!r}")
        if name not in _TEXTS | _OTHER and not (name in _MAY_BE_UNKNOWN and value is None):
            _check_number(place + name, value, may_be_zero=name in _MAY_BE_ZERO)
    return checked


def _has_default(entry: "Field[Any]") -> bool:
    return entry.default is not entry.default_factory  # both MISSING where there is none


def _check_number(place: str, value: object, may_be_zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place} must be a number, got {value!r}")
    is_large_enough = value >= 0 if may_be_zero else value > 0
    if not (is_large_enough and math.isfinite(value)):
        least = "at least 0" if may_be_zero else "positive"
        raise ValueError(f"{place} must be {least} and finite, got {value}")


def _mapping(place: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{place} must be a JSON object, got {data!r}")
    return data


def _table[Rate: (AttentionRate, ExchangeRate)](
    place: str, data: object, cls: type[Rate], least: int
) -> dict[int, Rate]:
    """Rates by whole number."""
    table = {}
    for key, entry in _mapping(place, data).items():
        if not (str(key).isdecimal() and len(str(key)) < 15 and int(key) >= least):
            raise ValueError(f"{place} is by whole numbers from {least}, got {key}")
        table[int(key)] = cls(**_checked(f"{place}.{key}.", entry, cls))
    return table


def _keyed_by_text(table: Mapping[int, Any]) -> dict[str, Any]:
    return {str(key): asdict(rate) for key, rate in sorted(table.items())}


def ranks_beside(degree: int, together: int) -> int:
    """Ranks of a node that share a host, itself among them: all, or the least any rank has.

    Args:
        degree: ranks of the node.
        together: ranks of the domain on one host.
    """
    if degree <= together and together % degree == 0:
        return degree
    return together if degree % together == 0 else 1


def measured_tiers(
    bytes_per_s: Mapping[int, float], ranks_per_host: int
) -> tuple[float | None, float | None]:
    """The rates inside a host and between hosts, from exchanges that were measured.

    Args:
        bytes_per_s: what a rank sent to all others of its node, by degree.
        ranks_per_host: ranks on one host, neighbours in the order of ranks.

    Returns:
        The median of the nodes inside a host; of the others the slowest of what left it, the
        inverse of `Profile.exchange_rate`. None where no degree tells.
    """
    inside, between = [], []
    for degree, rate in bytes_per_s.items():
        beside = ranks_beside(degree, ranks_per_host)
        if beside == degree:
            inside.append(rate)
        else:
            between.append(rate * (degree - beside) / (degree - 1))
    return statistics.median(inside) if inside else None, min(between, default=None)


def built_in_profiles() -> tuple[str, ...]:
    """Names of the profiles that ship with the package."""
    folder = files("megatron_nsp.cost") / "data" / "profiles"
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
        folder = files("megatron_nsp.cost") / "data" / "profiles"
        text = (folder / f"{name_or_path}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no profile {name_or_path}: neither a file of text nor one of "
                f"{', '.join(built_in_profiles())}"
            ) from error
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"profile {name_or_path} is not JSON: {error}") from error
    try:
        return Profile.from_dict(data)
    except ValueError as error:
        raise ValueError(f"profile {name_or_path}: {error}") from error
