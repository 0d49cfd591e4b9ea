"""Read examples with random access (arrays, TFRecord, a file for each example) or one after the other (streams)."""

from gpudist_core.pipelines.sources.access import ArraySource, RowSource, StreamSource
from gpudist_core.pipelines.sources.files import FileRows, FileStream, RecordSource
from gpudist_core.pipelines.sources.streams import DatasetStream, GeneratorStream

__all__ = [
    "ArraySource",
    "DatasetStream",
    "FileRows",
    "FileStream",
    "GeneratorStream",
    "RecordSource",
    "RowSource",
    "StreamSource",
]
