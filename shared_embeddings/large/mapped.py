"""Tensors in mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from torch import Tensor


def advise_random(tensor: Tensor) -> None:
    """Tell the system that rows of a tensor in a mapped file are read in random order, where it can be told.

    Otherwise it reads and maps much of the file around each row.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(tensor.data_ptr() + tensor.nbytes - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, mmap.MADV_RANDOM)
