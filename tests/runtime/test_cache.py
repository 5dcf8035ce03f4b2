"""The disk cache: whatever happens to its files, the worst is a recompile."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from minitriton.runtime import cache

KEY = "kernel add\nx:*fp32:16"
ENTRY = cache.Entry(
    {"registers": 10, "seconds": {"build": 0.5}}, {"ptx": b"a" * 500, "cubin": b"b"}
)


@pytest.fixture
def store(tmp_path: Path) -> cache.DiskCache:
    made = cache.DiskCache(tmp_path / "store")
    assert made.put(KEY, ENTRY)
    return made


def only_file(store: cache.DiskCache) -> Path:
    (path,) = store.entries()
    return path


def test_round_trip(store: cache.DiskCache) -> None:
    assert store.get(KEY) == ENTRY
    assert store.get(KEY + "x") is None
    assert (store.statistics.hits, store.statistics.misses) == (1, 1)
    path = only_file(store)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list((store.root / "tmp").iterdir()) == []


def test_every_bit_flip_is_a_miss(store: cache.DiskCache) -> None:
    data = only_file(store).read_bytes()
    assert cache.decode(data, KEY) == ENTRY
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << random.Random(at).randrange(8)
        assert cache.decode(bytes(broken), KEY) is None, at


def test_every_truncation_and_extension_is_a_miss(store: cache.DiskCache) -> None:
    data = only_file(store).read_bytes()
    for size in range(len(data)):
        assert cache.decode(data[:size], KEY) is None, size
    assert cache.decode(data + b"\0", KEY) is None


def test_wrong_key_and_format(store: cache.DiskCache) -> None:
    data = only_file(store).read_bytes()
    assert cache.decode(data, "another key") is None
    other = struct.pack("<I", cache.FORMAT + 1)
    assert cache.decode(data[:8] + other + data[12:], KEY) is None


def test_swapped_entry_is_a_miss_and_removed(store: cache.DiskCache) -> None:
    store.put("other", cache.Entry({}, {"ptx": b"other"}))
    mine, others = store.path(KEY), store.path("other")
    mine.write_bytes(others.read_bytes())
    assert store.get(KEY) is None
    assert store.statistics.rejected == 1
    assert not mine.exists()
    assert store.get("other") is not None


@pytest.mark.parametrize("fault", ["file", "dangling", "zero", "directory", "fifo", "unreadable"])
def test_odd_files(store: cache.DiskCache, tmp_path: Path, fault: str) -> None:
    path = only_file(store)
    outside = tmp_path / "outside.mtc"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    match fault:
        case "file":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "zero":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "unreadable":
            path.write_bytes(b"")
            path.chmod(0)
    assert store.get(KEY) is None
    assert outside.exists()
    assert store.put(KEY, ENTRY) == (fault != "directory")
    assert (store.get(KEY) == ENTRY) == (fault != "directory")


def test_foreign_owner_is_a_miss(store: cache.DiskCache) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(only_file(store), 12345, 12345)
    assert store.get(KEY) is None
    store.put(KEY, ENTRY)
    os.chown(only_file(store), 12345, 12345)
    assert cache.DiskCache(store.root, shared=True).get(KEY) == ENTRY


def test_folder_deleted_while_in_use(store: cache.DiskCache) -> None:
    import shutil

    shutil.rmtree(store.root)
    assert store.get(KEY) is None
    assert store.put(KEY, ENTRY)
    assert store.get(KEY) == ENTRY


def test_disk_that_refuses(store: cache.DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not store.put("new", ENTRY)
    assert store.statistics.failures == 1
    assert list((store.root / "tmp").iterdir()) == []
    assert store.get("new") is None


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = cache.open_cache(str(tmp_path / "file"), shared=False, limit_bytes=1 << 20)
    assert made.root is None
    assert not made.put(KEY, ENTRY)
    assert made.get(KEY) is None


def test_places(tmp_path: Path) -> None:
    xdg = {"XDG_CACHE_HOME": str(tmp_path / "xdg"), "HOME": str(tmp_path)}
    opened = cache.open_cache("", shared=True, limit_bytes=1, environ=xdg)
    assert opened.root == tmp_path / "xdg" / "minitriton"
    home = {"HOME": str(tmp_path)}
    opened = cache.open_cache("", shared=True, limit_bytes=1, environ=home)
    assert opened.root == tmp_path / ".cache" / "minitriton"
    assert cache.open_cache("", shared=True, limit_bytes=1, environ={}).root is None


def test_folder_open_to_others_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write"):
        assert cache.open_cache(str(folder), shared=False, limit_bytes=1).root is None
    assert cache.open_cache(str(folder), shared=True, limit_bytes=1).root == folder


def test_eviction_drops_the_oldest(tmp_path: Path) -> None:
    store = cache.DiskCache(tmp_path, limit_bytes=3000)
    for index in range(10):
        store.put(f"k{index}", cache.Entry({}, {"ptx": bytes(700)}))
        os.utime(store.path(f"k{index}"), (index, index))
    store.evict()
    left = [index for index in range(10) if store.get(f"k{index}")]
    assert left == [7, 8, 9]


def test_verify_and_clear(store: cache.DiskCache) -> None:
    store.put("other", ENTRY)
    store.path("other").write_bytes(b"rubbish")
    good, bad = store.verify()
    assert (good, bad) == (1, [store.path("other")])
    assert store.clear() == 2
    assert list(store.entries()) == []


def _hammer(root: str, seed: int, failures: object) -> None:
    store, rng = cache.DiskCache(Path(root), limit_bytes=20_000), random.Random(seed)
    for _ in range(150):
        which = rng.randrange(8)
        entry = cache.Entry({"which": which}, {"ptx": bytes([which]) * (500 + 400 * which)})
        if rng.random() < 0.5:
            store.put(str(which), entry)
        else:
            found = store.get(str(which))
            if found is not None and found != entry:
                failures.put((which, found.meta))
        if rng.random() < 0.05:
            store.evict()
    if store.statistics.rejected:
        failures.put(("rejected", store.statistics.rejected))


def test_many_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    workers = [
        context.Process(target=_hammer, args=(str(tmp_path), seed, failures)) for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert failures.empty()
    assert cache.DiskCache(tmp_path).verify()[1] == []


def test_killed_writers_leave_a_valid_store(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from minitriton.runtime import cache\n"
        "s = cache.DiskCache(pathlib.Path(sys.argv[1])); print('go', flush=True)\n"
        "while True: s.put('k', cache.Entry({}, {'ptx': bytes(200_000)}))"
    )
    for delay in (0.01, 0.05):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert child.stdout.readline() == b"go\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(delay)
        child.kill()
        child.wait()
        child.stdout.close()
    store = cache.DiskCache(tmp_path)
    assert store.verify()[1] == []
    store.clear()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_payload_is_json_and_bytes(store: cache.DiskCache) -> None:
    payload = only_file(store).read_bytes()[cache._HEADER.size :]
    (size,) = struct.unpack_from("<Q", payload)
    head = json.loads(payload[8 : 8 + size])
    assert head["key"] == KEY
    assert head["blobs"] == [["cubin", 1], ["ptx", 500]]
