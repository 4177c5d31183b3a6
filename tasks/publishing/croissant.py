"""Croissant 1.0 metadata of a published folder (http://mlcommons.org/croissant/1.0): files,
checksums, and the type of every column.

Guarantees: written and validated by `mlcroissant`; each shard is a FileObject with its SHA-256 and
a path relative to the folder; each configuration and split is a record set over its shards. On the
hub, the hub makes its own for the converted files; this one is for the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import PurePosixPath

import mlcroissant as mlc
import pyarrow as pa

from tasks.publishing.card import Card
from tasks.publishing.columns import COLUMNS

PARQUET = "application/x-parquet"
SPDX = {
    "apache-2.0": "Apache-2.0",
    "mit": "MIT",
    "cc-by-4.0": "CC-BY-4.0",
    "cc-by-sa-4.0": "CC-BY-SA-4.0",
    "cc0-1.0": "CC0-1.0",
}


def croissant(card: Card, created_at: str, schema: pa.Schema, sha256: Mapping[str, str]) -> str:
    """The JSON-LD text of a set with this card. `sha256` gives a hex digest by path; the options'
    `url` may be relative to the folder."""
    options, first = card.options, next(iter(card.statistics.values()))
    published = datetime.fromisoformat(created_at[:10])
    known = options.license in SPDX
    sets, files = (
        [],
        [
            mlc.FileObject(
                id=shard.path,
                name=PurePosixPath(shard.path).name,
                content_url=shard.path,
                content_size=f"{shard.size_bytes} B",
                encoding_formats=[PARQUET],
                sha256=sha256[shard.path],
            )
            for shard in card.shards
        ],
    )
    for config, split, shards in card.splits():
        name = f"{config}-{split}"
        file_set = mlc.FileSet(
            id=f"{name}-files",
            name=f"{name}-files",
            description=f"Shards of the split {split} of {config}.",
            encoding_formats=[PARQUET],
            includes=[f"{PurePosixPath(shards[0].path).parent}/{split}-*.parquet"],
        )
        files.append(file_set)
        sets.append(
            mlc.RecordSet(
                id=name,
                name=name,
                description=(
                    f"A row is a kernel that was verified and taken: split {split} of {config}."
                ),
                key=[f"{name}/candidate_id"],
                fields=[_field(name, field) for field in schema],
            )
        )
    document = mlc.Metadata(
        name=options.name,
        description=(
            f"{first.rows:,} verified kernels for {first.tasks:,} PyTorch programs, with reasoning."
            f" Revision {card.tag}."
        ),
        license=[
            f"https://spdx.org/licenses/{SPDX[options.license]}.html" if known else options.license
        ],
        url=options.url,
        creators=[mlc.Organization(name=options.creator)],
        date_published=published,
        version=f"{published.year}.{published.month}.{published.day}",
        cite_as=card.citation,
        in_language=["en"],
        keywords=["GPU kernels", "code generation", "reasoning"],
        distribution=files,
        record_sets=sets,
    )
    return json.dumps(document.to_json(), indent=2, ensure_ascii=False) + "\n"


def _field(record_set: str, field: pa.Field) -> mlc.Field:
    """The description of a column; the fields of a struct are read from it by their names."""
    name, kind, inner = f"{record_set}/{field.name}", field.type, []
    if pa.types.is_struct(kind):
        inner = [
            mlc.Field(
                id=f"{name}/{part.name}",
                name=part.name,
                description=f"{part.name} of {field.name}",
                data_types=[_type(part.type)],
                source=_source(record_set, field.name, [mlc.Transform(json_path=part.name)]),
            )
            for part in kind
        ]
    repeated = pa.types.is_list(kind)
    return mlc.Field(
        id=name,
        name=field.name,
        description=COLUMNS.get(field.name, "As curation wrote it."),
        repeated=repeated or None,
        data_types=[] if inner else [_type(kind.value_type if repeated else kind)],
        sub_fields=inner,
        source=None if inner else _source(record_set, field.name, []),
    )


def _source(record_set: str, column: str, transforms: list[mlc.Transform]) -> mlc.Source:
    extract = mlc.Extract(column=column)
    return mlc.Source(file_set=f"{record_set}-files", extract=extract, transforms=transforms)


def _type(of: pa.DataType) -> str:
    if pa.types.is_boolean(of):
        return str(mlc.DataType.BOOL)
    if pa.types.is_integer(of):
        return str(mlc.DataType.INTEGER)
    return str(mlc.DataType.FLOAT if pa.types.is_floating(of) else mlc.DataType.TEXT)
