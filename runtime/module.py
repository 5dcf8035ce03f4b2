"""Loading a cubin on a GPU and finding its entry function, with its limits checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minitriton.runtime import driver

_DEFAULT_SHARED = 48 * 1024  # what a kernel may have without opting in


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel loaded on one GPU. `module` keeps the code alive; sizes in bytes."""

    name: str
    device: int
    handle: Any
    module: Any
    registers: int
    local: int  # per thread: stack and spills
    static_shared: int
    max_threads: int


def load(cubin: bytes, name: str, device: int, shared: int, threads: int) -> Function:
    """Load `cubin` on GPU `device` and prepare `name` for launches.

    `shared` is the dynamic shared memory, `threads` the CTA's size. OutOfResources if the GPU
    cannot run it, CudaError if the image is refused.
    """
    driver.check_alive()
    driver.make_current(device)
    limit = driver.properties(device).max_shared
    if shared > limit:
        raise driver.OutOfResources(shared, limit, "shared memory (bytes)")
    cuda = driver.bindings()
    module = driver.check(cuda.cuModuleLoadData(cubin), f"loading kernel '{name}'")
    handle = driver.check(cuda.cuModuleGetFunction(module, name.encode()), f"finding '{name}'")
    attribute = cuda.CUfunction_attribute

    def get(which: str) -> int:
        code = getattr(attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        return int(driver.check(cuda.cuFuncGetAttribute(code, handle)))

    function = Function(
        name=name,
        device=device,
        handle=handle,
        module=module,
        registers=get("NUM_REGS"),
        local=get("LOCAL_SIZE_BYTES"),
        static_shared=get("SHARED_SIZE_BYTES"),
        max_threads=get("MAX_THREADS_PER_BLOCK"),
    )
    if function.static_shared + shared > limit:
        total = function.static_shared + shared
        raise driver.OutOfResources(total, limit, "shared memory (bytes)")
    if threads > function.max_threads:
        raise driver.OutOfResources(threads, function.max_threads, "threads per CTA")
    if shared > _DEFAULT_SHARED - function.static_shared:
        which = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.check(cuda.cuFuncSetAttribute(handle, which, shared), "raising the shared memory")
    return function


def resident_ctas(function: Function, threads: int, shared: int, clusters: int = 1) -> int:
    """How many CTAs of a kernel its GPU holds at a time, in clusters of so many; 0 if no cluster
    fits."""
    cuda = driver.bindings()
    if clusters > 1:
        config = _cluster_config(threads, shared, clusters)
        doing = f"asking how many clusters of '{function.name}' fit"
        found = driver.check(cuda.cuOccupancyMaxActiveClusters(function.handle, config), doing)
        return clusters * int(found)
    each = driver.check(
        cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function.handle, threads, shared),
        f"asking how often '{function.name}' fits",
    )
    return max(1, int(each)) * driver.properties(function.device).multiprocessors


def _cluster_config(threads: int, shared: int, clusters: int) -> Any:
    """A CUlaunchConfig of one cluster along x; shared memory in bytes."""
    cuda = driver.bindings()
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = clusters, 1, 1
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = clusters, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = [attribute], 1
    return config
