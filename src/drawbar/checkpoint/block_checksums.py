"""A checksum for each block of a file, so that a reader of one region verifies that region alone.

The checksums of ``model-00003.safetensors`` are in ``model-00003.safetensors.sums``: 16 bytes (XXH3, of 128 bits) for
each 32 KiB. XXH3 finds accidental damage at the speed of memory; it is no protection against forgery, as no checksum
stored beside its file can be.
"""

import os
import weakref

import xxhash

from drawbar.checkpoint.format import Damaged
from drawbar.util.atomic_files import retried

BLOCK_BYTES = 2**15
"""Small: a reader of a region reads up to one block more at each end."""
DIGEST_BYTES = 16
_READ_BYTES = 16 * 2**20
"""Upper limit on the bytes of one read."""


class BlockHasher:
    """Computes the checksums of a file's blocks while the file is written, in order."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._block = xxhash.xxh3_128()
        self._block_space = BLOCK_BYTES

    def update(self, content: memoryview) -> None:
        if self._block_space < BLOCK_BYTES:
            begun, content = content[: self._block_space], content[self._block_space :]
            self._block.update(begun)
            self._block_space -= len(begun)
            if self._block_space > 0:
                return
            self._end_block()
        whole = len(content) // BLOCK_BYTES * BLOCK_BYTES
        for begin in range(0, whole, BLOCK_BYTES):
            self._digests += xxhash.xxh3_128_digest(content[begin : begin + BLOCK_BYTES])
        self._block.update(content[whole:])
        self._block_space -= len(content) - whole

    def digests(self) -> bytes:
        """The concatenated checksums of all blocks. Call it once, at the end."""
        if self._block_space < BLOCK_BYTES:
            self._end_block()
        return bytes(self._digests)

    def _end_block(self) -> None:
        self._digests += self._block.digest()
        self._block = xxhash.xxh3_128()
        self._block_space = BLOCK_BYTES


def checksums_size(size: int) -> int:
    """Size of the file with the checksums of a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES) * DIGEST_BYTES


class VerifiedFile:
    """An open file that is verified block by block as it is read: a ``ByteSource``.

    Args:
        descriptor: of the open file; ``close`` closes it, and so does the garbage collection of this object.
        name: for messages.
        size: in bytes.
        sums: the checksums, verified themselves.
    """

    def __init__(self, descriptor: int, name: str, size: int, sums: bytes) -> None:
        self.bytes_read = 0
        """Bytes read from the file so far, in whole blocks. A block that was read twice counts twice."""
        self._descriptor = descriptor
        self._name = name
        self._size = size
        self._sums = sums
        self._cached_block: tuple[int, bytearray] = -1, bytearray()
        """Number and content of the last block that was read in part: the next tensor may begin in it."""
        self.close = weakref.finalize(self, os.close, descriptor)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill ``buffer`` with the bytes from ``begin`` on.

        Raises:
            Damaged: a block does not match its checksum, or the file ends too early.
            OSError: the disk cannot be read.
        """
        while len(buffer) > 0:
            number, skipped = divmod(begin, BLOCK_BYTES)
            size = self._block_size(number)
            if skipped == 0 and len(buffer) >= size and number != self._cached_block[0]:
                left = self._size - begin
                most = left if len(buffer) >= left else len(buffer) // BLOCK_BYTES * BLOCK_BYTES  # whole blocks
                count = min(most, _READ_BYTES)
                self._read_blocks(number, buffer[:count])  # directly into the caller's buffer
            else:
                block = self._block(number)
                count = min(size - skipped, len(buffer))
                buffer[:count] = block[skipped : skipped + count]
            buffer, begin = buffer[count:], begin + count

    def verify(self) -> None:
        """Read every block. Raises as ``read_into`` does."""
        buffer = memoryview(bytearray(min(_READ_BYTES, self._size)))
        for begin in range(0, self._size, _READ_BYTES):
            self.read_into(buffer[: self._size - begin], begin)

    def _block_size(self, number: int) -> int:
        size = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)
        if size <= 0:
            raise Damaged(f"{self._name} ends too early")
        return size

    def _block(self, number: int) -> bytearray:
        if number != self._cached_block[0]:
            content = bytearray(self._block_size(number))
            self._read_blocks(number, memoryview(content))
            self._cached_block = number, content
        return self._cached_block[1]

    def _read_blocks(self, first: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with whole blocks, from number ``first`` on."""
        begin = first * BLOCK_BYTES
        done = 0
        while done < len(buffer):
            count = retried(lambda: os.preadv(self._descriptor, [buffer[done:]], begin + done))  # noqa: B023
            if count == 0:
                raise Damaged(f"{self._name} ends too early, after {begin + done} bytes")
            done += count
        self.bytes_read += done
        for at in range(0, done, BLOCK_BYTES):
            block = buffer[at : at + BLOCK_BYTES]
            expected = (first + at // BLOCK_BYTES) * DIGEST_BYTES
            if xxhash.xxh3_128_digest(block) != self._sums[expected : expected + DIGEST_BYTES]:
                raise Damaged(
                    f"{self._name} is not as it was written: bytes {begin + at} to {begin + at + len(block)} are others"
                )
