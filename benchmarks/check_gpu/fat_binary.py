"""Cut the machine code of other GPUs out of a library of CUDA's.

A library carries containers ("fat binaries") of entries: machine code (cubin) for one architecture,
or PTX, which the driver compiles. The driver takes the entry that fits its GPU. Entries that do not
fit are filled with zeros, so that nothing moves and the library compresses to what is left.
"""

import struct
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<4sHHQ")  # magic, version, bytes of this header, bytes behind it
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes behind it, arch
_PTX, _CUBIN = 1, 2


def keep_architecture(library: Path, architecture: int) -> int:
    """Keep machine code for ``architecture`` (90), or PTX where there is none; bytes cut."""
    data, at, cut = bytearray(library.read_bytes()), 0, 0
    while (at := data.find(_MAGIC, at)) >= 0:
        _, version, header, size = _CONTAINER.unpack_from(data, at)
        if version != 1 or header != _CONTAINER.size or at + header + size > len(data):
            at += len(_MAGIC)  # the same four bytes by chance
            continue
        end = at + header + size
        cut += _cut_container(data, at + header, end, architecture)
        at = end
    library.write_bytes(data)
    return cut


def _cut_container(data: bytearray, at: int, end: int, architecture: int) -> int:
    entries = []
    while at < end:
        kind, _, header, size, of = _ENTRY.unpack_from(data, at)
        if not _ENTRY.size <= header <= 4096 or not size:
            raise ValueError(f"no entry of a fat binary at {at}: {kind = }, {header = }, {size = }")
        entries.append((kind, of, at + header, size))
        at += header + size
    has_code = any(entry[:2] == (_CUBIN, architecture) for entry in entries)
    cut = 0
    for kind, of, start, size in entries:
        fits_by_ptx = kind == _PTX and of <= architecture and not has_code
        if (kind, of) != (_CUBIN, architecture) and not fits_by_ptx:
            data[start : start + size] = bytes(size)
            cut += size
    return cut
