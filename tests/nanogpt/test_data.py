"""Texts that are not there or not what they should be, tokenisers, windows."""

import hashlib

import pytest
import torch

from examples.nanogpt import data
from examples.nanogpt.data import DataError, Tokeniser, load_text, make_corpus, offsets, windows


def test_text_that_does_not_serve(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"caf\xe9 \xff")
    for path, words in (
        (tmp_path / "none.txt", "no file .*none.txt: give a text with --data PATH"),
        (empty, "empty.txt is empty"),
        (binary, "binary.txt as UTF-8 text"),
        (tmp_path, "cannot read"),
    ):
        with pytest.raises(DataError, match=words):
            load_text(path)
    with pytest.raises(DataError, match="100 tokens is too short: a tenth .* context, 9, by two"):
        make_corpus("ab" * 50, 9, by_byte=False, device="cpu")
    assert len(make_corpus("ab" * 50, 8, by_byte=False, device="cpu").validation) == 10


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The file that the download reads, and the cache folder it goes to."""
    source, cache = tmp_path / "served.txt", tmp_path / "cache"
    monkeypatch.setattr(data, "SHAKESPEARE", source.as_uri())
    monkeypatch.setattr(data, "_cache_folder", lambda: cache)
    return source, cache / "tinyshakespeare.txt"


def test_download_with_a_wrong_checksum_is_not_kept(served, monkeypatch):
    source, kept = served
    with pytest.raises(DataError, match=r"cannot download file:.*give a text with --data PATH"):
        load_text(None)
    source.write_text("First Citizen: not the play")
    with pytest.raises(DataError, match="27 bytes with sha256 .*, not 86c4e6aa"):
        load_text(None)
    assert not kept.exists()


def test_download_is_kept_and_checked_again(served, monkeypatch):
    source, kept = served
    source.write_text("a play")
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(b"a play").hexdigest())
    said = []
    assert load_text(None, said.append) == "a play" and len(said) == 1
    source.unlink()
    assert load_text(None, said.append) == "a play" and len(said) == 1  # from the cache
    kept.write_text("a pl")  # cut: downloaded anew
    source.write_text("a play")
    assert load_text(None, said.append) == "a play" and len(said) == 2


def test_tokenisers():
    letters = Tokeniser("abc")
    assert letters.tokens == 3 and letters.decode(letters.encode("cab")) == "cab"
    with pytest.raises(DataError, match=r"characters that the corpus does not have: \['x', 'y'\]"):
        letters.encode("yaxx")
    in_bytes = Tokeniser("")
    assert in_bytes.tokens == 256 and in_bytes.encode("é") == [0xC3, 0xA9]
    assert in_bytes.decode([0xC3, 0xA9, 0xC3]) == "é�"


def test_windows(device):
    tokens = torch.arange(100, dtype=torch.int32, device=device)
    first = torch.tensor([0, 37, 63], device=device)
    ids, targets = (torch.zeros(3, 36, dtype=torch.int32, device=device) for _ in range(2))
    windows(tokens, first, ids, targets)
    expected = first[:, None] + torch.arange(36, device=device)
    assert torch.equal(ids, expected.int()) and torch.equal(targets, expected.int() + 1)


def test_offsets_depend_on_seed_and_step_alone():
    once = offsets(1000, 100, 64, seed=1, step=7)
    torch.rand(3)
    assert torch.equal(once, offsets(1000, 100, 64, seed=1, step=7))
    assert not torch.equal(once, offsets(1000, 100, 64, seed=1, step=8))
    assert not torch.equal(once, offsets(1000, 100, 64, seed=2, step=7))
    assert once.min() >= 0 and once.max() < 900  # the last target is token 999
