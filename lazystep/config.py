"""All settings, with their environment variables and defaults.

Settings are read from the environment once, at import. A value that does not parse raises a `ConfigError`
that names the variable. Settings can be changed later:

    lazystep.config.settings.max_in_flight = 2
    with lazystep.config.override(source_lines=False): ...

This module imports nothing else of lazystep but the errors.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .errors import ConfigError

_PREFIX = "LAZYSTEP_"
# Variables of torch._lazy with the same meaning. If both are set, ours is used.
_ALIASES = {"max_async_queue": "LTC_MAX_ASYNC_QUEUE"}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


def _parse_flag(text: str) -> bool:
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError("expected one of 1, 0, true, false, yes, no, on, off") from None


def _positive(value: float) -> None:
    if not value > 0:
        raise ValueError("expected a number greater than 0")


def _one_of(*choices: str) -> Callable[[str], None]:
    def check(value: str) -> None:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")

    return check


def _check_period(value: str) -> None:
    if value not in ("off", "first") and not (value.isdigit() and int(value) > 0):
        raise ValueError("expected off, first or a number of runs")


def _any(value: object) -> None:
    del value


def _setting(default: Any, doc: str, parse: Callable[[str], Any], check: Callable[[Any], None]) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "parse": parse, "check": check})


# Callbacks for changed settings, for code (such as C++) that can't read the setting each time.
_watchers: dict[str, Callable[[Any], object]] = {}


@dataclasses.dataclass
class Settings:
    """All settings. Each field is read from `LAZYSTEP_<NAME IN CAPITALS>`."""

    max_in_flight: int = _setting(
        8, "Steps that may be queued or running before `mark_step` waits for a place.", int, _positive
    )
    max_instructions: int = _setting(
        20_000, "A recording of this many instructions gets an automatic barrier.", int, _positive
    )
    program_cache_size: int = _setting(
        256, "Programs kept in memory; the least recently used one goes first.", int, _positive
    )
    wait_timeout: float = _setting(
        1800.0, "Seconds that a read or barrier waits for the executor before it raises.", float, _positive
    )
    tier: str = _setting(
        "auto",
        "auto: reference first, native when built; reference: never build; native: wait for builds.",
        str,
        _one_of("auto", "reference", "native"),
    )
    build_after: int = _setting(3, "A program is built when it has run this many times.", int, _positive)
    families: bool = _setting(
        True, "Build one library for programs that differ in sizes only.", _parse_flag, _any
    )
    max_libraries: int = _setting(
        32, "Libraries loaded at once; programs beyond stay on the reference executable.", int, _positive
    )
    check_native: str = _setting(
        "first",
        "Compare native results with the reference: off, first (run of a library), or every N runs.",
        str,
        _check_period,
    )
    tune_threads: bool = _setting(
        True, "Run a library on one thread where that turns out to be faster.", _parse_flag, _any
    )
    keep_memory: bool = _setting(
        True,
        "Keep memory that native steps free for the next ones, instead of giving it back to the system.",
        _parse_flag,
        _any,
    )
    build_timeout: float = _setting(
        900.0, "Seconds that one build may take before it is given up.", float, _positive
    )
    cache_dir: str = _setting("", "Where libraries are kept; empty: the user's cache directory.", str, _any)
    header_dir: str = _setting(
        "", "Where precompiled headers are kept; empty: in the directory of libraries.", str, _any
    )
    cache_size: int = _setting(
        2_000_000_000, "Bytes of libraries kept on disk; the least recently used go first.", int, _positive
    )
    max_async_queue: int = _setting(
        100,
        "Async closures that may wait for the worker. `LTC_MAX_ASYNC_QUEUE` is honoured, too.",
        int,
        _positive,
    )
    async_queue_policy: str = _setting(
        "wait",
        "When that queue is full: wait, drop_oldest, drop_newest or raise.",
        str,
        _one_of("wait", "drop_oldest", "drop_newest", "raise"),
    )
    exit_timeout: float = _setting(
        10.0, "Seconds that the end of the process waits for queued steps.", float, _positive
    )
    source_lines: bool = _setting(
        True, "Keep the user's file and line of each instruction, for errors.", _parse_flag, _any
    )
    verify_programs: bool = _setting(
        False, "Check a program's invariants after every transformation (on in tests).", _parse_flag, _any
    )

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.__dataclass_fields__.get(name)
        if field is None:
            known = ", ".join(self.__dataclass_fields__)
            raise ConfigError(f"there is no setting {name!r}; the settings are {known}")
        kind = type(field.default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (isinstance(value, kind) or (kind is float and is_number)) or (
            kind is int and isinstance(value, bool)
        ):
            raise ConfigError(f"{name} = {value!r}: expected {kind.__name__}, got {type(value).__name__}")
        try:
            field.metadata["check"](value)
        except ValueError as error:
            raise ConfigError(f"{name} = {value!r} (variable {variable(name)}): {error}") from None
        super().__setattr__(name, value)
        if name in _watchers:
            _watchers[name](value)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Settings with every `LAZYSTEP_*` variable of `environ` applied."""
        values = {}
        for field in dataclasses.fields(cls):
            source = variable(field.name)
            if source not in environ:
                source = _ALIASES.get(field.name, source)
            text = environ.get(source)
            if text is None:
                continue
            try:
                values[field.name] = field.metadata["parse"](text)
                field.metadata["check"](values[field.name])
            except ValueError as error:
                raise ConfigError(f"{source}={text!r}: {error}") from None
        return cls(**values)


def variable(name: str) -> str:
    """The environment variable of a setting: `variable("max_in_flight")` is `LAZYSTEP_MAX_IN_FLIGHT`."""
    return _PREFIX + name.upper()


def watch(name: str, callback: Callable[[Any], object]) -> None:
    """Call `callback` with the value of a setting now, and whenever it changes."""
    _watchers[name] = callback
    callback(getattr(settings, name))


def describe() -> str:
    """A table of all settings: environment variable, current value, meaning."""
    rows = []
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        rows.append(f"{variable(field.name):<30} {value!s:<8} {field.metadata['doc']}")
    return "\n".join(rows)


@contextmanager
def override(**values: Any) -> Iterator[Settings]:
    """Change settings for all threads inside a `with` block, and restore them afterwards.

    For example:

        with lazystep.config.override(tier="reference"):
            train()
    """
    saved = {name: getattr(settings, name, None) for name in values}
    try:
        for name, value in values.items():
            setattr(settings, name, value)
        yield settings
    finally:
        for name, value in saved.items():
            if value is not None:
                setattr(settings, name, value)


settings = Settings.from_environ(os.environ)
