"""Which documents flags name, and what every rank reads of them: by hand, and as Megatron does."""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import helpers_cpp
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from megatron_nsp.mcore.data_paths import DataPath, is_split, parts, split_shares
from megatron_nsp.mcore.documents import IndexedDocuments
from megatron_nsp.mcore.mock_documents import NUM_DOCUMENTS, MockDocuments
from megatron_nsp.mcore.readers import EndOfDocument, read_tokens
from megatron_nsp.plan.layout import rank_layout
from megatron_nsp.plan.plan import Plan
from megatron_nsp.plan.tree import SPTree
from megatron_nsp.steps.draw import Blend, BlendDraw

TREE = SPTree(2, (1, 2))
PAIR, LEFT, RIGHT = TREE.node(2, 0), TREE.node(1, 0), TREE.node(1, 1)
TOKENS = [[30, 31, 32], [10, 11, 12, 13, 14], [40], [20, 21]]

Rows = tuple[list[int], list[int], list[int]]


@pytest.fixture
def documents(tmp_path: Path) -> IndexedDocuments:
    """Four documents, side by side in one file."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/docs.bin", dtype=np.int32)
    for tokens in TOKENS:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{tmp_path}/docs.idx")
    return IndexedDocuments(DataPath("--data-path", (f"{tmp_path}/docs",)))


def rows(plan: Plan, rank: int, of_samples: list[int], documents: IndexedDocuments) -> Rows:
    layout = rank_layout(plan, rank, row_multiple=4)
    read = read_tokens(layout, np.array(of_samples), plan.lengths, documents)
    tokens, labels, loss_mask = (array.tolist() for array in read)
    return tokens, labels, loss_mask


def test_labels_are_the_next_tokens_of_the_own_document_on_every_rank(
    documents: IndexedDocuments,
) -> None:
    # IndexedDocuments 1 and 3 share the pair's stream of 7 tokens: 3 on rank 0, 4 on rank 1.
    plan = Plan.from_nodes(TREE, [5, 3, 2], [PAIR, RIGHT, PAIR])
    assert rows(plan, 0, [1, 0, 3], documents) == (
        [10, 11, 12, 0],
        [11, 12, 13, 0],  # 13 lies on rank 1
        [1, 1, 1, 0],
    )
    assert rows(plan, 1, [1, 0, 3], documents) == (
        [13, 14, 20, 21, 30, 31, 32, 0],
        [14, 0, 21, 0, 31, 32, 0, 0],
        [1, 0, 1, 0, 1, 1, 0, 0],
    )


def test_a_document_of_one_token_and_a_rank_without_any_have_no_target(
    documents: IndexedDocuments,
) -> None:
    plan = Plan.from_nodes(TREE, [1], [LEFT])
    assert rows(plan, 0, [2], documents) == ([40, 0, 0, 0], [0] * 4, [0] * 4)
    assert rows(plan, 1, [2], documents) == ([0] * 4, [0] * 4, [0] * 4)


def test_a_slice_may_end_with_a_document_or_hold_only_its_last_token(
    documents: IndexedDocuments,
) -> None:
    plan = Plan.from_nodes(TREE, [2, 2], [PAIR, PAIR])
    assert rows(plan, 0, [3, 3], documents) == ([20, 21, 0, 0], [21, 0, 0, 0], [1, 0, 0, 0])
    plan = Plan.from_nodes(TREE, [2], [PAIR])
    assert rows(plan, 0, [3], documents) == ([20, 0, 0, 0], [21, 0, 0, 0], [1, 0, 0, 0])
    assert rows(plan, 1, [3], documents) == ([21, 0, 0, 0], [0] * 4, [0] * 4)


def write(prefix: Path, documents: list[list[int]], vocabulary: type = np.int32) -> DataPath:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=vocabulary)
    for tokens in documents:
        builder.add_document(np.array(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return DataPath("--data-path", (str(prefix),))


class Recorded:
    """What Megatron's builder asks a data set for, in place of one that it would index."""

    def __init__(self, lengths: np.ndarray, path: str, indices: np.ndarray, *rest: object) -> None:
        self.lengths = lengths[indices]

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def build_low_level_dataset(path: str, config: object) -> np.ndarray:
        data = IndexedDataset(path)
        return np.array(data.sequence_lengths)  # not mapped: it outlives the data set

    @staticmethod
    def numel_low_level_dataset(lengths: np.ndarray) -> int:
        return len(lengths)


SPLITS = ("969, 30, 1", "99,1,0", "1", "949,50,1", "99990,8,2", "1,1,1", "0,5,5", ".5 .5", "100,0")


@pytest.mark.parametrize("count", [1, 12, 50, 1001])
def test_a_split_is_that_of_megatrons_builder(tmp_path: Path, count: int) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/docs.bin", dtype=np.uint8)
    for length in range(1, count + 1):  # a document is known by its length
        builder.add_document(np.zeros(length, np.uint8), [length])
    builder.finalize(f"{tmp_path}/docs.idx")
    whole = IndexedDocuments(DataPath("--data-path", (f"{tmp_path}/docs",)))
    for split in SPLITS:
        config = BlendedMegatronDatasetConfig(0, 8, blend=([f"{tmp_path}/docs"], None), split=split)
        built = BlendedMegatronDatasetBuilder(Recorded, [1, 1, 1], lambda: True, config).build()
        shares = split_shares(split)
        assert is_split(split)
        for part, share in zip(built, shares, strict=True):
            assert (part is None) == (share is None)
            if part is not None and share is not None:
                assert whole.part(share).lengths.tolist() == part.lengths.tolist()
        args = Namespace(mock_data=False, data_path=["x"], data_args_path=None, split=split)
        assert [part and part.share for part in parts(args)] == shares


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1, 1, 1], [9, 1, 40, 7, 0.5], [0.1] * 10])
def test_the_data_sets_of_a_blend_come_in_megatrons_order(weights: list[float]) -> None:
    expected, places = np.zeros(3000, np.int16), np.zeros(3000, np.int64)
    shares = np.array(weights) / sum(weights)
    helpers_cpp.build_blending_indices(expected, places, shares, len(weights), 3000, False)
    bounds = [100 * place for place in range(len(weights) + 1)]
    draw = BlendDraw(Blend(bounds, weights), np.full(bounds[-1], True), seed=1)
    assert [draw.next() // 100 for _ in range(3000)] == expected.tolist()


def test_a_part_of_several_data_sets_reads_the_right_tokens(tmp_path: Path) -> None:
    sets = [[[which * 100 + j] * (j + 1) for j in range(10 * which)] for which in (1, 2)]
    for name, documents in zip("ab", sets, strict=True):
        write(tmp_path / name, documents)
    path = DataPath("--data-path", (f"{tmp_path}/a", f"{tmp_path}/b"), (3.0, 1.0))
    whole = IndexedDocuments(path)
    for first, end in ((0.0, 0.7), (0.7, 0.9), (0.9, 1.0)):
        part = whole.part((first, end))
        expected = [
            each
            for docs in sets
            for each in docs[round(first * len(docs)) : round(end * len(docs))]
        ]
        read = [part.read(number, 0, int(n)).tolist() for number, n in enumerate(part.lengths)]
        assert read == expected
        assert part.blend is not None and part.blend.weights == (3.0, 1.0)
        assert part.blend.bounds[-1] == len(expected)
        names = [part.name_of(number) for number in range(len(expected))]
        assert names[0] == f"document {round(first * 10)} of --data-path {tmp_path}/a"
        assert names[-1] == f"document {round(end * 20) - 1} of --data-path {tmp_path}/b"


@pytest.mark.parametrize("mmap", [True, False])
def test_tokens_are_read_from_a_mapping_and_from_the_file(tmp_path: Path, mmap: bool) -> None:
    documents = IndexedDocuments(write(tmp_path / "docs", [[7, 60000, 9]], np.uint16), mmap)
    assert documents.read(0, 1, 3).tolist() == [60000, 9]


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prefix: str, mmap: bool) -> None:
        raise PermissionError(13, "Permission denied", f"{prefix}.idx")

    path = write(tmp_path / "docs", [[1]])
    monkeypatch.setattr("megatron_nsp.mcore.documents.IndexedDataset", refuse)
    with pytest.raises(ValueError, match=r"\A--data-path .*docs cannot be read: .*docs.idx'\Z"):
        IndexedDocuments(path)


def test_m10_a_token_that_the_vocabulary_lacks_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "docs", [[1, 2], [3, 5000, 4], [-1]])
    documents = IndexedDocuments(path).part((0.4, 1.0)).with_vocabulary(256)  # from document 1 on
    message = "^document 1 of --data-path .*docs has token 5000 at place 1, the vocabulary ends a"
    with pytest.raises(ValueError, match=message):
        documents.read(0, 1, 3)
    assert documents.read(0, 2, 3).tolist() == [4]
    with pytest.raises(ValueError, match=r"document 2 of .* has token -1 at place 0"):
        documents.read(1, 0, 1)
    assert documents.with_vocabulary(5001).read(0, 0, 3).tolist() == [3, 5000, 4]


def test_the_loss_is_masked_behind_an_end_of_document_as_megatron_masks_it(
    documents: IndexedDocuments,
) -> None:
    plan = Plan.from_nodes(TREE, [5, 3, 2], [PAIR, RIGHT, PAIR])
    for token in (12, 14, 31, 99):
        end = EndOfDocument(token, is_masked=True, restarting_flag=None)
        for rank in range(2):
            layout = rank_layout(plan, rank, row_multiple=4)
            order, lengths = np.array([1, 0, 3]), plan.lengths
            tokens, labels, mask = read_tokens(layout, order, lengths, documents, end=end)
            plain = read_tokens(layout, order, lengths, documents)
            assert tokens.tolist() == plain[0].tolist() and labels.tolist() == plain[1].tolist()
            _, megatrons, _ = _get_ltor_masks_and_position_ids(
                torch.from_numpy(tokens), token, False, False, True, False
            )
            assert mask.tolist() == (plain[2] * megatrons.numpy()).tolist()


def test_where_a_document_would_be_cut_in_two_the_flag_is_named(
    documents: IndexedDocuments,
) -> None:
    plan = Plan.from_nodes(TREE, [5], [LEFT])
    layout, lengths = rank_layout(plan, 0, row_multiple=4), plan.lengths
    flag = "--reset-position-ids"
    read_tokens(layout, np.array([1]), lengths, documents, end=EndOfDocument(14, False, flag))
    with pytest.raises(ValueError, match=f"{flag} would cut document 1 of .* token 12 at place 2:"):
        read_tokens(layout, np.array([1]), lengths, documents, end=EndOfDocument(12, False, flag))


def test_mock_documents_are_long_tailed_and_the_same_on_every_rank_and_slice() -> None:
    mock = MockDocuments(seed=5, max_length=4096).with_vocabulary(256)
    assert mock.lengths.max() == 4096 and mock.lengths.min() >= 1
    assert len(mock.lengths) == NUM_DOCUMENTS
    median, mean = np.median(mock.lengths), mock.lengths.mean()
    assert 900 < median < 1150 and mean > 1.4 * median
    tokens = mock.read(17, 0, 300)
    assert mock.read(17, 120, 200).tolist() == tokens[120:200].tolist()
    assert mock.part((0.0001, 1.0)).read(7, 0, 300).tolist() == tokens.tolist()
    assert MockDocuments(5, 4096).with_vocabulary(256).read(17, 0, 300).tolist() == tokens.tolist()
    assert mock.read(18, 0, 300).tolist() != tokens.tolist()
    other = MockDocuments(6, 4096).with_vocabulary(256)
    assert other.lengths.tolist() != mock.lengths.tolist()
    assert other.read(17, 0, 300).tolist() != tokens.tolist()
    counts = np.bincount(np.concatenate([mock.read(j, 0, 4096) for j in range(50)]), minlength=256)
    assert len(counts) == 256 and 600 < counts.min() <= counts.max() < 1000  # 800 each, +- 7 sigma


NEITHER = "--data-path takes prefixes, or a weight before every prefix"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--data-path names no data set"),
        ("0.3 a 0,7 b", f"{NEITHER}: 0,7 is no weight, and there is no data set 0.3"),
        ("0.3 a 0.7", f"{NEITHER}: a prefix is missing, and there is no data set 0.3"),
        ("a 0.3 b 0.7", f"{NEITHER}: a is no weight, and there is no data set 0.3"),
        ("0.3 a -1 b", "--data-path: b has the weight -1, at least 0"),
        ("nan a 1 b", "--data-path: a has the weight nan, at least 0"),
        ("inf a 1 b", "--data-path: a has the weight inf, at least 0"),
        ("0 a 0.0 b", "--data-path: all 2 weights are 0"),
        ("a b ./a", "--data-path names ./a twice"),
        ("0.3 a 0.7 a", "--data-path names a twice"),
    ],
)
def test_a_list_that_is_none_gives_one_line(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        DataPath.parse("--data-path", words.split())
    assert str(caught.value).startswith(message)


def test_lists_are_told_apart_as_megatron_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "2024", [[1]])
    for words in ("a", "a b", "a b c", "30 a 70 b", "1 a", "0 a 1e-2 b", "2024", "a 2024 b"):
        prefixes, weights = get_blend_from_list(words.split())
        path = DataPath.parse("--data-path", words.split())
        assert list(path.prefixes) == prefixes
        assert path.weights == (None if weights is None else tuple(weights))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: .*No such file"),
        ("{", "is not JSON"),
        ("[]", "needs the keys train, valid, test"),
        ('{"train": ["a"], "valid": null}', "needs the keys train, valid, test"),
        ('{"train": ["a"], "valid": [3], "test": null}', "valid is no list of prefixes and wei"),
        ('{"train": "0.1 a 0.2", "valid": null, "test": null}', "train takes prefixes, or a w"),
    ],
)
def test_a_file_of_lists_that_is_none(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "lists").write_text(content)
    empty = dict.fromkeys(("data_path", "data_args_path", "split"))
    args = Namespace(mock_data=False, per_split_data_args_path=str(tmp_path / "lists"), **empty)
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        parts(args)
    assert re.search(
        rf"^--per-split-data-args-path {tmp_path}/lists[,:]? {message}", str(caught.value)
    )


def test_files_of_lists_give_what_the_flags_would(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("0.25 a\n0.75 b\n")
    (tmp_path / "lists").write_text('{"train": ["1", "a", "3", "b"], "valid": "c", "test": null}')
    empty = dict.fromkeys(("data_path", "split", "per_split_data_args_path"))
    args = Namespace(mock_data=False, data_args_path=str(tmp_path / "list"), **empty)
    (train, valid, test) = parts(args)
    assert train is not None and train.path.weights == (0.25, 0.75)
    assert train.share == (0.0, 0.969) and valid is not None and test is not None
    empty = dict.fromkeys(("data_path", "data_args_path", "split"))
    args = Namespace(mock_data=False, per_split_data_args_path=str(tmp_path / "lists"), **empty)
    (train, valid, test) = parts(args)
    assert train is not None and valid is not None and test is None
    assert (train.path.prefixes, train.path.weights) == (("a", "b"), (1.0, 3.0))
    assert (valid.path.prefixes, valid.path.weights, valid.share) == (("c",), None, (0.0, 1.0))
