"""Addresses that send files of a run to be kept: samples, its film, and the report; and uploads.

They are behind `security.Guard`. Nothing that they send is shown as a page with rights: samples are attachments, and
the report is in a sandbox without scripts. See DECISIONS 149.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse

from app.runs import samples
from app.runs.monitor import explained
from app.studio import Studio
from app.web import upload_routes
from trainer.launcher.remedy import with_remedy
from trainer.run.folder import RunDir
from trainer.run.samples import film_of, kind_of
from trainer.system.errors import InputError
from trainer.view.render import POLICY
from trainer.view.report import write_report

FILM_TYPES = {".webp": "image/webp", ".mp4": "video/mp4", ".jpg": "image/jpeg"}


def add(app: FastAPI, studio: Studio) -> None:
    """Add the addresses to the app, before gradio takes all others."""
    upload_routes.add(app, studio)

    @app.get("/open")
    async def is_open() -> Response:
        """Whether this browser is let in: the guard answers for those that are not. It waits for no thread."""
        return Response(status_code=204)

    @app.get("/runs/{name}/samples.zip")
    def samples_zip(name: str) -> Response:
        try:
            stream = samples.zipped(studio.run(name))
        except (InputError, OSError) as error:
            return _refused(error)
        return StreamingResponse(stream, media_type="application/zip", headers=attachment(f"{name}-samples.zip"))

    @app.get("/runs/{name}/samples/{file}")
    def sample(name: str, file: str) -> Response:
        try:
            path = samples.own_file(studio.run(name), file)
        except (InputError, OSError, ValueError) as error:
            return _refused(error)
        kind = kind_of(file)  # a player needs the type; whatever else it is, the browser keeps it as a file
        media_type = kind.mime if kind.is_played else "application/octet-stream"
        return FileResponse(path, media_type=media_type, headers=attachment(f"{name}-{file}"))

    @app.get("/runs/{name}/film/{file}")
    def film(name: str, file: str) -> Response:
        try:
            run = studio.run(name)
            path = film_of(run).file(run, file)
        except (InputError, OSError, ValueError) as error:
            return _refused(error)
        return FileResponse(path, media_type=FILM_TYPES[path.suffix], headers=attachment(f"{name}-{file}"))

    @app.get("/runs/{name}/report")
    def report(name: str) -> Response:
        try:
            path = _fresh_report(studio.run(name))
        except (InputError, OSError) as error:
            return _refused(error)
        policy = {"content-security-policy": f"sandbox; {POLICY}", "cache-control": "no-store"}
        return FileResponse(path, media_type="text/html", headers=policy)


def attachment(name: str) -> dict[str, str]:
    """Return the headers with which a browser keeps a response as a file. Any name is safe in them."""
    encoded = quote(name.encode("utf-8", "replace"), safe="")
    return {"content-disposition": f"attachment; filename*=UTF-8''{encoded}", "cache-control": "no-store"}


def _refused(error: InputError | OSError | ValueError) -> Response:
    sentence = explained(error) if isinstance(error, InputError | OSError) else str(error)
    return PlainTextResponse(f"{sentence}\n", 404)


def _fresh_report(run: RunDir) -> Path:
    """Return the report, written first where there is none of the newest events and name. A link is replaced."""
    file, sources = run.report, (run.events_file, run.title_file)
    changed = max((source.stat().st_mtime_ns for source in sources if source.exists()), default=0)
    if file.is_symlink() or not file.is_file() or file.stat().st_mtime_ns < changed:
        write_report(run, with_remedy)
    return file
