"""Endpoints to fetch and remove captured routing; ``/v1/control/record`` starts a capture."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, HTTPException
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from ultraep_serve.errors import SpoolError
from ultraep_serve.sidecar.routes_control import BEARER, REFUSALS
from ultraep_serve.sidecar.statistics.snapshot import Answer, Document
from ultraep_serve.system.files import open_regular
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.spool import PAGE_BYTES, parse_spool_header

__all__ = ["capture_routes"]

_PIECE_BYTES = 1 << 20

Rank = Annotated[int, InPath(ge=0, lt=10_000)]


class SpoolStatus(Answer):
    """The state of one rank's spool."""

    rank: int
    number: int
    """Of the capture."""
    level: str
    batches: int
    """Complete batches with request tokens."""
    lost_batches: int
    """Batches that did not fit."""
    is_open: bool
    """A batch is being written."""
    bytes: int


class CaptureStatus(Document):
    """The spools, by rank; a single one where all ranks see the same tokens."""

    spools: list[SpoolStatus]


def capture_routes(run_dir: Path) -> APIRouter:
    """The routes to the spools in ``run_dir``."""
    router = APIRouter(
        prefix="/v1/record",
        dependencies=[BEARER],
        responses={code: REFUSALS[code] for code in (401, 403)},
        tags=["control"],
    )

    @router.get("")
    def status() -> CaptureStatus:
        """Batches and bytes captured so far."""
        found = (_status(run_dir, rank) for rank in RunFiles(run_dir).spools())
        return CaptureStatus(spools=[spool for spool in found if spool])

    @router.get(
        "/spool/{rank}",
        response_class=StreamingResponse,
        responses={
            200: {"content": {"application/octet-stream": {}}},
            404: {"description": "the rank has captured nothing"},
        },
    )
    def spool(rank: Rank) -> StreamingResponse:
        """What ``rank`` captured, in the format of ``ultraep_serve/telemetry/spool.py``."""
        try:
            file = os.fdopen(open_regular(RunFiles(run_dir).spool(rank)), "rb")
        except OSError as error:
            raise HTTPException(404, f"rank {rank} has captured nothing") from error
        size = os.fstat(file.fileno()).st_size
        return StreamingResponse(
            _pieces(file, size),
            media_type="application/octet-stream",
            headers={"content-length": str(size)},
        )

    @router.delete("")
    def remove() -> None:
        """Remove the spools, which frees their shared memory."""
        for rank in RunFiles(run_dir).spools():
            RunFiles(run_dir).spool(rank).unlink(missing_ok=True)

    return router


def _status(run_dir: Path, rank: int) -> SpoolStatus | None:
    """None where the spool was removed or cannot be read."""
    try:
        with os.fdopen(open_regular(RunFiles(run_dir).spool(rank)), "rb") as file:
            header = parse_spool_header(file.read(PAGE_BYTES))
            size = os.fstat(file.fileno()).st_size
    except (OSError, SpoolError):
        return None
    return SpoolStatus(
        rank=rank,
        number=header.number,
        level=header.level.name.lower(),
        batches=header.batches,
        lost_batches=header.lost_batches,
        is_open=header.is_open,
        bytes=size,
    )


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes; the file may grow or be truncated meanwhile."""
    position = 0
    with file:
        while position < size and (piece := file.read(min(_PIECE_BYTES, size - position))):
            position += len(piece)
            yield piece
