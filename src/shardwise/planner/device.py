"""A GPU's memory besides tensors: the context, communicators, workspaces, and fragmentation."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes beside tensors on one GPU.

    Attributes:
        context: The CUDA context with the kernels of torch, cuBLAS and NCCL loaded.
        communicator: One NCCL communicator.
        workspace: cuBLAS; inside torch's allocator.
        fragments: Share of the allocated bytes that torch's allocator reserves besides.
    """

    context: int
    communicator: int
    workspace: int
    fragments: float


#: ``context``: nvidia-smi of a process with an empty torch context and kernels loaded shows 0.5 GiB (A100, H100) and
#: more with NCCL's and cuBLAS's kernels; planner.md gives 0.5 to 1.6 GiB. ``communicator``: NCCL's channels have
#: buffers of 4 MiB in each direction (NCCL_BUFFSIZE, docs.nvidia.com/deeplearning/nccl, environment variables), 16 to
#: 32 channels. ``workspace``: torch gives cuBLAS 32 MiB on Hopper and 8 MiB elsewhere for each handle and stream
#: (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); two streams compute. ``fragments``: median of reserved over allocated
#: of the nanotron rows of bench/data/published.csv (1.01 to 1.07).
BESIDE = Beside(context=800 * MIB, communicator=200 * MIB, workspace=64 * MIB, fragments=0.016)
