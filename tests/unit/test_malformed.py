"""Malformed length files, profiles and flags: one clear line each, never a traceback."""

import copy
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_nsp.cli import main
from megatron_nsp.cost.profile import load_profile

NUM_EACH = 500
"""Cases of each of the four kinds below."""

PLAN = "plan --ranks 4 --heads 4 --kv-heads 2 --layers 1 --hidden 8 --head-dim 4"


def run(words: list[str]) -> tuple[object, bool]:
    """The status, and whether argparse ended the command."""
    try:
        return main(words), False
    except SystemExit as stop:
        return stop.code, True


def check(capsys: pytest.CaptureFixture[str], words: list[str]) -> bool:
    """Runs the command; whether it was refused. A refusal is status 2 and says why in the end."""
    status, by_argparse = run(words)
    printed = capsys.readouterr()
    if by_argparse:  # it prints its usage first
        assert status == 2 and "error: " in printed.err.splitlines()[-1], words
        return True
    assert status in (0, 2), words
    if status == 0:
        assert printed.out and not printed.err, words
        return False
    (line,) = printed.err.splitlines()
    assert line.startswith(f"megatron-nsp {words[0]}: error: ") and len(line) > 40, line
    assert printed.out == ""
    return True


def index_file(rng: random.Random) -> bytes:
    """A Megatron index of a few documents."""
    lengths = [rng.randint(0, 50) for _ in range(rng.randint(0, 5))]
    pointers = np.cumsum([0, *lengths])[:-1] if lengths else np.zeros(0)
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 1, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content with a few bytes changed, cut off or added."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(3)
        if kind == 0 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:
            del data[rng.randint(0, len(data)) :]
        else:
            place = rng.randint(0, len(data))
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    return bytes(data)


def test_damaged_length_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, refused = random.Random(1), 0
    array = tmp_path / "whole.npy"
    np.save(array, np.array([40, 7, 3000]))
    archive = tmp_path / "whole.npz"
    np.savez(archive, lengths=np.array([40, 7, 3000]))
    for number in range(NUM_EACH):
        kind = ("txt", "idx", "npy", "npz")[number % 4]
        whole = {
            "txt": b"40 7\n3000,12",
            "idx": index_file(rng),
            "npy": array.read_bytes(),
            "npz": archive.read_bytes(),
        }[kind]
        path = tmp_path / f"case.{kind}"
        path.write_bytes(damaged(rng, whole))
        refused += check(capsys, [*PLAN.split(), "--lengths", str(path)])
    assert refused > NUM_EACH // 3


ODD_VALUES = (None, True, -1, 0, 1e400, float("nan"), "x", [], {}, [1], {"1": 2}, {"x": {}}, 10**30)


def test_odd_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, refused = random.Random(1), 0
    names = ("h100-ib", "cpu-gloo", "flexsp-gpt-7b-a100")
    wholes = [load_profile(name).to_dict() for name in names]
    for _ in range(NUM_EACH):
        data = json.loads(json.dumps(rng.choice(wholes)))
        for _ in range(rng.randint(1, 3)):
            place = data
            while True:
                key = rng.choice(list(place))
                if not (isinstance(place[key], dict) and place[key]) or rng.random() < 0.4:
                    break
                place = place[key]
            if rng.random() < 0.2:
                del place[key]
                if not place:
                    break
            else:
                place[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(data))
        words = [*PLAN.split(), "--lengths", "90,5,5", "--profile", str(path)]
        refused += check(capsys, words)
    assert refused > NUM_EACH // 2


def test_profiles_that_are_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng, refused = random.Random(1), 0
    whole = json.dumps(load_profile("h100-ib").to_dict()).encode()
    for _ in range(NUM_EACH):
        path = tmp_path / "profile.json"
        path.write_bytes(damaged(rng, whole))
        refused += check(capsys, [*PLAN.split(), "--lengths", "90,5,5", "--profile", str(path)])
    assert refused > NUM_EACH // 2


FLAGS = {
    command: [f"--{name}" for name in names.split()]
    for command, names in (
        ("plan", "lengths ranks max-degree degrees batch-tokens max-len token-budget heads"),
        ("plan more", "kv-heads head-dim hidden layers profile seed model tp pp ep memory-gb"),
        ("simulate", "batches policies micro-batches save-gb max-len ranks recompute"),
        ("verify", "ranks degrees lengths nodes heads kv-heads seed head-dim timeout dtype"),
    )
}
FLAGS["plan"] += FLAGS.pop("plan more")
WORDS = ("", "0", "-1", "nan", "inf", "1e3", "x", "1,2", "1,,2", "4:0", "2", "3", "999999999999")
WORDS += ("9" * 25, "1K", "-1K", "0.5", "None", "full", "wikipedia", "qwen3-8b", "h100-ib", "☃")
NEEDED = {
    "plan": "--lengths 90,5,5 --ranks 4",
    "simulate": "--lengths 90,5,5 --ranks 4 --batches 1 --policies two-level",
    "verify": "--ranks 2 --lengths 5 --nodes 2:0 --heads 3",
}


def test_odd_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rng, refused = random.Random(1), 0
    from megatron_nsp.testing import verify

    def run_none(*_: object, **__: object) -> None:
        raise ValueError("this case would start ranks, which takes long")

    monkeypatch.setattr(verify, "check_cases", run_none)
    for _ in range(NUM_EACH):
        command = rng.choice(list(FLAGS))
        words = [command, *NEEDED[command].split()]
        for flag in rng.sample(FLAGS[command], rng.randint(1, 3)):
            words += [f"{flag}={rng.choice(WORDS)}"]
        refused += check(capsys, words)
    assert refused > NUM_EACH // 2
