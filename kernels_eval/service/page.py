"""The page of the API at `/docs`, made of its OpenAPI schema: it loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from kernels_eval.records import Json

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True
)


def page_of(openapi: Json, state: str) -> str:
    """The page as HTML. `state` is one sentence, without its full stop."""
    return _templates.get_template("page.html.j2").render(
        title=openapi["info"]["title"],
        state=state,
        endpoints=list(_endpoints(openapi["paths"])),
        schemas=list(_schemas(openapi["components"]["schemas"])),
    )


def _endpoints(paths: Json) -> Iterator[Json]:
    for path, methods in paths.items():
        for method, about in methods.items():
            given = about.get("requestBody", {}).get("content", {})
            yield {
                "method": method.upper(),
                "path": path,
                "about": about.get("description", about["summary"]),
                "body": [_kind(each["schema"]) for each in given.values()],
                "parameters": [each["name"] for each in about.get("parameters", ())],
                "answers": [_answer(status, each) for status, each in about["responses"].items()],
            }


def _answer(status: str, about: Json) -> str:
    kinds = [_kind(each.get("schema", {})) for each in about.get("content", {}).values()]
    return Markup(" ").join([status, *filter(None, kinds)])


def _schemas(schemas: Json) -> Iterator[tuple[str, str, list[tuple[str, Markup, str]]]]:
    for name, schema in schemas.items():
        required = schema.get("required", ())
        fields = [
            (field if field in required else f"{field} (optional)", _kind(about), _meaning(about))
            for field, about in schema.get("properties", {}).items()
        ]
        values = ", ".join(map(str, schema.get("enum", ())))
        yield name, ": ".join(filter(None, [schema.get("description", ""), values])), fields


def _meaning(about: Json) -> str:
    return " ".join(about.get("description", "").split())


def _kind(schema: Any) -> Markup:
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return Markup('<a href="#{}">{}</a>').format(name, name)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return Markup(" or ").join(_kind(each) for each in options)
    if "enum" in schema or "const" in schema:
        return escape(", ".join(map(str, schema.get("enum", [schema.get("const")]))))
    kind = schema.get("type", "")
    return Markup("list of ") + _kind(schema["items"]) if "items" in schema else escape(kind)
