"""Builds the examples' corpus: the Python standard library's own source, one document a file.

    python examples/cpu/build_corpus.py --output build/corpus/stdlib

A token is a byte (vocabulary 256). The source of the standard library has what real corpora have: a
long tail, from files of a few bytes to one of 800 KB. Any other folder of Python files will do too.
The result is a Megatron IndexedDataset, PREFIX.bin and PREFIX.idx, the same for the same files.
"""

import argparse
import logging
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SURVIVALS = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


def source_files(folder: Path) -> list[Path]:
    """Python files below `folder`, by relative path; installed packages are left out."""
    files = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(folder / path for path in files if PACKAGE_FOLDERS.isdisjoint(path.parts))


def read_files(files: Iterable[Path], counts: dict[str, int]) -> Iterator[np.ndarray]:
    """`[length]` uint8 the bytes of each file; counts those passed over."""
    for path in files:
        try:
            data = path.read_bytes()
        except OSError:
            counts["unreadable"] += 1
            continue
        if data:
            yield np.frombuffer(data, dtype=np.uint8)
        else:
            counts["empty"] += 1


def write_documents(prefix: Path, documents: Iterable[np.ndarray]) -> np.ndarray:
    """Writes a Megatron IndexedDataset and returns the length of each document.

    Args:
        prefix: path of the dataset without the .bin/.idx ending.
        documents: `[length]` uint8 tokens of each document.
    """
    warnings.simplefilter("ignore")  # Megatron's, about packages that only GPUs need
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # likewise
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder, lengths = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8), []
    for document in documents:
        builder.add_document(document, [len(document)])
        lengths.append(len(document))
    builder.finalize(f"{prefix}.idx")
    return np.array(lengths, dtype=np.int64)


def describe(lengths: np.ndarray, counts: dict[str, int]) -> str:
    """Three lines on a corpus.

    Args:
        lengths: `[n]` tokens of each document.
        counts: files passed over, by reason.
    """
    quantiles = np.quantile(lengths, [1 - survival for survival in SURVIVALS]).astype(int).tolist()
    tail = ", ".join(f"{s:.1%} over {q:,}" for s, q in zip(SURVIVALS, quantiles, strict=True))
    return (
        f"{len(lengths):,} documents, {lengths.sum():,} tokens (bytes), longest {lengths.max():,}\n"
        f"lengths: {tail}\n"
        f"passed over: {', '.join(f'{count} {name}' for name, count in counts.items())} files"
    )


def main() -> None:
    """Builds the corpus that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, required=True, help="prefix of the .bin and .idx")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of Python files; default: the standard library of this interpreter",
    )
    parser.add_argument("--max-documents", type=int, help="use only the first so many files")
    args = parser.parse_args()
    files = source_files(args.folder)[: args.max_documents]
    if not files:
        parser.error(f"--folder {args.folder} holds no Python file")
    counts = {"empty": 0, "unreadable": 0}
    lengths = write_documents(args.output, read_files(files, counts))
    if not len(lengths):
        parser.error(f"--folder {args.folder}: all {len(files)} Python files are empty")
    print(describe(lengths, counts))


if __name__ == "__main__":
    main()
