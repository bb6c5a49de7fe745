"""Settings that are stated once: flags, their help, JSON and errors follow from a class's fields.

A field's name is its flag's, with underscores, unless ``validation_alias`` says otherwise. Its
``json_schema_extra`` is what argparse takes beside; ``{"flag": False}``: it has no flag.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import parse_object, read_text

__all__ = [
    "Directory",
    "Each",
    "Listed",
    "Names",
    "Seconds",
    "Settings",
    "Shown",
    "Url",
    "flag_of",
    "range_of",
    "read_settings",
    "words_of",
]

Self = TypeVar("Self", bound="Settings")
_OF_FLAGS = ConfigDict(allow_inf_nan=False)  # not strict: they are text
_SHOWN = 80  # characters of a wrong value, at most
_LIMITS = ("ge", "gt", "le")


def words_of(given: object) -> object:
    """Texts, as one flag or several give them, as the words that commas separate in them.

    Whatever else is given stays as it is.
    """
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        given = ",".join(given)
    if not isinstance(given, str):
        return given
    return tuple(word.strip() for word in given.split(",") if word.strip())


@dataclass(frozen=True)
class Shown:
    """How help shows a flag's value, in the annotation of a field."""

    metavar: str


Directory = Annotated[Path, Shown("DIR")]
Url = Annotated[str, Shown("URL")]
Listed = BeforeValidator(words_of)  # of a tuple, which a flag gives as N,N,...
Each = AfterValidator(lambda given: tuple(dict.fromkeys(given)))  # counted once
Names = Annotated[tuple[Annotated[str, Shown("NAME")], ...], Listed, Each]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600), Shown("SECONDS")]


class Settings(BaseModel):
    """Settings whose errors are ConfigErrors that name the setting, the value and the range."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )

    def __init__(self, /, **values: Any) -> None:
        """Raises ConfigError for unknown settings and bad values."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explained(error, type(self))) from None
        except UnicodeError as error:  # half of a character, which JSON can hold
            raise ConfigError(f"a setting is not text: {error}") from None

    @classmethod
    def add_flags(cls, group: Any, prefix: str = "") -> None:
        """Add ``--`` ``prefix`` and its name for every setting to an argparse parser or group.

        A flag that is not given is None, so that the schema's own default holds.
        """
        for name, field in cls.model_fields.items():
            extra: dict[str, Any] = dict(field.json_schema_extra or {})  # type: ignore[arg-type]
            if not _has_flag(field):
                continue
            if field.annotation is bool:
                extra = {"action": "store_true", "default": None, **extra}
            else:
                required = field.is_required()
                extra = {"metavar": _metavar(field), "required": required, **extra}
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
        values = dict(beneath or {})
        for name, field in cls.model_fields.items():
            given = getattr(arguments, _dest(name, prefix), None)
            if given is None or not _has_flag(field):
                continue
            try:
                adapter: Any = TypeAdapter(field.rebuild_annotation(), config=_OF_FLAGS)
                values[name] = adapter.validate_python(given)
            except ValidationError as error:
                flag = flag_of(cls, name, prefix)
                found = error.errors(include_url=False)[0]
                raise ConfigError(_sentence(found, flag, field, _as_typed)) from None
        return cls(**values)

    def replace(self: Self, **changes: Any) -> Self:
        """The same settings with ``changes``. Raises ConfigError."""
        return type(self)(**{**self.model_dump(), **changes})

    def to_json(self) -> str:
        """These settings as one line of JSON."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def read_settings(path: Path) -> dict[str, Any]:
    """Settings by name out of a JSON or YAML file. Raises ConfigError.

    ``off`` and ``on`` are words, as in YAML 1.2: one of them is a policy.
    """
    text = read_text(path, "the file of settings")
    if path.suffix == ".json":
        return parse_object(text, str(path))
    try:
        import yaml  # engines bring it; nothing else here needs it
    except ModuleNotFoundError:
        raise ConfigError(f"{path} is not .json, and YAML needs `pip install pyyaml`") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
            first: [rule for rule in rules if first in "tTfF" or not rule[0].endswith(":bool")]
            for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        values = yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {reason}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{path} must hold settings by name, as slots: 2")
    return values


def flag_of(settings: type[Settings], name: str, prefix: str = "") -> str:
    """The flag of a setting."""
    alias = settings.model_fields[name].validation_alias
    return f"--{prefix}{alias or name}".replace("_", "-")


def _has_flag(field: FieldInfo) -> bool:
    return field.json_schema_extra != {"flag": False}


def _dest(name: str, prefix: str) -> str:
    return f"{prefix}{name}".replace("-", "_")


def range_of(field: FieldInfo) -> str:
    """The numbers that are valid, of a tuple each; empty where there are no limits."""
    limits = {
        name: f"{limit:g}" if isinstance(limit, float) and limit < 1e5 else str(int(limit))
        for rule in (*field.metadata, *_rules(field.annotation))
        for name in _LIMITS
        if (limit := getattr(rule, name, None)) is not None
    }
    if "gt" in limits:
        most = f", at most {limits['le']}" if "le" in limits else ""
        return f"more than {limits['gt']}{most}"
    if "ge" in limits:
        return f"{limits['ge']} to {limits['le']}" if "le" in limits else f"{limits['ge']} or more"
    return ""


def _rules(annotation: Any) -> Iterator[Any]:
    """What the fields in ``annotation`` say, those of a tuple's numbers too."""
    for rule in getattr(annotation, "__metadata__", ()):
        yield from rule.metadata if isinstance(rule, FieldInfo) else [rule]
    for part in get_args(annotation):
        yield from _rules(part)


def _help(field: FieldInfo) -> str:
    text, default = field.description or "", field.default
    if "(default:" in text or field.is_required() or default in (None, "", False, ()):
        return text
    listed = default if isinstance(default, tuple) else (default,)
    return f"{text} (default: {','.join(map(_default, listed))})"


def _default(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metavar(field: FieldInfo) -> str:
    shown = (rule for rule in field.metadata if isinstance(rule, Shown))
    return next(shown, Shown(_metavar_of(field.annotation))).metavar


def _metavar_of(annotation: Any) -> str:
    """By the type, unless the annotation says otherwise."""
    for rule in getattr(annotation, "__metadata__", ()):
        if isinstance(rule, Shown):
            return rule.metavar
    parts = [part for part in get_args(annotation) if part not in (type(None), ...)]
    if get_origin(annotation) is Literal:
        return f"{{{','.join(parts)}}}"
    if get_origin(annotation) is tuple:
        return f"{_metavar_of(parts[0])},..."
    if get_origin(annotation) is not None:  # Annotated, or one that may be None
        return _metavar_of(parts[0])
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"{{{','.join(each.value for each in annotation)}}}"
    return {int: "N", float: "X", Path: "FILE"}.get(annotation, "TEXT")


def _explained(error: ValidationError, settings: type[BaseModel]) -> str:
    """What is wrong, one sentence for every setting that is."""
    sentences = []
    for found in error.errors(include_url=False):
        first = str(found["loc"][0]) if found["loc"] else ""
        name = ".".join(str(part) for part in found["loc"] if isinstance(part, str))
        if found["type"] == "extra_forbidden":
            known = ", ".join(settings.model_fields)
            sentences.append(f"unknown setting {name!r}; choose from {known}")
        else:
            sentences.append(_sentence(found, name, settings.model_fields.get(first), repr))
    return "; ".join(sentences)


def _sentence(found: Any, name: str, field: FieldInfo | None, show: Callable[[Any], str]) -> str:
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
    shown = show(found["input"])
    return f"{name} = {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'} {rule}"


def _as_typed(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() else repr(text)
