"""Settings of `make lab`: each lesson is listed once, and none changes when it is opened."""

from typing import Any

from ipykernel.ipkernel import IPythonKernel
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager


class Lessons(AsyncLargeFileManager):
    """Shows a notebook with what its kernel will say of Python, which JupyterLab would otherwise add as a change.

    See DECISIONS 232.
    """

    async def get(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model: dict[str, Any] = await super().get(*args, **kwargs)
        content = model["content"] if model["type"] == "notebook" else None
        if content and content["metadata"].get("kernelspec", {}).get("name") == "python3":
            content["metadata"]["language_info"] = IPythonKernel.language_info
        return model


c = get_config()  # type: ignore[name-defined]  # noqa: F821 - jupyter_server defines it
c.ServerApp.contents_manager_class = Lessons
c.ServerApp.jpserver_extensions = {"jupyterlab_jupytext": False}  # it would list the scripts as notebooks
c.ContentsManager.hide_globs = ["*.py", "*.toml", "lab", "__pycache__"]
c.ServerApp.tornado_settings = {"websocket_max_message_size": 2**30}  # pictures chosen in a form are one message
