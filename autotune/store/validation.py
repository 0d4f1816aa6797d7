"""The checks that every record passes: when it comes from a file or a row, and before it is
written.
"""

import datetime
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ...core.shapes import parse
from .config_aliases import current_text
from .records import (
    STATUSES,
    WEIGHTS,
    BestConfig,
    Finalist,
    Gpu,
    Trial,
    TunedConfig,
    Workload,
    now,
)

TEXT_LIMIT = 4096  # maximum characters of any text

Fields = dict[str, Any]  # a record as in JSON, with its GPU by key


class Columns(Protocol):
    """A row of a database, or a mapping."""

    def __getitem__(self, name: str, /) -> Any: ...
    def keys(self) -> Iterable[str]: ...


class _Rule(NamedTuple):
    expected: str
    holds: Callable[[Any], bool]


def _is_text(value: object, least: int = 0) -> bool:
    if type(value) is not str or not least <= len(value) <= TEXT_LIMIT:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value: object, low: float, high: float) -> bool:
    """Returns whether it is an int or a float (NumPy's float64 is one) within these bounds; NaN
    never is.
    """
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high


def _is_date(value: object) -> bool:
    if not _is_text(value) or not _DATE.fullmatch(str(value)):
        return False
    try:
        datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return False
    return True


def _integer(least: int, most: int = 1 << 48) -> _Rule:
    return _Rule(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _matching(expected: str, pattern: str) -> _Rule:
    found = re.compile(pattern, re.ASCII)
    return _Rule(expected, lambda value: _is_text(value) and found.fullmatch(value) is not None)


def _optional(rule: _Rule) -> _Rule:
    return _Rule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(\+00:00|Z)", re.ASCII)
_text = _Rule(f"text of at most {TEXT_LIMIT} characters", _is_text)
_name = _Rule(f"text of 1 to {TEXT_LIMIT} characters", lambda value: _is_text(value, 1))
_kernel = _matching("a kernel's name, of a-z, 0-9, _ and .", r"[a-z0-9_.]+")
_config = _matching("name=value,... of A-Z, a-z, 0-9, _ . and -", r"(\w+=[\w.-]*(,\w+=[\w.-]*)*)?")
_date = _Rule("a time such as 2026-01-31T12:00:00+00:00", _is_date)
_day = _Rule(
    f"a day such as 2026-01-31, nothing, or {_date.expected}",
    lambda value: value == "" or _is_date(value) or _is_date(f"{value}T00:00:00Z"),
)
_positive = _Rule("a number above 0, at most 1e15", lambda value: _is_number(value, 5e-324, 1e15))
_not_negative = _Rule("a number from 0 to 1e15", lambda value: _is_number(value, 0, 1e15))
_count = _integer(0)
_size = _integer(1)
_flag = _Rule("true or false", lambda value: type(value) is bool)

# The fields of a workload that every file has.
_PLAIN_WORKLOAD = {
    **dict.fromkeys(("M", "N", "K"), _size),
    **dict.fromkeys(("dtype", "out_dtype", "layout"), _name),
}
WORKLOAD = {
    **_PLAIN_WORKLOAD,
    "weights": _Rule(
        f"one of {', '.join(WEIGHTS)}", lambda value: type(value) is str and value in WEIGHTS
    ),
    "epilogue": _text,
    "grouping": _text,
}
# The fields that a workload of an older version lacks, with their values there. Files omit them
# where they have these values, so that an older version can still read those files.
NEW_IN_WORKLOAD = {"weights": "warm", "epilogue": "", "grouping": ""}
_GPU = {
    "name": _name,
    "arch": _count,
    "sms": _count,
    "power_limit_w": _optional(_not_negative),
    **dict.fromkeys(("driver", "cuda", "torch", "triton", "dsl"), _optional(_text)),
}
_OF_A_SWEEP = {
    "gpu": _name,
    "workload": _Rule("an object", lambda value: type(value) is dict),
    "kernel": _kernel,
    "source": _text,
    "config": _config,
}
_TRIAL = {
    **_OF_A_SWEEP,
    "status": _Rule(
        f"one of {', '.join(STATUSES)}", lambda value: type(value) is str and value in STATUSES
    ),
    "reason": _text,
    **dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high"), _optional(_positive)),
    **dict.fromkeys(("clock_mhz", "predicted_us", "compile_s"), _optional(_not_negative)),
    "when": _date,
}
_FIGURES = dict.fromkeys(("us", "ratio", "ratio_low", "ratio_high"), _positive)
_FINALIST = {"kernel": _kernel, "config": _config, **_FIGURES}
_confidence = _optional(_Rule("a number from 0 to 1", lambda value: _is_number(value, 0, 1)))
_WINNER = {
    **_OF_A_SWEEP,
    **_FIGURES,
    "cublas_us": _positive,
    "rounds": _integer(1),
    "runner_up": _config,
    **dict.fromkeys(("lead", "lead_low", "lead_high"), _optional(_positive)),
    "confidence": _confidence,
    "separated": _flag,
    "screened": _count,
    "valid": _count,
    "finalists": _Rule(
        "a list of at most 10000", lambda value: type(value) is list and len(value) <= 10000
    ),
    "when": _date,
}
_TUNED = {name: _WINNER[name] for name in ("kernel", "config", "us", "ratio", "when")}
_workload = _matching(
    "a workload such as 16x4096x4096 float16 to float32 nt",
    r"\d{1,15}(x\d{1,15}x\d{1,15})?( \w+( to \w+)? \w+)?",
)
_list = _Rule("a list", lambda value: type(value) is list)
# The fields of a kernel in a table of version 2, and the columns of its rows.
KERNEL_VERSION_2 = {"kernel": _kernel, "base": _config, "entries": _list}
ROW_VERSION_2 = {
    "workload": _workload,
    "changes": _config,
    **_FIGURES,
    "confidence": _confidence,
    "when": _day,
}
TABLE_ENTRY = {
    "workload": _OF_A_SWEEP["workload"],
    "kernel": _kernel,
    "config": _config,
    **_FIGURES,
    "confidence": _confidence,
    "when": _day,
}


def gpu_of(fields: object, place: str) -> Gpu:
    """Returns a GPU. Like all functions below, raises ValueError that names the field and its
    place.
    """
    return Gpu(**checked(fields, _GPU, place))


def trial_of(fields: object, place: str, gpus: Mapping[str, Gpu]) -> Trial:
    """Returns a trial from the result of `fields_of`; `gpus` are by key."""
    valid = _placed(checked(fields, _TRIAL, place), place, gpus)
    if valid["status"] == "ok" and valid["us"] is None:
        raise ValueError(f"{place}.us is None, expected a number where status is 'ok'")
    for name in _FIGURES:
        if valid["status"] != "ok" and valid[name] is not None:
            raise ValueError(
                f"{place}.{name} is {valid[name]}, expected null where status is "
                f"{valid['status']!r}"
            )
    return Trial(**_with_current_names(valid))


def best_config_of(fields: object, place: str, gpus: Mapping[str, Gpu]) -> BestConfig:
    """Returns a winner from the result of `fields_of`; `gpus` are by key."""
    valid = _placed(checked(fields, _WINNER, place), place, gpus)
    finalists = [
        checked(each, _FINALIST, f"{place}.finalists[{i}]")
        for i, each in enumerate(valid["finalists"])
    ]
    valid["finalists"] = tuple(Finalist(**_with_current_names(each)) for each in finalists)
    return BestConfig(**_with_current_names(valid, ("config", "runner_up")))


def holds(row: Columns, names: Iterable[str]) -> bool:
    """Returns whether these columns of a winner's row are valid."""
    return all(_WINNER[name].holds(row[name]) for name in names)


def tuned_of(row: Columns, gpus: Mapping[str, Gpu]) -> TunedConfig:
    """Returns what a lookup needs of a winner. Only the columns that hold it are checked."""
    for name, rule in _TUNED.items():
        if not rule.holds(row[name]):
            raise ValueError(f"{name} is {shown(row[name])}, expected {rule.expected}")
    workload = Workload(
        *(row[name] for name in WORKLOAD)
    )  # this checks everything except the upper limit of a size
    if not all(_size.holds(size) for size in workload.shape):
        raise ValueError(
            f"workload is {workload}, expected sizes of which each is {_size.expected}"
        )
    fields = _with_current_names({name: row[name] for name in _TUNED})
    return TunedConfig(gpu=gpus[row["gpu"]], workload=workload, **fields)


def fields_of(record: Trial | BestConfig) -> Fields:
    """Returns a record as in JSON: its GPU by key, a reason that is too long cut, and dated now if
    it has no date.
    """
    # vars instead of asdict, which copies deeply and takes ten times as long
    fields = {**vars(record), "gpu": record.gpu.key, "workload": workload_fields(record.workload)}
    fields["when"] = record.when or now()
    if isinstance(record, Trial):
        fields["reason"] = _shortened(record.reason)
    else:
        fields["finalists"] = [{**vars(each)} for each in record.finalists]
    return fields


def checked_fields(record: Trial | BestConfig, place: str) -> Fields:
    """Returns `fields_of` a record, with the current names of config fields. Raises ValueError for
    a record that could not be read again.
    """
    fields = fields_of(record)
    gpus = {fields["gpu"]: gpu_of({**vars(record.gpu)}, f"{place}.gpu")}
    parse = trial_of if isinstance(record, Trial) else best_config_of
    return fields_of(parse(fields, place, gpus))


def checked(fields: object, rules: Mapping[str, _Rule], place: str) -> Fields:
    """Returns a copy of `fields`, which must have exactly the fields of `rules`, with valid
    values.
    """
    if type(fields) is not dict:
        raise ValueError(f"{place} is {shown(fields)}, expected an object")
    check_names(fields, rules, place)
    for name, rule in rules.items():
        if not rule.holds(fields[name]):
            raise ValueError(f"{place}.{name} is {shown(fields[name])}, expected {rule.expected}")
    return dict(fields)


def checked_row(values: object, rules: Mapping[str, _Rule], place: str) -> Fields:
    """Does what `checked` does for values in the order of `rules`."""
    if type(values) is not list or len(values) != len(rules):
        raise ValueError(f"{place} is {shown(values)}, expected a list of {', '.join(rules)}")
    return checked(dict(zip(rules, values, strict=True)), rules, place)


def check_names(fields: Fields, names: Iterable[str], place: str) -> None:
    """Raises ValueError unless exactly these fields are present."""
    for name in names:
        if name not in fields:
            raise ValueError(f"{place} has no {name}")
    for name in fields.keys() - set(names):
        raise ValueError(f"{place} has {shown(name)}, expected only {', '.join(names)}")


def once(pairs: list[tuple[str, Any]]) -> Fields:
    """Builds a JSON object, for `json.loads`. Raises ValueError for a field that occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field occurs twice, one of {shown([name for name, _ in pairs])}")
    return fields


def _placed(fields: Fields, place: str, gpus: Mapping[str, Gpu]) -> Fields:
    """Returns the fields with the GPU and the workload as records."""
    gpu = gpus.get(fields["gpu"])
    if gpu is None:
        raise ValueError(
            f"{place}.gpu is {shown(fields['gpu'])}, expected the key of a GPU that is listed"
        )
    return fields | {
        "gpu": gpu,
        "workload": checked_workload(fields["workload"], f"{place}.workload"),
    }


def _with_current_names(fields: Fields, names: Iterable[str] = ("config",)) -> Fields:
    """Returns valid fields of a record of one kernel, with the current names of its configs'
    fields.
    """
    kernel = fields["kernel"]
    return fields | {name: current_text(kernel, fields[name]) for name in names}


def workload_fields(workload: Workload) -> Fields:
    """Returns a workload as files have it, without the fields that a plain product does not
    need.
    """
    fields = {**vars(workload)}
    for name, plain in NEW_IN_WORKLOAD.items():
        if fields[name] == plain:
            del fields[name]
    return fields


def checked_workload(fields: object, place: str) -> Workload:
    """Returns a workload from the result of `workload_fields`, of this version or an older one.
    Raises ValueError.
    """
    there = fields if type(fields) is dict else {}
    new = {name: WORKLOAD[name] for name in NEW_IN_WORKLOAD if name in there}
    return workload_of(checked(fields, {**_PLAIN_WORKLOAD, **new}, place), place)


def workload_of(fields: Fields, place: str) -> Workload:
    """Returns a workload from the fields of `WORKLOAD`, or of a plain one. Raises the errors of
    `Workload`, with the place.
    """
    try:
        return Workload(**fields)
    except ValueError as error:
        raise ValueError(f"{place}.{error}") from None


def workload_in(text: str, place: str) -> Workload:
    """Returns a workload from a text of the form of `ENTRY`, which `str` makes of a workload.
    Raises the errors of `workload_of`.
    """
    shape, dtype, *to, layout = text.split(" ")
    sizes = dict(zip("MNK", parse(shape)[0], strict=True))
    found = workload_of(
        {**sizes, "dtype": dtype, "out_dtype": to[-1] if to else "", "layout": layout}, place
    )
    checked({**vars(found)}, WORKLOAD, place)
    return found


def _shortened(text: str) -> str:
    """Shortens a text to what can be read again: valid UTF-8 within the limit."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= TEXT_LIMIT else whole[: TEXT_LIMIT - 1] + "…"


def shown(value: object) -> str:
    """Formats a value for messages, always short."""
    return reprlib.repr(value)
