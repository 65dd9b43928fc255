"""What was found on the machine, and what is said about it. No judgement here: that is for the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

OK, WARNING, PROBLEM = "ok", "warning", "problem"
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    used_gib: float  # by whoever: other processes, too


@dataclass(frozen=True)
class Torch:
    """What a child process that imported torch found; `error` where it could not."""

    error: str = ""
    version: str = ""
    location: str = ""
    cuda: str = ""  # that it was built with; empty in a build for the CPU
    hip: str = ""
    cudnn: str = ""
    nccl: str = ""
    architectures: tuple[str, ...] = ()  # that its kernels were compiled for: sm_90, compute_90
    gpus: tuple[Gpu, ...] = ()
    no_gpu_because: str = ""
    has_gloo: bool = True
    has_packed_scale: bool = True  # its packed attention takes a scale


@dataclass(frozen=True)
class Precision:
    """Whether training would start with a precision here, by the check that training itself makes."""

    name: str
    possible: bool
    words: str  # the kernels, or why not


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    version: str = ""
    gpus: tuple[str, ...] = ()
    links: str = ""  # between the first GPU and the others: NV18, PIX, SYS, ...
    error: str = "nvidia-smi is not on the PATH"


@dataclass(frozen=True)
class Disk:
    """A place that will be written to."""

    flag: str  # how the user named it
    path: str
    free_gib: float
    total_gib: float
    kind: str  # of file system
    writable: bool
    obstacle: str = ""  # what lies where a folder is wanted, and is none


@dataclass(frozen=True)
class Limits:
    """What one process may use; None: no limit, or not known here."""

    cores: int = 1  # that this process may run on
    cgroup_cores: float | None = None
    memory_gib: float = 0.0
    cgroup_memory_gib: float | None = None
    shm_gib: float | None = None  # size of /dev/shm; None: there is none
    open_files: int | None = None
    most_open_files: int | None = None  # up to which one may raise it oneself
    locked_bytes: int | None = None
    has_infiniband: bool = False


@dataclass(frozen=True)
class Requirement:
    """One line of setup.py."""

    package: str
    versions: str  # ">=2.11,<3"
    least_python: str = ""  # from its marker
    extra: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that the rules look at."""

    python: str
    executable: str = ""
    platform: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # installed ones: name -> version
    import_errors: dict[str, str] = field(default_factory=dict)  # package -> what its import ended with
    project: str = ""  # where megatron_neobert is imported from; empty where it is not
    repository: str = ""  # where this command lies
    shadowed: dict[str, str] = field(default_factory=dict)  # module -> where a copy lies that comes first
    foreign_apex: bool = False
    torch: Torch = Torch()
    precisions: tuple[Precision, ...] = ()
    driver: Driver = Driver()
    disks: tuple[Disk, ...] = ()
    limits: Limits = Limits()
    variables: dict[str, str] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: str
    subject: str
    words: str
    remedy: str = ""
