"""Fixtures that several files of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_maker import write_documents
from tests.mcore.help_texts import read_help_texts_once


@pytest.fixture(scope="module")
def help_texts() -> Iterator[None]:
    """For files in which every test makes two parsers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        read_help_texts_once(monkeypatch)
        yield


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with lengths up to 512, in a folder of its own."""
    path = tmp_path_factory.mktemp("flags") / "docs"
    write_documents(path, [512, 5, 7], seed=0)
    return path
