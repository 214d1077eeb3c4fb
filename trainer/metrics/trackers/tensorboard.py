"""TensorBoard: event files in `tensorboard/` of the run folder, by the package's own writer.

torch's SummaryWriter would do, but it imports torch: seconds, and hundreds of MiB next to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from trainer.config import yaml12
from trainer.config.schema import RunConfig
from trainer.metrics.trackers import shown_config
from trainer.metrics.trackers.feed import Figures, Note, Position, SampleImage
from trainer.run.events import WarningEvent
from trainer.run.folder import RunDir

RGB = 3  # TensorBoard's number for the colour space


def connect(run: RunDir, cfg: RunConfig, position: Position, emit: Callable[[WarningEvent], None]) -> TensorBoard:
    """Begin a new event file; TensorBoard joins all files of a folder. The config is sent once."""
    tracker = TensorBoard(EventFileWriter(str(run.path / "tensorboard")))
    if not position.run:
        position.run = run.path.name
        tracker.text(
            "config", "\n".join(f"    {line}" for line in yaml12.dump(shown_config(cfg)).splitlines()), 0, None
        )
    return tracker


class TensorBoard:
    """A Tracker."""

    def __init__(self, writer: EventFileWriter) -> None:
        self._writer = writer

    def figures(self, item: Figures) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in item.values.items()]
        self._add(values, item.step, item.time)

    def image(self, item: SampleImage) -> None:
        width, height = item.image().size
        image = Summary.Image(width=width, height=height, colorspace=RGB, encoded_image_string=item.path.read_bytes())
        self._add([Summary.Value(tag=f"{item.index} {item.prompt}", image=image)], item.step, item.time)

    def note(self, item: Note) -> None:
        self.text("events", f"**{item.kind}** {item.text}", item.step, item.time)

    def text(self, tag: str, text: str, step: int, when: float | None) -> None:
        """Add Markdown to the page of texts."""
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add([Summary.Value(tag=tag, tensor=tensor, metadata=metadata)], step, when)

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        self._writer.close()

    def _add(self, values: list[Any], step: int, when: float | None) -> None:
        self._writer.add_event(Event(step=step, wall_time=when, summary=Summary(value=values)))
