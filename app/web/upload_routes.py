"""The address that takes images in chunks: `PUT /uploads/ID?offset=N`, with the bytes of a chunk as the body.

It is behind `security.Guard`, which lets no larger body in. An upload is begun and finished by `pages/upload.py`.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from app.data.upload.uploads import MOST_CHUNK, NotWritten, Unknown, WrongOffset
from app.runs.monitor import explained
from app.studio import Studio
from trainer.system.errors import InputError

MOST_DIGITS = 12


def add(app: FastAPI, studio: Studio) -> None:
    """Add the address to the app."""

    @app.put("/uploads/{id}")
    async def chunk(id: str, request: Request) -> Response:
        offset = request.query_params.get("offset", "")
        if not (offset.isascii() and offset.isdigit() and len(offset) <= MOST_DIGITS):
            return _refused("offset: the number of the first byte is missing; reload the page", 400)
        try:
            body = await _body(request)
            received = await run_in_threadpool(studio.uploads.append, id, int(offset), body)
        except ClientDisconnect:
            return Response(status_code=400)  # the browser is gone
        except WrongOffset as error:
            return JSONResponse({"received": error.received}, 409)
        except Unknown as error:
            return _refused(str(error), 404)
        except NotWritten as error:
            return _refused(str(error), 507)
        except InputError as error:
            return _refused(str(error), 400)
        except OSError as error:
            return _refused(explained(error), 507)
        return JSONResponse({"received": received})


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_CHUNK:
            raise InputError(f"a chunk is larger than {MOST_CHUNK} bytes; reload the page")
    return bytes(body)


def _refused(sentence: str, status: int) -> Response:
    return JSONResponse({"error": sentence}, status)
