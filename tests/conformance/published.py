"""Reads the published JSON schemas of inference requests and responses: Triton's two and KServe's.

They lie beside the repository like the recordings, as pages with the schema in them, and are no part of it: their licence is not
stated.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema

from tests.conformance import corpus

TRITON_REQUEST = "Triton Inference Request"
TRITON_RESPONSE = "Triton Inference Response"
KSERVE_REQUEST = "Inference Request"

#: What Triton's own clients send, or what a server has to take, and the schemas do not allow. docs/protocol.md says it in words.
DEVIATIONS = {
    TRITON_REQUEST: {
        "inputs/*: required: data",
        "inputs/*/data: type",
        "inputs/*/datatype: enum: STRING",
        "inputs/*/shape/*: minimum",
        "outputs/*/parameters/classification: minimum",
    },
    KSERVE_REQUEST: {"inputs/*: required: data", "inputs/*/datatype: enum: BF16"},
    TRITON_RESPONSE: set(),
}


@cache
def validators() -> dict[str, jsonschema.Draft202012Validator]:
    """Returns a validator for each schema: title -> validator. Empty where the pages are absent."""
    found = {}
    folder = corpus.seeds_folder()
    for page in sorted(folder.glob("*.txt")) if folder else ():
        text = page.read_text(encoding="utf-8")
        start = text.find('{\n  "$schema"')
        if start >= 0:
            schema, _ = json.JSONDecoder().raw_decode(text, start)
            found[schema["title"]] = jsonschema.Draft202012Validator(schema)
    return found


def violations(title: str, document: Any) -> set[str]:
    """Returns how a document breaks a schema, beyond the deviations: "place: rule", or "place: rule: what"."""
    found = set()
    for error in validators()[title].iter_errors(document):
        place = "/".join("*" if isinstance(step, int) else str(step) for step in error.absolute_path)
        line = f"{place}: {error.validator}"
        if error.validator == "required":
            line += f": {error.message.split(chr(39))[1]}"
        elif error.validator == "enum":
            line += f": {error.instance}"
        found.add(line)
    return found - DEVIATIONS[title]
