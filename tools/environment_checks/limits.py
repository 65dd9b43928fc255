"""What the system allows one process: cores, memory, open files, places to write. Linux; elsewhere much is unknown."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from environment_checks.facts import GIB, Disk, Limits

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/dev/infiniband")


def read_limits() -> Limits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cgroup_cores=cgroup_cores(CGROUP),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        cgroup_memory_gib=cgroup_memory_gib(CGROUP),
        shm_gib=shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else None,
        open_files=finite(soft),
        most_open_files=finite(hard),
        locked_bytes=finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        core_dump_bytes=finite(resource.getrlimit(resource.RLIMIT_CORE)[0]),
        has_infiniband=INFINIBAND.is_dir(),
    )


def finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_cores(root: Path) -> float | None:
    """What a container may use of all cores together, in version 2 or 1 of cgroups; None: all."""
    quota = words_of(root / "cpu.max")
    if len(quota) != 2:
        quota = words_of(root / "cpu" / "cpu.cfs_quota_us") + words_of(root / "cpu" / "cpu.cfs_period_us")
    if len(quota) != 2 or quota[0] in ("max", "-1"):
        return None
    return int(quota[0]) / int(quota[1])


def cgroup_memory_gib(root: Path) -> float | None:
    """Likewise, of memory. Version 1 writes a number beyond any machine for no limit."""
    words = words_of(root / "memory.max") or words_of(root / "memory" / "memory.limit_in_bytes")
    if not words or words[0] == "max" or int(words[0]) >= 2**60:
        return None
    return int(words[0]) / GIB


def words_of(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split() if path.is_file() else []


def read_disk(flag: str, path: Path) -> Disk:
    """The file system that a folder lies on, or will lie on: its nearest parent that exists."""
    folder = path.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return Disk(
        flag=flag,
        path=str(path.absolute()),
        free_gib=usage.free / GIB,
        total_gib=usage.total / GIB,
        kind=kind_of_file_system(folder, PROC / "mounts"),
        writable=os.access(folder, os.W_OK | os.X_OK),
    )


def kind_of_file_system(folder: Path, mounts: Path) -> str:
    """ext4, nfs4, lustre, overlay, tmpfs, ...: that of the longest mount point which the folder lies under."""
    best, kind = "", "unknown"
    lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.is_file() else []
    for line in lines:
        _, point, this = line.split()[:3]
        point = point.replace("\\040", " ")
        under = str(folder) == point or str(folder).startswith(point.rstrip("/") + "/")
        if under and len(point) >= len(best):
            best, kind = point, this
    return kind
