"""Settings that are stated once: flags, their help, JSON and errors follow from a class's fields.

A field's name is its flag's, with underscores, unless ``validation_alias`` says otherwise. Its
``json_schema_extra`` is what argparse takes beside; ``{"flag": False}``: it has no flag.
"""

import argparse
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import named_once, parse_object, read_text

Self = TypeVar("Self", bound="Settings")
_NO_FLAG = {"flag": False}
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
_SHOWN = 80  # characters of a wrong value, at most
_LIMITS = ("ge", "gt", "le")


class Settings(BaseModel):
    """Settings whose errors are ConfigErrors that name the setting, the value and the range."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )

    def __init__(self, flags: Mapping[str, str] | None = None, /, **values: Any) -> None:
        """``flags``, by name, by which ``values`` were given; errors name them.

        Raises ConfigError for unknown settings and bad values.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explained(error, type(self), flags or {})) from None
        except UnicodeError as error:  # half of a character, which JSON can hold
            raise ConfigError(f"a setting is not text: {error}") from None

    @classmethod
    def add_flags(cls, group: Any, prefix: str = "") -> None:
        """Add ``--`` ``prefix`` and its name for every setting to an argparse parser or group.

        A flag that is not given is None, so that the schema's own default holds.
        """
        for name, field in cls.model_fields.items():
            if field.json_schema_extra == _NO_FLAG:
                continue
            extra: dict[str, Any] = dict(field.json_schema_extra or {})  # type: ignore[arg-type]
            if field.annotation is bool:
                extra = {"action": "store_true", "default": None, **extra}
            else:
                extra = {"metavar": _metavar(field), "required": field.is_required(), **extra}
            names = (flag_of(cls, name, prefix), *extra.pop("also", ()))
            group.add_argument(*names, dest=_dest(name, prefix), help=_help(field), **extra)

    @classmethod
    def from_flags(
        cls: type[Self],
        arguments: argparse.Namespace,
        prefix: str = "",
        beneath: Mapping[str, Any] | None = None,
    ) -> Self:
        """The settings that were given as flags, over those of a file ``beneath``.

        Raises ConfigError for bad values, which names the flag.
        """
        found = {name: getattr(arguments, _dest(name, prefix), None) for name in cls.model_fields}
        given = {name: value for name, value in found.items() if value is not None}
        flags = {name: flag_of(cls, name, prefix) for name in given}
        return cls(flags, **{**(beneath or {}), **given})

    def replace(self: Self, **changes: Any) -> Self:
        """The same settings with ``changes``. Raises ConfigError."""
        return type(self)(**{**self.model_dump(), **changes})

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def read_settings(path: Path) -> dict[str, Any]:
    """Settings by name out of a JSON or YAML file. Raises ConfigError."""
    text = read_text(path, "the file of settings")
    if path.suffix == ".json":
        return parse_object(text, str(path), is_ours=True)
    try:
        import yaml  # engines bring it; nothing else here needs it

        _require_plain(yaml.compose(text, yaml.SafeLoader), set())
        values = yaml.safe_load(text)
    except ModuleNotFoundError:
        raise ConfigError(f"{path} is not .json, and YAML needs `pip install pyyaml`") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path} must hold settings by name, as slots: 2")
    return values


def _require_plain(node: Any, seen: set[int]) -> None:
    """Raise ValueError where YAML gives a name twice, or repeats a part of itself."""
    if id(node) in seen:
        raise ValueError("an alias (*) stands in it; write out what it stands for")
    seen.add(id(node))
    if not isinstance(getattr(node, "value", None), list):
        return
    if node.id == "mapping":
        named_once((str(key.value), value) for key, value in node.value)
    for each in node.value:
        for part in each if isinstance(each, tuple) else (each,):
            _require_plain(part, seen)


def flag_of(settings: type[Settings], name: str, prefix: str = "") -> str:
    alias = settings.model_fields[name].validation_alias
    return f"--{prefix}{alias or name}".replace("_", "-")


def _dest(name: str, prefix: str) -> str:
    return f"{prefix}{name}".replace("-", "_")


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that are valid; empty where others are too, and for lists of them."""
    if get_origin(field.annotation) is tuple:
        return ()
    for annotation in (field.annotation, *get_args(field.annotation)):  # one of a union: optional
        if get_origin(annotation) is Literal:
            return get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, Enum):
            return tuple(each.value for each in annotation)
    return ()


def range_of(field: FieldInfo) -> str:
    """The numbers that are valid; empty where there are no limits."""
    limits = {
        name: f"{limit:g}" if isinstance(limit, float) and limit < 1e5 else str(int(limit))
        for rule in field.metadata
        for name in _LIMITS
        if (limit := getattr(rule, name, None)) is not None
    }
    if "gt" in limits:
        return f"more than {limits['gt']}" + (f", at most {limits['le']}" if "le" in limits else "")
    if "ge" in limits:
        return f"{limits['ge']} to {limits['le']}" if "le" in limits else f"{limits['ge']} or more"
    return ""


def _metavar(field: FieldInfo) -> str:
    if choices := choices_of(field):
        return f"{{{','.join(choices)}}}"
    kinds = (field.annotation, *get_args(field.annotation))
    return next((_METAVARS[kind] for kind in kinds if kind in _METAVARS), "TEXT")


def _help(field: FieldInfo) -> str:
    text, default = field.description or "", field.default
    if "(default:" in text or field.is_required() or default is False or default in (None, "", ()):
        return text
    listed = default if isinstance(default, tuple) else (default,)
    return f"{text} (default: {','.join(map(_default, listed))})"


def _default(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _explained(error: ValidationError, settings: type[BaseModel], flags: Mapping[str, str]) -> str:
    """What is wrong, one sentence for every setting that is."""
    sentences = []
    for found in error.errors(include_url=False):
        first = str(found["loc"][0]) if found["loc"] else ""
        name = flags.get(first) or ".".join(part for part in found["loc"] if isinstance(part, str))
        if found["type"] == "extra_forbidden":
            known = ", ".join(settings.model_fields)
            sentences.append(f"unknown setting {name!r}; choose from {known}")
        else:
            field = settings.model_fields.get(first)
            sentences.append(_sentence(found, name, field, is_typed=first in flags))
    return "; ".join(sentences)


def _sentence(found: Any, name: str, field: FieldInfo | None, *, is_typed: bool) -> str:
    """One error of pydantic's, about the setting or flag ``name``."""
    kind, valid = str(found["type"]), range_of(field) if field else ""
    if kind == "value_error":
        cause = str(found["ctx"]["error"])
        return f"{name}: {cause}" if name else cause
    if kind == "missing":
        return f"{name} is missing"
    if kind == "too_short":
        return f"{name} must name at least one"
    if kind.startswith("int_"):
        rule = "must be a whole number" + (f", {valid}" if valid else "")
    elif kind.startswith("float_") or kind == "finite_number":
        rule = "must be a number" + (f", {valid}" if valid else "")
    elif valid and kind.startswith(("greater_", "less_")):
        rule = f"must be {valid}"
    else:
        rule = found["msg"].replace("Input should be", "must be", 1)
    text = str(found["input"])
    shown = text if is_typed and text and text.isprintable() else repr(found["input"])
    return f"{name} = {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'} {rule}"
