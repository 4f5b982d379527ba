"""Where sample lengths come from: files of them, lists, or the quantile tables of three corpora.

A table gives the length at some survivals (the share of samples that are longer); between two
points the length is linear in the survival. Samples are drawn by inverting that curve, with plain
IEEE arithmetic only, so that one seed gives one list on every machine.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from megatron_nsp.plan.arrays import FloatArray, IntArray

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_VERSION = 1
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_DRAWN_AT_ONCE = 4096
_MOST_EMPTY_DRAWS = 64


@dataclass(frozen=True, eq=False)
class LengthTable:
    """Quantiles of a corpus.

    Attributes:
        name: how `--lengths` calls it.
        provenance: what it was made from.
        survival: `[m]` share of samples longer than `length`, ascending from 0 to 1.
        length: `[m]` tokens, descending.
    """

    name: str
    provenance: str
    survival: FloatArray
    length: FloatArray

    def draw(self, generator: np.random.Generator) -> Iterator[IntArray]:
        """Endless samples, some thousand at a time."""
        while True:
            survival = generator.random(_DRAWN_AT_ONCE)
            yield np.rint(np.interp(survival, self.survival, self.length)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class DrawnLengths:
    """Lengths to plan.

    Attributes:
        lengths: `[n]` tokens.
        num_dropped: samples left out because they hold no token.
        num_over_long: samples left out because they are longer than allowed.
    """

    lengths: IntArray
    num_dropped: int
    num_over_long: int


def table_names() -> tuple[str, ...]:
    """Names of the tables that ship with the package."""
    folder = files("megatron_nsp.steps") / "data" / "lengths"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_table(name: str) -> LengthTable:
    """A table by name.

    Raises:
        ValueError: there is no such table; names those there are.
    """
    if name not in table_names():
        raise ValueError(f"no length table {name}, only {', '.join(table_names())}")
    path = files("megatron_nsp.steps") / "data" / "lengths" / f"{name}.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return LengthTable(
        name=data["name"],
        provenance=data["provenance"],
        survival=np.array(data["survival"][::-1], dtype=np.float64),
        length=np.array(data["length"][::-1], dtype=np.float64),
    )


def load_lengths(source: str) -> LengthTable | IntArray:
    """What `--lengths` names: a table, a list such as `4096,512,512`, or a file.

    Files: `.txt` (whole numbers between white space or commas), `.npy`, `.npz` (its array
    `lengths`, or its only one), `.idx` (the index of a Megatron IndexedDataset: one length a
    document).

    Raises:
        ValueError: no such file, or not a list of whole numbers; one line naming the file.
    """
    if source in table_names():
        return load_table(source)
    lengths = _read(source)
    for place in np.flatnonzero(lengths < 0)[:1].tolist():
        raise ValueError(f"--lengths {source}: length {place} is negative: {lengths[place]}")
    return lengths


def _read(source: str) -> IntArray:
    if re.fullmatch(r"\s*-?\d+(\s*,\s*-?\d+)*\s*,?\s*", source):
        words = [word for word in source.split(",") if word.strip()]
        try:
            return np.array([int(word) for word in words], dtype=np.int64)
        except OverflowError as error:
            largest = max(words, key=lambda word: abs(int(word)))
            raise ValueError(f"--lengths has {largest} tokens, too many to count") from error
    path = Path(source)
    readers = {".txt": _read_text, ".npy": _read_numpy, ".npz": _read_numpy, ".idx": _read_index}
    if path.suffix not in readers:
        raise ValueError(
            f"--lengths {source} is neither a length table ({', '.join(table_names())}), nor a "
            f"list of lengths, nor a file that ends in {', '.join(readers)}"
        )
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror or error}") from error


def _read_text(path: Path) -> IntArray:
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} holds something other than lengths: {error}") from error


def _read_numpy(path: Path) -> IntArray:
    content = BytesIO(path.read_bytes())
    try:
        loaded = np.load(content, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return _whole_numbers(loaded)
        with loaded as archive:
            names = list(archive.files)
            name = "lengths" if "lengths" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise ValueError(f"it has arrays {', '.join(names)}, none called lengths")
            return _whole_numbers(archive[name])
    except Exception as error:  # a damaged file fails in a dozen ways inside numpy and zipfile
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is not an array of lengths: {reason}") from error


def _read_index(path: Path) -> IntArray:
    """Document lengths from a Megatron index: a document is a run of sequences.

    Layout (megatron/core/datasets/indexed_dataset.py): magic, version, type code, number of
    sequences, number of document boundaries; int32 sequence lengths; int64 sequence pointers; int64
    boundaries, the first 0.
    """
    data = path.read_bytes()
    if len(data) < _INDEX_HEADER.size or not data.startswith(_INDEX_MAGIC):
        raise ValueError(f"{path} is not the index of a Megatron IndexedDataset")
    _, version, _, num_sequences, num_bounds = _INDEX_HEADER.unpack_from(data)
    if version != _INDEX_VERSION:
        raise ValueError(f"{path} has index version {version}, only {_INDEX_VERSION} is known")
    start = _INDEX_HEADER.size
    bounds_start = start + num_sequences * (4 + 8)
    if len(data) < bounds_start + 8 * num_bounds:
        raise ValueError(
            f"{path} is cut short: {len(data)} bytes, {bounds_start + 8 * num_bounds} expected"
        )
    sequences = np.frombuffer(data, dtype="<i4", count=num_sequences, offset=start)
    bounds = np.frombuffer(data, dtype="<i8", count=num_bounds, offset=bounds_start)
    if not are_bounds(bounds, num_sequences):
        raise ValueError(
            f"{path} is damaged: documents reach outside its {num_sequences} sequences"
        )
    ends = np.concatenate([[0], np.cumsum(sequences, dtype=np.int64)])
    lengths: IntArray = np.diff(ends[bounds])
    return lengths


def are_bounds(bounds: IntArray, num_sequences: int) -> bool:
    """Whether documents are runs of sequences, one after the other, inside what there is."""
    if len(bounds) == 0:
        return False
    is_inside = int(bounds[0]) >= 0 and int(bounds[-1]) <= num_sequences
    return is_inside and bool((bounds[1:] >= bounds[:-1]).all())


def _whole_numbers(array: np.ndarray) -> IntArray:
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(f"one row of numbers needed, got {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("some of them are NaN or infinite")
    if len(array) and max(abs(float(array.max())), abs(float(array.min()))) >= 2.0**63:
        raise ValueError("some are too many tokens to count")
    lengths = array.astype(np.int64)
    if not np.array_equal(lengths, array):
        raise ValueError("not all of them are whole numbers")
    return lengths


def draw_batch(
    source: LengthTable | IntArray, batch_tokens: int | None, max_length: int | None, seed: int
) -> DrawnLengths:
    """Draws whole samples until `batch_tokens` is reached; the last one may go over it.

    From a list without replacement; without `batch_tokens` the whole list, in its own order.

    Args:
        source: a table or a list of lengths.
        batch_tokens: tokens of the batch.
        max_length: longest sample; longer ones are left out and counted.
        seed: of the draw.

    Raises:
        ValueError: a table without `batch_tokens`, or fewer tokens than that to draw from.
    """
    if isinstance(source, LengthTable) and batch_tokens is None:
        raise ValueError(f"--lengths {source.name} needs --batch-tokens: a table has no end")
    generator = np.random.Generator(np.random.PCG64(seed))
    if not isinstance(source, LengthTable):
        order = np.arange(len(source))
        if batch_tokens is not None:
            order = np.argsort(generator.random(len(source)), kind="stable")
        kept = _keep(source[order], max_length)
        if batch_tokens is None:
            return kept
        if int(kept.lengths.sum()) < batch_tokens:
            raise ValueError(
                f"--batch-tokens {batch_tokens} is more than the {int(kept.lengths.sum())} tokens "
                "of all samples"
            )
        return DrawnLengths(
            _until(kept.lengths, batch_tokens), kept.num_dropped, kept.num_over_long
        )
    parts: list[IntArray] = []
    assert batch_tokens is not None
    missing, num_over_long, num_empty = batch_tokens, 0, 0
    for drawn in source.draw(generator):
        kept = _keep(drawn, max_length)
        part = _until(kept.lengths, missing)
        # Of the samples drawn after the last one taken none is looked at, so none is counted.
        num_looked_at = len(drawn)
        if int(part.sum()) >= missing:
            ends = np.flatnonzero(_is_kept(drawn, max_length))
            num_looked_at = int(ends[len(part) - 1]) + 1
        num_over_long += num_looked_at - len(part)
        parts.append(part)
        missing -= int(part.sum())
        num_empty += len(part) == 0
        if missing <= 0:
            break
        if num_empty == _MOST_EMPTY_DRAWS:
            raise ValueError(
                f"--max-len {max_length} leaves nothing to draw: the shortest sample of "
                f"{source.name} has {int(source.length.min())} tokens"
            )
    return DrawnLengths(np.concatenate(parts), 0, num_over_long)


def _is_kept(lengths: IntArray, max_length: int | None) -> np.ndarray:
    return (lengths >= 1) & (lengths <= (max_length or np.iinfo(np.int64).max))


def _keep(lengths: IntArray, max_length: int | None) -> DrawnLengths:
    num_dropped = int((lengths < 1).sum())
    kept = lengths[_is_kept(lengths, max_length)]
    return DrawnLengths(kept, num_dropped, len(lengths) - num_dropped - len(kept))


def _until(lengths: IntArray, tokens: int) -> IntArray:
    """The first samples that together reach so many tokens; all of them if they do not."""
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
