"""Rules about the system round the process: memory, cores, files, disks and environment variables."""

from __future__ import annotations

from environment_checks.facts import OK, PROBLEM, WARNING, Disk, Facts, Finding
from environment_checks.known_bad import VARIABLES

LEAST_SHM_GIB = 1.0
LEAST_OPEN_FILES = 4096
LEAST_FREE_GIB = 16.0  # four checkpoints of the 250M model (3.2 GiB each), of which a run keeps three, and some room
LEAST_MEMORY_GIB = 8.0


def limit_findings(facts: Facts) -> list[Finding]:
    return _core_findings(facts) + _memory_findings(facts) + _shm_findings(facts) + _file_findings(facts)


def _core_findings(facts: Facts) -> list[Finding]:
    limits = facts.limits
    usable = limits.cores if limits.cgroup_cores is None else limits.cgroup_cores
    if usable < limits.cores:
        return [
            Finding(
                WARNING,
                f"{limits.cores} core(s)",
                f"of which a cgroup lets this process use {usable:g}; libraries start a thread for each and wait",
                f"set OMP_NUM_THREADS to at most {max(1, int(usable))} / ranks, or give the container more cores",
            )
        ]
    return [Finding(OK, f"{limits.cores} core(s)", facts.platform)]


def _memory_findings(facts: Facts) -> list[Finding]:
    limits = facts.limits
    usable, limited = limits.memory_gib, ""
    if limits.cgroup_memory_gib is not None and limits.cgroup_memory_gib < usable:
        usable, limited = limits.cgroup_memory_gib, f", by a cgroup of {limits.memory_gib:.0f} GiB"
    words = f"{usable:.1f} GiB{limited}"
    if usable < LEAST_MEMORY_GIB:
        return [
            Finding(
                WARNING,
                "memory",
                f"{words}; the 250M model, its gradients and Adam's moments alone take 4 GiB in float32",
                "use a larger machine, or raise the limit of the container or of the Slurm job",
            )
        ]
    return [Finding(OK, "memory", words)]


def _shm_findings(facts: Facts) -> list[Finding]:
    size = facts.limits.shm_gib
    if size is None or size < LEAST_SHM_GIB:
        have = "is missing" if size is None else f"has {size * 1024:.0f} MiB"
        return [
            Finding(
                WARNING,
                "/dev/shm",
                f"{have}; ranks of one node talk through it (NCCL), and so do the loader workers of the evaluations",
                "start the container with --ipc=host or --shm-size=16g",
            )
        ]
    return [Finding(OK, "/dev/shm", f"{size:.1f} GiB")]


def _file_findings(facts: Facts) -> list[Finding]:
    limits, found = facts.limits, []
    soft = limits.open_files
    if soft is not None and soft < LEAST_OPEN_FILES:
        hard = limits.most_open_files
        can = hard is None or hard >= LEAST_OPEN_FILES
        remedy = (
            f"ulimit -n {LEAST_OPEN_FILES if hard is None else min(hard, 65536)}" if can else "raise the hard limit"
        )
        found.append(
            Finding(
                WARNING,
                "open files",
                f"at most {soft:,} (ulimit -n); a corpus of many volumes and many workers need more",
                remedy if can else f"{remedy}, {hard:,} now (limits.conf, or the container's --ulimit nofile)",
            )
        )
    else:
        found.append(Finding(OK, "open files", "unlimited" if soft is None else f"{soft:,}"))
    if limits.has_infiniband and limits.locked_bytes is not None:
        found.append(
            Finding(
                WARNING,
                "locked memory",
                f"at most {limits.locked_bytes // 1024:,} KiB (ulimit -l); InfiniBand registers much more",
                "ulimit -l unlimited, or the container's --ulimit memlock=-1",
            )
        )
    return found


def disk_findings(facts: Facts) -> list[Finding]:
    return [_judge_disk(disk) for disk in facts.disks]


def _judge_disk(disk: Disk) -> Finding:
    subject = f"disk of {disk.flag}"
    words = f"{disk.free_gib:.1f} of {disk.total_gib:.0f} GiB free ({disk.kind}) at {disk.path}"
    is_save = disk.flag == "--save"
    if disk.obstacle:
        return Finding(PROBLEM, subject, f"{disk.obstacle} is no folder", "name a folder, or a place for a new one")
    if not disk.writable:
        status = PROBLEM if is_save else WARNING
        return Finding(status, subject, f"{disk.path} cannot be written to", "name a folder that you may write to")
    if is_save and disk.free_gib < LEAST_FREE_GIB:
        return Finding(
            WARNING,
            subject,
            f"{words}; three checkpoints of the 250M model and one more being written take {LEAST_FREE_GIB:.0f} GiB",
            "free some, or lower --keep-last; --dry-run compares with the checkpoints of your own settings",
        )
    if is_save and disk.kind in ("tmpfs", "ramfs", "overlay"):
        return Finding(
            WARNING,
            subject,
            f"{words}: a {disk.kind} is gone with the machine or the container",
            "name a folder on a disk that stays, mounted into the container",
        )
    return Finding(OK, subject, words)


def variable_findings(facts: Facts) -> list[Finding]:
    """Those of the table that are set to something harmful, alone or together."""
    found = []
    for line in VARIABLES:
        value = facts.variables.get(line.name)
        if value is not None and line.is_harmful(value):
            found.append(Finding(line.status, f"{line.name}={value}", line.cost, line.remedy))
    fused = facts.variables.get("NVTE_FUSED_ATTN"), facts.variables.get("NVTE_FLASH_ATTN")
    if fused == ("0", "0"):
        found.append(
            Finding(
                WARNING,
                "NVTE_FLASH_ATTN=0",
                "together with NVTE_FUSED_ATTN=0 leaves the attention that writes out all scores",
                "unset both",
            )
        )
    return found
