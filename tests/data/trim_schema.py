"""Trims a published schema to what our manifests use: `python trim_schema.py SOURCE SCHEMA MANIFEST...`.

SCHEMA is a CustomResourceDefinition in YAML (its newest version counts) or a JSON schema; SOURCE says where
it is from. A field that a manifest has remains as it is published, without descriptions. Of all others the
names remain, with nothing said of their values. What is printed belongs into this folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

DROPPED = ("description", "default", "format", "$schema", "title")


def trim(schema: Any, values: list[Any]) -> Any:
    """Return the schema without what none of the values at its place has."""
    trimmed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DROPPED or key.startswith("x-kubernetes-validations"):
            continue
        if key == "properties":
            objects = [v for v in values if isinstance(v, dict)]
            trimmed[key] = {
                name: trim(sub, [v[name] for v in objects if name in v])
                for name, sub in sorted(value.items())
            }
        elif key == "items" and isinstance(value, dict):
            trimmed[key] = trim(value, [item for v in values if isinstance(v, list) for item in v])
        elif key in ("anyOf", "oneOf", "allOf"):
            trimmed[key] = [trim(option, values) if isinstance(option, dict) else option for option in value]
        else:
            trimmed[key] = value
    return trimmed if values else {}


def main(source: str, schema: str, *manifests: str) -> None:
    published = yaml.safe_load(Path(schema).read_text(encoding="utf-8"))
    values = [
        manifest
        for path in manifests
        for manifest in yaml.safe_load_all(Path(path).read_text(encoding="utf-8"))
    ]
    if "spec" in published:
        version = published["spec"]["versions"][-1]
        kind = published["spec"]["names"]["kind"]
        published = version["schema"]["openAPIV3Schema"]
        values = [value for value in values if value["kind"] == kind]
    print(f"# {source}\n# Trimmed by trim_schema.py; (c) its authors, Apache License 2.0.")
    print(yaml.safe_dump(trim(published, values), default_flow_style=None, width=110), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
