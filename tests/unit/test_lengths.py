"""Pure tests of where lengths come from: tables, lists, files, draws."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.steps.lengths import draw_batch, load_lengths, load_table, table_names


def write_index(path: Path, sequences: list[int], bounds: list[int]) -> None:
    """A Megatron index, byte by byte as indexed_dataset.py writes it."""
    path.write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, len(sequences), len(bounds))
        + np.array(sequences, dtype="<i4").tobytes()
        + np.cumsum([0, *sequences[:-1]]).astype("<i8").tobytes()
        + np.array(bounds, dtype="<i8").tobytes()
    )


def test_the_tables_are_small_and_say_where_they_come_from() -> None:
    assert table_names() == ("paper-mix", "source-code", "wikipedia")
    folder = Path(__file__).resolve().parents[2] / "megatron_nsp/steps/data/lengths"
    for name in table_names():
        table = load_table(name)
        assert (folder / f"{name}.json").stat().st_size < 4096
        assert table.provenance and json.loads((folder / f"{name}.json").read_text())["date"]
        assert table.survival[0] == 0 and table.survival[-1] == 1
        assert (np.diff(table.survival) > 0).all() and (np.diff(table.length) <= 0).all()


def test_paper_mix_goes_through_the_published_points() -> None:
    table = load_table("paper-mix")
    points = dict(zip(table.length.tolist(), table.survival.tolist(), strict=True))
    assert points[8192] == 0.06 and points[131072] == 0.0012 and table.length[0] > 393216
    draws = table.draw(np.random.default_rng(0))
    drawn = np.concatenate([next(draws) for _ in range(200)])
    assert (drawn < 8192).mean() == pytest.approx(0.94, abs=0.001)
    assert (drawn > 131072).mean() == pytest.approx(0.0012, abs=0.0002)


def test_draws_follow_the_seed_reach_the_tokens_and_count_what_they_leave_out() -> None:
    table = load_table("source-code")
    batch = draw_batch(table, 100_000, 20_000, seed=7)
    again = draw_batch(table, 100_000, 20_000, seed=7)
    assert batch.lengths.tolist() == again.lengths.tolist() and batch.num_over_long > 0
    assert batch.lengths.tolist() != draw_batch(table, 100_000, 20_000, seed=8).lengths.tolist()
    assert batch.lengths.max() <= 20_000 and batch.lengths.min() >= 1
    assert batch.lengths.sum() >= 100_000 > batch.lengths[:-1].sum()
    whole = draw_batch(table, 100_000, None, seed=7)
    shorter = whole.lengths[whole.lengths <= 20_000]
    assert batch.lengths[: len(shorter)].tolist() == shorter.tolist()
    # many draws of thousands each: the counts of all of them add up
    many = draw_batch(table, 40_000_000, 20_000, seed=7)
    share = many.num_over_long / (many.num_over_long + len(many.lengths))
    assert share == pytest.approx(0.021, abs=0.005)


def test_a_list_is_one_batch_or_drawn_without_replacement() -> None:
    lengths = load_lengths("30, 10,20,0,0,99")
    whole = draw_batch(lengths, None, 50, seed=0)
    assert whole.lengths.tolist() == [30, 10, 20]
    assert (whole.num_dropped, whole.num_over_long) == (2, 1)
    some = draw_batch(np.arange(1, 101), 1000, None, seed=0).lengths
    assert len(set(some.tolist())) == len(some) and some.sum() >= 1000 > some[:-1].sum()
    with pytest.raises(ValueError, match="--batch-tokens 61 is more than the 60 tokens"):
        draw_batch(lengths, 61, 50, seed=0)
    with pytest.raises(ValueError, match="--lengths wikipedia needs --batch-tokens"):
        draw_batch(load_table("wikipedia"), None, None, seed=0)


def test_a_maximum_below_every_sample_ends_instead_of_drawing_for_ever() -> None:
    table = load_table("source-code")
    assert table.length.min() > 1
    with pytest.raises(ValueError, match="--max-len 1 leaves nothing to draw"):
        draw_batch(table, 100, 1, seed=0)


def test_files_of_every_kind(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("5\n7, 9\n\n11\n")
    np.save(tmp_path / "a.npy", np.array([5, 7, 9, 11], dtype=np.uint32))
    np.savez(tmp_path / "a.npz", lengths=[5, 7, 9, 11], other=[1])
    np.savez(tmp_path / "b.npz", anything=[5.0, 7.0, 9.0, 11.0])
    write_index(tmp_path / "a.idx", [5, 3, 4, 9, 1, 10], [0, 1, 3, 4, 6])
    for name in ("a.txt", "a.npy", "a.npz", "b.npz", "a.idx"):
        assert load_lengths(str(tmp_path / name)).tolist() == [5, 7, 9, 11], name
    write_index(tmp_path / "b.idx", [5, 3], [0, 0, 2, 2])
    assert load_lengths(str(tmp_path / "b.idx")).tolist() == [0, 8, 0]


def test_files_that_hold_no_lengths(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("5 six 7")
    np.save(tmp_path / "b.npy", np.array([1.5, 2.0]))
    np.save(tmp_path / "c.npy", np.ones((2, 2), dtype=int))
    np.savez(tmp_path / "d.npz", one=[1], two=[2])
    (tmp_path / "e.idx").write_bytes(b"not an index, but long enough to be one by size")
    write_index(tmp_path / "f.idx", [5, 3, 4], [0, 3])
    (tmp_path / "f.idx").write_bytes((tmp_path / "f.idx").read_bytes()[:-1])
    (tmp_path / "g.npy").write_bytes(b"")
    (tmp_path / "h.npz").write_bytes(b"PK\x03\x04 cut short")
    messages = {
        "a.txt": "something other than lengths: .*'six'",
        "b.npy": "not all of them are whole numbers",
        "c.npy": "one row of numbers needed",
        "d.npz": "arrays one, two, none called lengths",
        "e.idx": "not the index of a Megatron IndexedDataset",
        "f.idx": "cut short: 85 bytes, 86 expected",
        "g.npy": "not an array of lengths",
        "h.npz": "not an array of lengths",
        "gone.txt": "cannot read .*gone.txt: No such file",
        "wrong.csv": "neither a length table .*, nor a list of lengths, nor a file that ends in",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            load_lengths(str(tmp_path / name))
