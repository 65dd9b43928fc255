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
        cgroup_cores=cgroup_cores(CGROUP, PROC / "self" / "cgroup"),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        cgroup_memory_gib=cgroup_memory_gib(CGROUP, PROC / "self" / "cgroup"),
        shm_gib=shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else None,
        open_files=finite(soft),
        most_open_files=finite(hard),
        locked_bytes=finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_infiniband=INFINIBAND.is_dir(),
    )


def finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def cgroup_cores(root: Path, own: Path) -> float | None:
    """What this process may use of all cores together, in version 2 or 1 of cgroups; None: all."""
    quotas = [words_of(folder / "cpu.max") for folder in cgroup_folders(root, own, "")]
    for folder in cgroup_folders(root, own, "cpu"):
        quotas.append(words_of(folder / "cpu.cfs_quota_us") + words_of(folder / "cpu.cfs_period_us"))
    limits = [int(quota[0]) / int(quota[1]) for quota in quotas if len(quota) == 2 and quota[0] not in ("max", "-1")]
    return min(limits, default=None)


def cgroup_memory_gib(root: Path, own: Path) -> float | None:
    """Likewise, of memory. Version 1 writes a number beyond any machine for no limit."""
    written = [words_of(folder / "memory.max") for folder in cgroup_folders(root, own, "")]
    written += [words_of(folder / "memory.limit_in_bytes") for folder in cgroup_folders(root, own, "memory")]
    limits = [int(words[0]) for words in written if words and words[0] != "max" and int(words[0]) < 2**60]
    return min(limits) / GIB if limits else None


def cgroup_folders(root: Path, own: Path, controller: str) -> list[Path]:
    """The root, and below it this process's cgroup and those that hold it: each may set a limit, the least counts.

    Args:
        root: Where cgroups are mounted.
        own: /proc/self/cgroup. A Slurm job is named there; a container is its own root, and its name is "/" or leads
            to no folder.
        controller: Of version 1, or "" for version 2, which has one tree.
    """
    folders = [root / controller]
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            for part in Path(path).parts[1:]:
                folders.append(folders[-1] / part)
    return folders


def words_of(path: Path) -> list[str]:
    return path.read_text(encoding="ascii").split() if path.is_file() else []


def read_disk(flag: str, path: Path) -> Disk:
    """The file system that a folder lies on, or will lie on: its nearest parent that exists."""
    nearest = path.absolute()
    while not os.path.lexists(nearest):  # which a link to nothing does, and no folder can be made there
        nearest = nearest.parent
    folder = nearest if nearest.is_dir() else nearest.parent
    usage = shutil.disk_usage(folder)
    return Disk(
        flag=flag,
        path=str(path.absolute()),
        free_gib=usage.free / GIB,
        total_gib=usage.total / GIB,
        kind=kind_of_file_system(folder, PROC / "mounts"),
        writable=os.access(folder, os.W_OK | os.X_OK),
        obstacle="" if folder == nearest else str(nearest),
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
