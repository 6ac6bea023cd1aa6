"""The tools of requests, which the programs run themselves."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, TypeAdapter

from gspo_env.env.tools import Tool
from gspo_env.serving.fields import Fields, Json
from gspo_env.serving.records import RefusedError


def make_tool(fields: Fields, schema: str) -> Tool:
    """Returns a tool from its name, its description and the field with its JSON schema."""
    name = fields.tool()
    description = fields.text("description")
    parameters = fields.take(schema, dict, "a JSON schema") or {}
    parameters = {"type": "object", "properties": {}, **parameters}
    strict = bool(fields.take("strict", bool, "true or false"))
    return Tool(
        name=name,
        description=description,
        parameters=parameters,
        function=_belongs_to_the_program,
        validator=_fitting(parameters, fields.name("strict")) if strict else _any_arguments(),
        strict=strict,
    )


@cache
def _any_arguments() -> TypeAdapter[dict[str, Any]]:
    return TypeAdapter(dict[str, Any])


def _fitting(schema: Json, where: str) -> TypeAdapter[dict[str, Any]]:
    """Returns the validator of a strict tool: JSON schema, with references inside of it only.

    Raises:
        RefusedError: The schema is none, or `jsonschema` is not installed.
    """
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema_specifications import REGISTRY
    except ImportError:
        raise RefusedError(
            f"{where} is true, which needs the package jsonschema; expected false, or "
            "pip install 'gspo-env[agents]' for the trainer",
            code="unsupported_parameter",
            param=where,
        ) from None
    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        told = getattr(error, "message", "it is nested too deeply")
        raise RefusedError(f"the schema of a strict tool is none: {told[:200]}") from None
    checker = Draft202012Validator(schema, registry=REGISTRY)

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            fits = checker.is_valid(arguments)
        except Exception as error:  # a reference leads nowhere: jsonschema raises many kinds
            raise ValueError(f"the schema cannot be used: {error}") from None
        if not fits:
            raise ValueError("they do not fit the schema")
        return arguments

    return TypeAdapter(Annotated[dict[str, Any], AfterValidator(check)])


def _belongs_to_the_program(**arguments: Any) -> NoReturn:
    raise RefusedError("the tools of a request are run by the program that made it")
