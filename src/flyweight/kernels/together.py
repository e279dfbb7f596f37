"""Whether all thread blocks of a launch are on the GPU at once, as the driver sees it.

Kernels that wait for other blocks of their own launch (cuda/patience.cuh) are planned with at most
one block for each SM of `gpu.of`, or as many as ON_AN_SM says. That this suffices is asked of the
driver before the first launch of each size: registers, shared memory, clusters, and the SMs that
MPS or a green context leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyweight import gpu, gpu_share
from flyweight.errors import FlyweightError

# Others that are launched in clusters wait within a cluster only, which is on the GPU as one.
ACROSS_CLUSTERS = {"qkv_attention", "vptq_rows"}
# Most blocks that are planned for an SM, where they are more than one.
ON_AN_SM = {"gemm_mma": 2}


class NotTogether(FlyweightError):
    """A kernel would wait for blocks that have no place on the GPU."""


def resident(driver: Any, kernel: int, config: Any, device: int) -> int:
    """How many blocks of such a launch run at once."""
    function = driver.CUfunction(kernel)
    clusters = [
        attribute.value.clusterDim.x
        for attribute in config.attrs
        if int(attribute.id)
        == int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    ]
    if clusters:
        status, count = driver.cuOccupancyMaxActiveClusters(function, config)
        return 0 if int(status) else count * clusters[0]
    status, each = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        function, config.blockDimX, config.sharedMemBytes
    )
    processors = gpu.real(device).processors
    share = gpu_share.of(device).processors
    return 0 if int(status) else each * min(processors, share or processors)


def check(
    driver: Any, name: str, kernel: int, config: Any, grid: Sequence[int], device: int
) -> None:
    """Raise where a launch whose blocks may wait for each other does not fit at once."""
    blocks = 1
    for size in grid:
        blocks *= size
    if blocks > gpu.of(device).processors * ON_AN_SM.get(name, 1):
        return  # such launches wait for nobody
    if len(config.attrs) and name not in ACROSS_CLUSTERS and _is_cluster(driver, config):
        return
    found = resident(driver, kernel, config, device)
    if found < blocks:
        raise NotTogether(
            f"{name} waits for all {blocks} of its thread blocks, and this GPU runs {found} of "
            f"them at once; leave this process more of the GPU (MPS: {gpu_share.PERCENTAGE}), or "
            "use --device cpu"
        )


def _is_cluster(driver: Any, config: Any) -> bool:
    wanted = int(driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    return any(int(attribute.id) == wanted for attribute in config.attrs)
