"""Maps memfds, in pages of 2 MiB if possible. A program reads and writes such pages up to twice as fast as small pages.

``mapped`` maps a memfd at an address that allows large pages. ``join_pages`` joins the small pages of a memfd to large pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

_LARGE = 2 << 20
# asm-generic/mman-common.h, since 5.14 and 6.1; the mmap module has no names for them.
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MAP_FIXED, _PROT_NONE, _FAILED = 0x10, 0, ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapped(fd: int, byte_size: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE, offset: int = 0) -> memoryview:
    """Maps ``byte_size`` bytes of a file from byte ``offset`` on, and returns a view of them. ``fd`` may be closed afterwards.

    The memory is unmapped once nothing refers to the view any more. ``prot`` is the protection of the pages. Without PROT_WRITE
    the view is read-only. ``offset`` must be a multiple of the page size. Raises OSError if the kernel cannot map the file.
    Raises ValueError if ``byte_size`` is not above 0, or if the file has fewer than ``offset + byte_size`` bytes.
    """
    if not 0 < byte_size <= os.fstat(fd).st_size - offset:
        raise ValueError(f"{byte_size} bytes cannot be mapped at {offset} of a file of {os.fstat(fd).st_size} bytes")
    if byte_size < _LARGE:
        address = _map(None, byte_size, prot, mmap.MAP_SHARED, fd, offset)
    else:
        # A larger range is reserved. The file is mapped over an aligned part of it, and what lies beside is given back.
        start = _map(None, byte_size + _LARGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        pages = -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE
        address = -(-start // _LARGE) * _LARGE
        end = -(-(start + byte_size + _LARGE) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            _map(address, byte_size, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        except OSError:
            _libc.munmap(start, end - start)
            raise
        for begin, until in ((start, address), (address + pages, end)):
            if begin < until:
                _libc.munmap(begin, until - begin)
    array = (ctypes.c_ubyte * byte_size).from_address(address)
    # At the exit of the process other threads may still use the memory.
    weakref.finalize(array, _libc.munmap, address, byte_size).atexit = False
    view = memoryview(array).cast("B")
    return view if prot & mmap.PROT_WRITE else view.toreadonly()


def shared(name: str, byte_size: int, seals: int) -> tuple[int, memoryview]:
    """Makes a memfd of so many bytes with these seals. Returns its descriptor and a view of it. Raises OSError.

    All its pages are allocated, and joined to large pages if possible. ``name`` is what the kernel shows of it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, byte_size)
        view = mapped(fd, byte_size)
        join_pages(view)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd, view


def join_pages(view: memoryview) -> None:
    """Joins the pages of ``view``, a writable result of ``mapped``, to pages of 2 MiB. All pages must already be allocated.

    Processes that map the same memory later get the large pages, too. If the kernel cannot join pages, no error is raised.
    """
    if len(view) >= _LARGE:
        _advise(view, len(view) // _LARGE * _LARGE, _MADV_COLLAPSE)


def populate(view: memoryview) -> None:
    """Makes the page table's entries for ``view``, a writable result of ``mapped``. Its first use then costs no page faults.

    Pages that do not exist are allocated. Before Linux 5.14, this does nothing.
    """
    _advise(view, len(view), _MADV_POPULATE_WRITE)


def _advise(view: memoryview, byte_size: int, advice: int) -> None:
    _libc.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), byte_size, advice)


def _map(address: int | None, byte_size: int, prot: int, flags: int, fd: int, offset: int = 0) -> int:
    made: int | None = _libc.mmap(address, byte_size, prot, flags, fd, offset)
    if made is None or made == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return made
