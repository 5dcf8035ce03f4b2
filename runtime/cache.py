"""Compiled kernels on disk: one verified file per entry, so nothing worse than a recompile happens.

An entry repeats its key and carries a digest, so bit flips, truncation, swapped files and old
formats are all misses. It is published by rename from the same tree and never read back by its
writer. No path, link or code from an entry is followed; the payload is JSON and raw bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"MTCACHE\n"
FORMAT = 1
SUFFIX = ".mtc"
_HEADER = struct.Struct("<8sI32sQ32s")  # magic, format, key digest, payload bytes, payload digest
_MAX_PAYLOAD = 256 << 20
_STALE_SECONDS = 3600  # unfinished writes older than this are swept
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_EVICT_EVERY = 64  # writes of one process between looks at the total size


@dataclass(frozen=True, slots=True)
class Entry:
    """What is kept of one compiled kernel: metadata, and named blobs such as "ptx", "cubin"."""

    meta: dict[str, Any]
    blobs: dict[str, bytes]


@dataclass
class Statistics:
    """What a process's use of the cache came to."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    rejected: int = 0  # entries that existed but did not verify
    failures: int = 0  # writes that the disk refused


def digest(key: str) -> str:
    """The name of the entry for a key text."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class DiskCache:
    """Entries below `root`; `root` None keeps nothing. Safe for many threads and processes."""

    root: Path | None
    shared: bool = False  # accept files owned by others
    limit_bytes: int = 1 << 30
    statistics: Statistics = field(default_factory=Statistics)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def path(self, key: str) -> Path | None:
        """Where the entry of `key` is or would be."""
        name = digest(key)
        return None if self.root is None else self.root / "objects" / name[:2] / (name + SUFFIX)

    def get(self, key: str) -> Entry | None:
        """The verified entry for `key`, or None; a broken one is removed. Never raises OSError."""
        path = self.path(key)
        if path is None:
            return None
        try:
            data = _read_file(path, self.shared)
        except FileNotFoundError:
            self.statistics.misses += 1
            return None
        except (OSError, ValueError):
            data = b""
        entry = decode(data, key)
        if entry is None:
            self.statistics.rejected += 1
            _remove(path)
            return None
        self.statistics.hits += 1
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)  # the age that eviction goes by
        return entry

    def put(self, key: str, entry: Entry) -> bool:
        """Publish an entry; False (and no error) if the disk does not let us."""
        path = self.path(key)
        if path is None or self.root is None:
            return False
        data = encode(key, entry)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _publish(data, path, self.root / "tmp")
        except OSError:
            self.statistics.failures += 1
            return False
        with self._lock:
            self.statistics.writes += 1
            look = self.statistics.writes % _EVICT_EVERY == 1
        if look:
            self.evict()
        return True

    def evict(self) -> int:
        """Drop the entries used longest ago until the rest fits the limit; how many went."""
        if self.root is None:
            return 0
        _sweep(self.root / "tmp")
        files = []
        for path in self.entries():
            with contextlib.suppress(OSError):
                info = path.lstat()
                files.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in files)
        dropped = 0
        for _, size, path in sorted(files):
            if total <= self.limit_bytes:
                break
            dropped += _remove(path)
            total -= size
        return dropped

    def entries(self) -> Iterator[Path]:
        """Every entry file."""
        if self.root is not None:
            with contextlib.suppress(OSError):
                yield from sorted((self.root / "objects").glob(f"??/*{SUFFIX}"))

    def verify(self) -> tuple[int, list[Path]]:
        """Check every entry: how many are good, and the bad ones (which are left in place)."""
        good, bad = 0, []
        for path in self.entries():
            try:
                valid = _is_valid(_read_file(path, self.shared), path.name.removesuffix(SUFFIX))
            except (OSError, ValueError):
                valid = False
            if valid:
                good += 1
            else:
                bad.append(path)
        return good, bad

    def clear(self) -> int:
        """Remove every entry; how many there were."""
        count = sum(_remove(path) for path in self.entries())
        if self.root is not None:
            _sweep(self.root / "tmp", age=0.0)
        return count


def encode(key: str, entry: Entry) -> bytes:
    """The bytes of an entry's file."""
    names = sorted(entry.blobs)
    head = {"key": key, "meta": entry.meta, "blobs": [[n, len(entry.blobs[n])] for n in names]}
    text = json.dumps(head, sort_keys=True).encode()
    payload = struct.pack("<Q", len(text)) + text + b"".join(entry.blobs[n] for n in names)
    name = bytes.fromhex(digest(key))
    return _HEADER.pack(MAGIC, FORMAT, name, len(payload), _seal(name, payload)) + payload


def decode(data: bytes, key: str) -> Entry | None:
    """The entry in a file's bytes if they are whole, of this format, and for `key`; else None."""
    if not _is_valid(data, digest(key)):
        return None
    payload = data[_HEADER.size :]
    try:
        (size,) = struct.unpack_from("<Q", payload)
        head = json.loads(payload[8 : 8 + size])
        offset, blobs = 8 + size, {}
        for name, length in head["blobs"]:
            blobs[name] = payload[offset : offset + length]
            offset += length
        meta = head["meta"]
        whole = offset == len(payload) and head["key"] == key and isinstance(meta, dict)
    except (ValueError, KeyError, TypeError, struct.error):
        return None
    return Entry(meta, blobs) if whole else None


def _is_valid(data: bytes, name: str) -> bool:
    if len(data) < _HEADER.size:
        return False
    magic, version, stored, size, seal = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != MAGIC or version != FORMAT or stored.hex() != name or size != len(payload):
        return False
    return bool(seal == _seal(stored, payload))


def _seal(name: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(MAGIC + struct.pack("<I", FORMAT) + name + payload).digest()


def _read_file(path: Path, shared: bool) -> bytes:
    """The bytes of a regular file of ours, read once; ValueError or OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0))
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("not a regular file")
        if not shared and hasattr(os, "getuid") and info.st_uid != os.getuid():
            raise ValueError("owned by another user")
        if info.st_size > _HEADER.size + _MAX_PAYLOAD:
            raise ValueError("too large")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(info.st_size + 1)
    finally:
        os.close(descriptor)


def _publish(data: bytes, path: Path, scratch: Path) -> None:
    """Write to a new file in `scratch`, then rename it onto `path`."""
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=scratch, suffix=".part")  # O_EXCL, O_NOFOLLOW, 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _remove(path: Path) -> int:
    try:
        path.unlink()
    except OSError:
        return 0
    return 1


def _sweep(scratch: Path, age: float = _STALE_SECONDS) -> None:
    """Remove what writers that were killed left behind."""
    with contextlib.suppress(OSError):
        newest = max((p.lstat().st_mtime for p in scratch.iterdir()), default=0.0)
        for path in scratch.iterdir():
            if path.lstat().st_mtime <= newest - age:
                _remove(path)


def open_cache(
    directory: str, *, shared: bool, limit_bytes: int, environ: Mapping[str, str] | None = None
) -> DiskCache:
    """The cache in `directory`, or where the platform keeps caches if that is "".

    A folder that others could write to is not used, with a warning, unless `shared`; without any
    usable folder the cache keeps nothing.
    """
    root = Path(directory).expanduser() if directory else _default_root(environ)
    try:
        if root is None:
            raise OSError("no home directory")
        root = root.absolute()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = "" if shared else _unsafe(root)
    except (OSError, RuntimeError):
        return DiskCache(None)
    if problem:
        warnings.warn(
            f"the kernel cache {root} is not used: {problem}; MINITRITON_CACHE_DIR names another "
            "folder, MINITRITON_CACHE_SHARED=1 accepts this one",
            stacklevel=2,
        )
        return DiskCache(None)
    return DiskCache(root, shared, limit_bytes)


def _default_root(environ: Mapping[str, str] | None) -> Path | None:
    env = os.environ if environ is None else environ
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "minitriton"
    if env.get("HOME"):
        return Path(env["HOME"]) / ".cache" / "minitriton"
    return None


def _unsafe(root: Path) -> str:
    """Why others could put files into `root`, or ""."""
    if not hasattr(os, "getuid"):
        return ""
    for folder in (root, *root.parents):
        info = folder.stat()
        if info.st_uid not in (os.getuid(), 0):
            return f"{folder} belongs to another user"
        writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writable and (folder == root or not info.st_mode & stat.S_ISVTX):
            return f"others may write to {folder}"
    return ""
