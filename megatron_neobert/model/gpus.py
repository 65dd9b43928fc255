"""Peak rates and memory of known GPUs, for model FLOPs utilization (MFU) and memory plans. Does not import torch.

Rates are dense BF16 tensor-core rates with fp32 accumulation. NVIDIA's data sheets print twice as much, "with
sparsity". GPU names must match exactly, because the names of a GPU slice (MIG) or of a board with a lower power limit
differ by a word. A GPU that is not listed has no MFU.

Source: NVIDIA's data sheets of A100, A10, A30, A40, L4, L40S, H100, H100 NVL, H200, GH200 and DGX B200; for GeForce and
RTX, the appendices of NVIDIA's white papers on GA102 and Ada. Memory figures are estimates: the memory that CUDA leaves
to a program, in whole GiB below the data sheet (GDDR6 boards use a sixteenth for error correction).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rate and memory of one GPU model."""

    name: str  # of torch.cuda.get_device_name, without "NVIDIA "
    bf16_tflops: float
    memory_gib: float


GPUS: tuple[Gpu, ...] = (
    Gpu("A100-SXM4-40GB", 312, 39),
    Gpu("A100-SXM4-80GB", 312, 78),
    Gpu("A100-PCIE-40GB", 312, 39),
    Gpu("A100 80GB PCIe", 312, 78),
    Gpu("A10", 125, 22),
    Gpu("A30", 165, 23),
    Gpu("A40", 149.7, 44),
    Gpu("L4", 121, 22),
    Gpu("L40S", 362, 44),
    Gpu("H100 80GB HBM3", 989, 78),  # SXM
    Gpu("H100 PCIe", 756, 78),
    Gpu("H100 NVL", 835, 92),
    Gpu("H200", 989, 139),  # SXM
    Gpu("H200 NVL", 835, 139),
    Gpu("GH200 480GB", 989, 93),
    Gpu("B200", 2250, 177),
    Gpu("GeForce RTX 3090", 71, 23),
    Gpu("GeForce RTX 4090", 165.2, 23),
    Gpu("RTX A6000", 154.8, 47),
    Gpu("RTX 6000 Ada Generation", 364.2, 47),
)


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU for a name from torch.cuda.get_device_name, or None if GPUS does not list the name."""
    name = device_name.removeprefix("NVIDIA ").strip()
    return next((gpu for gpu in GPUS if gpu.name == name), None)
