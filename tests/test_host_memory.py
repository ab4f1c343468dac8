import ctypes
import sys

import pytest

from rpg_jax.host_memory import keep_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_heap_grows_by_the_pad():
    libc = ctypes.CDLL("libc.so.6")
    libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    assert keep_pages(1 << 26)
    try:
        before, blocks = libc.sbrk(0), []
        while libc.sbrk(0) == before and len(blocks) < 1_000_000:
            blocks.append(libc.malloc(64 * 1024))
        assert libc.sbrk(0) - before >= 1 << 26
        for block in blocks:
            libc.free(block)
    finally:
        keep_pages()
