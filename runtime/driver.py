"""The CUDA driver: errors with names, device properties, and the primary context.

`cuda.bindings` is imported on first use, so that machines without a GPU never touch it. The primary
context is the one that torch uses; we retain it once per device and never destroy it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minitriton.ir.diagnostics import MiniTritonError

if TYPE_CHECKING:
    from minitriton.runtime.active import ActiveDriver

active: ActiveDriver  # set by the package, as it asks this module
# After one of these every call in the process fails: the context is gone for good.
STICKY = frozenset({214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
INVALID_CONTEXT = 201
_HELP = {
    2: "free tensors, or use smaller tiles or fewer stages",
    209: "the binary was made for another GPU architecture",
    700: "a load or store went out of bounds; run the kernel on CPU tensors to find the line",
    701: "too many registers or threads: lower num_warps or set maxnreg",
    702: "the kernel ran too long for the display watchdog, or it hangs",
    710: "a tl.device_assert failed",
    716: "an address is not a multiple of the access's size",
    719: "run the kernel on CPU tensors: the emulator names the line",
}


class CudaError(MiniTritonError):
    """A driver call failed: `code`, and `name` such as CUDA_ERROR_ILLEGAL_ADDRESS."""

    def __init__(self, code: int, name: str, message: str) -> None:
        self.code, self.name = code, name
        super().__init__(message)


class DeviceLostError(CudaError):
    """An earlier kernel broke the GPU context; the process has to be restarted."""


class OutOfResources(MiniTritonError):
    """A kernel needs more of something than the GPU has."""

    def __init__(self, required: int, limit: int, name: str) -> None:
        self.required, self.limit, self.name = required, limit, name
        super().__init__(
            f"out of resource: {name}, required: {required}, limit: {limit}. "
            "Smaller tiles, fewer stages (num_stages) or more warps may help"
        )


@dataclass
class _State:
    """What a process has to remember about its driver."""

    recent: deque[str] = field(default_factory=lambda: deque(maxlen=8))  # kernels launched last
    lost: DeviceLostError | None = None
    contexts: dict[int, Any] = field(default_factory=dict)


STATE = _State()


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """One GPU; sizes in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    max_shared: int  # of one CTA, opted in
    l2_bytes: int
    memory: int


@functools.cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`, with the driver initialised; CudaError without a GPU."""
    try:
        from cuda.bindings import driver

        code = int(driver.cuInit(0)[0])
    except Exception as error:  # ImportError, or the loader's own types without a driver
        raise CudaError(-1, "NO_DRIVER", f"no usable CUDA driver: {error}") from error
    if code:
        raise CudaError(code, f"CUDA error {code}", f"the CUDA driver does not start: error {code}")
    return driver


@functools.cache
def launch_function() -> Callable[..., int]:
    """The driver's cuLaunchKernelEx(config, function, parameters, extra) -> error code.

    Through ctypes, because a launch pays for each argument that a binding converts.
    """
    return _entry("cuLaunchKernelEx", 4)


@functools.cache
def replace_address() -> Callable[..., int]:
    """The driver's cuTensorMapReplaceAddress(map, address) -> error code, through ctypes, too."""
    return _entry("cuTensorMapReplaceAddress", 2)


def _entry(name: str, count: int) -> Callable[..., int]:
    """A function of the driver that takes `count` addresses, through ctypes."""
    bindings()
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library[name]
    function.restype = ctypes.c_int
    function.argtypes = [ctypes.c_void_p] * count
    return function


def is_available() -> bool:
    """Whether there is a driver and at least one GPU."""
    try:
        return device_count() > 0
    except CudaError:
        return False


def check(result: tuple[Any, ...], doing: str = "") -> Any:
    """The value of a `cuda.bindings` call, or CudaError saying what was being done."""
    code = int(result[0])
    if code:
        raise_error(code, doing)
    match len(result):
        case 1:
            return None
        case 2:
            return result[1]
    return result[1:]


def raise_error(code: int, doing: str = "") -> None:
    """Raise what `code` means; a sticky error is remembered and raised again by `check_alive`."""
    name, text = _describe(code)
    message = f"{name}: {text}" + (f" ({doing})" if doing else "")
    if code in _HELP:
        message += f"\nhelp: {_HELP[code]}"
    if code not in STICKY:
        raise CudaError(code, name, message)
    if STATE.recent:
        message += f"\nlast launches, newest first: {', '.join(reversed(STATE.recent))}"
        message += "\nMINITRITON_SYNC=1 makes an error show at the launch that caused it"
    if STATE.lost is None:
        STATE.lost = DeviceLostError(code, name, f"{message}\nrestart the process to use the GPU")
    raise STATE.lost


def check_alive() -> None:
    """Raise the first sticky error of this process again, if there was one."""
    if STATE.lost is not None:
        first = STATE.lost
        raise DeviceLostError(
            first.code, first.name, f"the GPU was lost by an earlier error: {first}"
        ) from first


def _describe(code: int) -> tuple[str, str]:
    try:
        driver = bindings()
        name = driver.cuGetErrorName(driver.CUresult(code))[1].decode()
        text = driver.cuGetErrorString(driver.CUresult(code))[1].decode()
    except Exception:  # unknown code, or no driver: a number is better than no error
        return f"CUDA error {code}", "unknown error"
    return name, text


def device_count() -> int:
    """Number of visible GPUs; CudaError if there is no driver."""
    driver = bindings()
    return int(check(driver.cuDeviceGetCount(), "counting GPUs"))


@functools.cache
def properties(index: int) -> DeviceProperties:
    """Name, architecture and limits of GPU `index`."""
    driver = bindings()
    device = check(driver.cuDeviceGet(index), f"opening GPU {index}")
    attribute = driver.CUdevice_attribute

    def get(name: str) -> int:
        which = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(which, device)))

    return DeviceProperties(
        index=index,
        name=check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=get("MULTIPROCESSOR_COUNT"),
        max_shared=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=get("L2_CACHE_SIZE"),
        memory=int(check(driver.cuDeviceTotalMem(device))),
    )


def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    number = int(check(bindings().cuDriverGetVersion()))
    return number // 1000, number % 1000 // 10


def make_current(index: int) -> None:
    """Make GPU `index`'s primary context current in this thread, creating it if need be."""
    driver = bindings()
    context = STATE.contexts.get(index)
    if context is None:
        device = check(driver.cuDeviceGet(index), f"opening GPU {index}")
        context = check(driver.cuDevicePrimaryCtxRetain(device), f"starting GPU {index}")
        STATE.contexts[index] = context
    check(driver.cuCtxSetCurrent(context), f"selecting GPU {index}")


def is_current(index: int) -> bool:
    """Whether this thread's current context belongs to GPU `index`."""
    driver = bindings()
    code, device = driver.cuCtxGetDevice()
    return int(code) == 0 and int(device) == index


def synchronize(index: int) -> None:
    """Wait until all work on GPU `index` is done; raises the errors that it ended with."""
    make_current(index)
    check(bindings().cuCtxSynchronize(), "waiting for the GPU")


def device_of(address: int) -> int:
    """Index of the GPU that owns the memory at `address`; CudaError if none does."""
    driver = bindings()
    which = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(driver.cuPointerGetAttribute(which, address), "looking up a pointer"))
