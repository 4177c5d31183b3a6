"""Croissant 1.0 metadata of a published folder (http://mlcommons.org/croissant/1.0): files,
checksums, and the type of every column.

Guarantees: every property that the specification requires of a data set; each shard is a FileObject
with its SHA-256 and a path relative to the folder; each configuration and split is a record set
over its shards. On the hub, the hub makes its own for the converted files; this one is for the
folder. Not a dependency: `mlcroissant` reads what is written here, but does not write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tasks.publishing.columns import COLUMNS
from tasks.publishing.shards import Shard

if TYPE_CHECKING:
    import pyarrow as pa

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
PARQUET = "application/x-parquet"
OURS = (
    "citeAs",
    "column",
    "equivalentProperty",
    "extract",
    "field",
    "fileProperty",
    "fileObject",
    "fileSet",
    "format",
    "includes",
)
OURS += (
    "isLiveDataset",
    "jsonPath",
    "key",
    "md5",
    "parentField",
    "path",
    "recordSet",
    "references",
    "regex",
    "repeated",
    "replace",
)
OURS += ("samplingRate", "separator", "source", "subField", "transform")
SPDX = {
    "apache-2.0": "Apache-2.0",
    "mit": "MIT",
    "cc-by-4.0": "CC-BY-4.0",
    "cc-by-sa-4.0": "CC-BY-SA-4.0",
    "cc0-1.0": "CC0-1.0",
}


def context() -> dict[str, Any]:
    """The JSON-LD context that the specification recommends."""
    terms: dict[str, Any] = {name: f"cr:{name}" for name in OURS}
    terms |= {
        "@language": "en",
        "@vocab": "https://schema.org/",
        "conformsTo": "dct:conformsTo",
        "cr": "http://mlcommons.org/croissant/",
        "data": {"@id": "cr:data", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
        "dct": "http://purl.org/dc/terms/",
        "examples": {"@id": "cr:examples", "@type": "@json"},
        "rai": "http://mlcommons.org/croissant/RAI/",
        "sc": "https://schema.org/",
    }
    return dict(sorted(terms.items()))


def croissant(
    *,
    name: str,
    description: str,
    license: str,
    cite_as: str,
    published: date,
    creator: str,
    url: str,
    schema: pa.Schema,
    shards: Sequence[Shard],
    sha256: Mapping[str, str],
) -> str:
    """The JSON-LD text. `sha256` gives a hex digest by path; `url` may be relative to the
    folder."""
    sets: dict[tuple[str, str], list[Shard]] = {}
    for shard in shards:
        sets.setdefault((shard.config, shard.split), []).append(shard)
    document = {
        "@context": context(),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": name,
        "description": description,
        "license": (
            f"https://spdx.org/licenses/{SPDX[license]}.html" if license in SPDX else license
        ),
        "url": url,
        "creator": {"@type": "sc:Organization", "name": creator},
        "datePublished": published.isoformat(),
        "version": f"{published.year}.{published.month}.{published.day}",
        "citeAs": cite_as,
        "inLanguage": "en",
        "isLiveDataset": False,
        "keywords": ["GPU kernels", "code generation", "reasoning"],
        "distribution": (
            [_file(shard, sha256[shard.path]) for shard in shards]
            + [_file_set(key, files) for key, files in sets.items()]
        ),
        "recordSet": [_record_set(key, schema) for key in sets],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _file(shard: Shard, sha256: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": shard.path,
        "name": PurePosixPath(shard.path).name,
        "contentUrl": shard.path,
        "contentSize": f"{shard.size_bytes} B",
        "encodingFormat": PARQUET,
        "sha256": sha256,
    }


def _file_set(key: tuple[str, str], files: Sequence[Shard]) -> dict[str, Any]:
    config, split = key
    return {
        "@type": "cr:FileSet",
        "@id": f"{config}-{split}-files",
        "name": f"{config}-{split}-files",
        "description": f"Shards of the split {split} of {config}.",
        "encodingFormat": PARQUET,
        "includes": f"{PurePosixPath(files[0].path).parent}/{split}-*.parquet",
    }


def _record_set(key: tuple[str, str], schema: pa.Schema) -> dict[str, Any]:
    name = "-".join(key)
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": (
            f"A row is a kernel that was verified and taken: split {key[1]} of {key[0]}."
        ),
        "key": {"@id": f"{name}/candidate_id"},
        "field": [_field(name, f"{name}-files", field) for field in schema],
    }


def _field(record_set: str, files: str, field: pa.Field) -> dict[str, Any]:
    import pyarrow as pa

    described = {"@type": "cr:Field", "@id": f"{record_set}/{field.name}", "name": field.name}
    described["description"] = COLUMNS.get(field.name, "As curation wrote it.")
    source = {"fileSet": {"@id": files}, "extract": {"column": field.name}}
    if pa.types.is_struct(field.type):
        return described | {
            "subField": [
                {
                    "@type": "cr:Field",
                    "@id": f"{record_set}/{field.name}/{inner.name}",
                    "name": inner.name,
                    "description": f"{inner.name} of {field.name}",
                    "dataType": _type(inner.type),
                    "source": source | {"transform": {"jsonPath": inner.name}},
                }
                for inner in field.type
            ]
        }
    if pa.types.is_list(field.type):
        return described | {
            "repeated": True,
            "dataType": _type(field.type.value_type),
            "source": source,
        }
    return described | {"dataType": _type(field.type), "source": source}


def _type(of: pa.DataType) -> str:
    import pyarrow as pa

    if pa.types.is_boolean(of):
        return "sc:Boolean"
    if pa.types.is_integer(of):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(of) else "sc:Text"
