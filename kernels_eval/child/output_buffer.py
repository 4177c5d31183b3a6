"""How a candidate's outputs reach the reference process: as bytes in memory that both processes
map, never as objects. The roles of `kernels_eval.reference` use it too.

On the CPU that is a file in memory. On a GPU it is device memory that the reference process owns
and shares through a file descriptor (CUDA's virtual memory API), so outputs of gigabytes never
cross the bus; where the driver refuses that, it is the file again. The reader copies before it
compares: the writer may still be writing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from ctypes import byref

import torch

_PINNED, _POSIX_FD, _DEVICE, _READ_WRITE = 1, 1, 1, 3


class HostMemory:
    """A file in memory, by its descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.size = os.fstat(descriptor).st_size
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, self.size), dtype=torch.uint8)


class DeviceMemory:
    """Device memory of another process or of this one. Raises OSError where the driver refuses."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Without a descriptor, allocate `size` bytes that can be shared; with one, map what
        another process allocated."""
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes the primary context current
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = struct.pack("ii", _DEVICE, torch.cuda.current_device())
        # CUmemAllocationProp: its type, that of handles, where, and what Windows and RDMA need
        prop = struct.pack("ii", _PINNED, _POSIX_FD) + location + bytes(16)
        granularity, no_flags, start = ctypes.c_size_t(), ctypes.c_uint64(0), ctypes.c_size_t(0)
        self._call("GetAllocationGranularity", byref(granularity), prop, 0)
        self.size = -(-max(size, 1) // granularity.value) * granularity.value
        length = ctypes.c_size_t(self.size)
        self._handle = ctypes.c_uint64()
        if descriptor is None:
            self._call("Create", byref(self._handle), length, prop, no_flags)
        else:
            shared = ctypes.c_void_p(descriptor)
            self._call("ImportFromShareableHandle", byref(self._handle), shared, _POSIX_FD)
        address, anywhere = ctypes.c_uint64(), ctypes.c_uint64(0)
        access = location + struct.pack("i", _READ_WRITE)
        self._call("AddressReserve", byref(address), length, start, anywhere, no_flags)
        self._call("Map", address, length, start, self._handle, no_flags)
        self._call("SetAccess", address, length, access, ctypes.c_size_t(1))
        self.__cuda_array_interface__ = {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }
        self.bytes = torch.as_tensor(self, device="cuda")

    def descriptor(self) -> int:
        """A file descriptor through which another process can map this memory."""
        found, no_flags = ctypes.c_int(-1), ctypes.c_uint64(0)
        self._call("ExportToShareableHandle", byref(found), self._handle, _POSIX_FD, no_flags)
        return found.value

    def _call(self, name: str, *arguments: object) -> None:
        """A function of CUDA's virtual memory management."""
        result = self._driver[f"cuMem{name}"](*arguments)
        if result:
            raise OSError(result, f"cuMem{name} failed with CUDA error {result}")


def write(memory: HostMemory | DeviceMemory, tensors: list[torch.Tensor]) -> None:
    """Put the tensors' bytes one after the other, each at a multiple of 16, as `read` expects them.
    Nothing where they do not fit."""
    counts = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(map(padded, counts)) > memory.size:
        return  # a wrong shape: the parent sees it in the record and reads nothing
    offset = 0
    for tensor, count in zip(tensors, counts, strict=True):
        if count:
            plain = tensor.resolve_conj().resolve_neg()
            memory.bytes[offset : offset + count].copy_(plain.flatten().view(torch.uint8))
        offset += padded(count)


def read(memory: HostMemory | DeviceMemory, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of the dtypes and shapes of `like`, on its devices."""
    tensors, offset = [], 0
    for wanted in like:
        count = wanted.numel() * wanted.element_size()
        taken = memory.bytes[offset : offset + count].clone().to(wanted.device)
        tensors.append(taken.view(wanted.dtype).reshape(wanted.shape))
        offset += padded(count)
    return tensors


def padded(count: int) -> int:
    """Bytes that an output takes up: a multiple of 16, so that every dtype is aligned."""
    return -(-count // 16) * 16
