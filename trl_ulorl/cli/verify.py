"""`trl-ulorl verify`: judge a file of outputs and references by rules."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .inputs import check_output

if TYPE_CHECKING:
    from ..rewards import Verdict

_DESCRIPTION = """
Compare outputs with references by rules: each row of the input holds `prediction`, a model's whole output, and
`reference`, a short answer or a solution that ends in one. The same lines come out with `verdict` (1 equal, 0 different,
null not decided) and `stage` (what decided). The exit code is 0 whatever the verdicts are.
"""
_EXAMPLE = """
example
  trl-ulorl verify outputs.jsonl --output judged.jsonl --compare
"""
_BATCH = 200


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        help="judge answers by rules",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "cases",
        type=Path,
        metavar="CASES.jsonl",
        help="rows with `prediction` and `reference`; or .json, .parquet, .csv",
    )
    parser.add_argument(
        "--output", type=Path, metavar="OUT.jsonl", help="write the judged lines there (default: standard output)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="as in training: an output that marks no answer has none"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show the lines that math-verify, given a boxed reference, judges differently",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code; what fails after the input was read is raised."""
    try:
        cases = _read_cases(options.cases)
        _check(options)
    except ValueError as error:
        sys.stderr.write(f"trl-ulorl verify: {error}\n")
        return 2
    judged = []
    report = sys.stdout if options.output else sys.stderr
    with _lines(options.output) as lines:
        for case, verdict in _judged(cases, is_lenient=not options.strict):
            case = case | {"verdict": _value(verdict.equivalent), "stage": verdict.stage}
            lines.write(json.dumps(case, default=str) + "\n")
            judged.append(verdict)
    if options.output:
        _part(options.output).replace(options.output)
    report.write(_summary(judged))
    if options.compare:
        _compare(cases, judged, report)
    return 0


def _value(equivalent: bool | None) -> int | None:
    return None if equivalent is None else int(equivalent)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _lines(path: Path | None) -> Any:
    """Where the judged lines go; a file gets its name once it is whole."""
    return nullcontext(sys.stdout) if path is None else _part(path).open("w", encoding="utf-8")


def _read_cases(path: Path) -> list[dict[str, Any]]:
    from ..data.sources import read_objects

    cases = [_checked(case, place) for place, case in read_objects(path)]
    if not cases:
        raise ValueError(f"`{path}` has no lines: there is nothing to judge. Write one JSON object per line.")
    return cases


def _checked(case: dict[str, Any], place: str) -> dict[str, Any]:
    for name, types in (("prediction", str), ("reference", (str, int, float))):
        if name not in case:
            raise ValueError(f"{place} has no `{name}`: an output is compared with its reference. Rename yours to it.")
        if not isinstance(case[name], types):
            raise ValueError(  # noqa: TRY004 - the type is the file's, not the caller's
                f"{place} has `{name}` of type {type(case[name]).__name__}: it must be text"
                f"{' or a number' if name == 'reference' else ''}. Convert it."
            )
    return case


def _check(options: argparse.Namespace) -> None:
    check_output(options.output)
    if options.compare:
        from importlib.util import find_spec

        if find_spec("math_verify") is None:
            raise ValueError('`--compare` needs math-verify, which is not installed: `pip install "trl-ulorl[math]"`.')


def _judged(cases: list[dict[str, Any]], *, is_lenient: bool) -> Iterator[tuple[dict[str, Any], Verdict]]:
    from tqdm import tqdm

    from ..rewards import verify_answers

    with tqdm(total=len(cases), desc="verifying", unit="pair") as bar:
        for start in range(0, len(cases), _BATCH):
            batch = cases[start : start + _BATCH]
            pairs = [(case["prediction"], str(case["reference"])) for case in batch]
            yield from zip(batch, verify_answers(pairs, lenient=is_lenient), strict=True)
            bar.update(len(batch))


def _summary(verdicts: list[Verdict]) -> str:
    outcomes = Counter(verdict.equivalent for verdict in verdicts)
    stages = ", ".join(f"{stage} {count}" for stage, count in Counter(v.stage for v in verdicts).most_common())
    return (
        f"{len(verdicts)} pairs: {outcomes[True]} equal, {outcomes[False]} different, {outcomes[None]} undecided; "
        f"by stage: {stages}\n"
    )


def _compare(cases: list[dict[str, Any]], verdicts: list[Verdict], report: TextIO) -> None:
    """List the pairs that math-verify judges differently."""
    from tqdm import tqdm

    from .peers import Peer

    differing = []
    with Peer("math-verify, boxed reference") as peer:
        for number, (case, ours) in enumerate(tqdm([*zip(cases, verdicts, strict=True)], desc="math-verify"), 1):
            theirs = peer.verify(case["prediction"], str(case["reference"]))
            if theirs.equivalent != ours.equivalent:
                said = theirs.failure or _value(theirs.equivalent)
                differing.append(
                    f"line {number}: {_value(ours.equivalent)} ({ours.stage}), math-verify {said}: "
                    f"{_short(ours.prediction)!r} against {_short(ours.reference)!r}\n"
                )
    report.write(f"math-verify with a boxed reference judges {len(differing)} of {len(cases)} pairs differently\n")
    report.writelines(differing)


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
