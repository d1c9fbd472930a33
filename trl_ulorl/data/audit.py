"""The audit of a cleaning: the last files put together, counts and samples by rule, and a page that a person can read."""

from __future__ import annotations

import html
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .chunks import KEPT
from .duplicates import KIND_CONTRADICTION, KIND_NEAR, KIND_NONE, KIND_SAME, Rows

RULES = {
    "missing": "There is no question, or no reference.",
    "short_answer": "The short answer is taken out of a longer reference.",
    "multiple_choice": "Multiple choice: the option that is the answer becomes the reference, the options go.",
    "multi_part": "The question asks for several things.",
    "proof": "The question asks for a proof.",
    "true_false": "The question asks for yes or no, true or false, or one of two.",
    "overlong": "The reference is too long to compare, a matrix or a system.",
    "leakage": "The question stands in an evaluation set.",
    "duplicate": "An earlier row asks the same, or nearly.",
    "contradiction": "Rows ask the same and give different answers, so that one of them at least is wrong.",
    "too_easy": "A model answers it correctly every time.",
    "wrong_reference": "Models agree with each other and not with the reference.",
}
MODEL_RULES = ("too_easy", "wrong_reference")

_SAMPLES = 25  # of each rule and action on the page


def write_deduplicated(folder: Path, rows: Rows, fates: Any, answers: Mapping[int, str], num_chunks: int) -> None:
    """Put the chunks' files together as `kept.jsonl` and `audit.jsonl` of the working folder, without duplicates.

    Args:
        folder: The working folder.
        rows: Those that the chunks have left.
        fates: What became of each, as `find_duplicates` returns it.
        answers: By place the answers of contradicted questions.
        num_chunks: How many there are.
    """
    numbers, offsets, lengths = (rows.column(name) for name in ("row", "offset", "length"))
    with (folder / "kept.jsonl").open("wb") as kept, (folder / "audit.jsonl").open("wb") as audit:
        for chunk in range(num_chunks):
            here = slice(int(rows.starts[chunk]), int(rows.starts[chunk + 1]))
            content = memoryview((folder / f"rows-{chunk}.jsonl").read_bytes())
            log = (folder / f"audit-{chunk}.jsonl").read_bytes()
            dropped: dict[int, dict[str, Any]] = {}
            end = 0
            for place in (here.start + np.flatnonzero(fates["kind"][here] != KIND_NONE)).tolist():
                start, length = int(offsets[place]), int(lengths[place])
                kept.write(content[end:start])
                end = start + length
                line = bytes(content[start:end])
                dropped[int(numbers[place])] = _duplicate_event(fates[place], numbers, answers.get(place, ""), line)
            kept.write(content[end:])
            audit.writelines(_with_drops(log, dropped))


def _duplicate_event(fate: Any, numbers: Any, answers: str, line: bytes) -> dict[str, Any]:
    from .duplicates import question_of

    row = json.loads(line)
    if fate["kind"] == KIND_CONTRADICTION:
        rule, reason = "contradiction", f"rows with this question give different answers: {answers}"
    else:
        rule, other = "duplicate", numbers[fate["of"]]
        reason = {
            KIND_SAME: f"row {other} asks the same",
            KIND_NEAR: f"row {other} asks nearly the same: equal formulas and answer, {fate['similarity']:.0%} of the words",
        }[int(fate["kind"])]
    before = {"question": question_of(row), "answer": row["answer"]}
    return {"rule": rule, "action": "dropped", "reason": reason, "before": before, "after": None}


def _with_drops(log: bytes, dropped: Mapping[int, dict[str, Any]]) -> Iterator[bytes]:
    """Replace the fates of dropped rows, ascending: a "kept" or "pending" goes, a "changed" stays and is followed."""
    end = 0
    for row, entry in dropped.items():
        head = b'{"row": %d,' % row
        start = end if log.startswith(head, end) else log.index(b"\n" + head, end) + 1
        yield log[end:start]
        end = start
        while log.startswith(head, end):
            start, end = end, log.index(b"\n", end) + 1
            if b'"action": "changed"' in _head(log[start:end]):
                yield log[start:end]
        yield _line(row, entry)
    yield log[end:]


def _row_of(line: bytes) -> int:
    """Read the number of a line without reading the line."""
    return int(line[len(b'{"row": ') : line.index(b",")])


def _line(row: int, entry: Mapping[str, Any]) -> bytes:
    return (json.dumps({"row": row, **entry}, ensure_ascii=False) + "\n").encode()


def rewrite_fates(folder: Path, entries: Mapping[int, list[dict[str, Any]]], changed: Mapping[int, bytes]) -> None:
    """Write what models decided into `kept.jsonl` and `audit.jsonl` of the working folder.

    Args:
        folder: The working folder.
        entries: New lines of the audit by row; if the last one is "dropped", the row goes.
        changed: New lines of kept.jsonl by row.
    """
    paths = {name: folder / f"{name}.jsonl" for name in ("kept", "audit")}
    new = {name: folder / f"{name}.jsonl.new" for name in paths}
    with (
        paths["kept"].open("rb") as kept,
        paths["audit"].open("rb") as audit,
        new["kept"].open("wb") as kept_out,
        new["audit"].open("wb") as audit_out,
    ):
        for row, lines in _by_row(audit):
            is_left = b'"action": "dropped"' not in _head(lines[-1])
            if is_left:
                line = next(kept)
                if row not in entries or entries[row][-1]["action"] != "dropped":
                    kept_out.write(changed.get(row, line))
            if row in entries:
                lines = [line for line in lines if b'"action": "changed"' in _head(line)]
                lines += [_line(row, entry) for entry in entries[row]]
            audit_out.writelines(lines)
    for name, path in paths.items():
        new[name].replace(path)


def _head(line: bytes) -> bytes:
    return line[:200]


def _by_row(lines: Iterable[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    current: list[bytes] = []
    number = -1
    for line in lines:
        row = _row_of(line)
        if row != number and current:
            yield number, current
            current = []
        number = row
        current.append(line)
    if current:
        yield number, current


def left_rows(folder: Path) -> Iterator[tuple[int, bool, dict[str, Any], bytes]]:
    """Yield number, whether a model is to rewrite it, last line of the audit, and line of each row that is left."""
    with (folder / "kept.jsonl").open("rb") as kept, (folder / "audit.jsonl").open("rb") as audit:
        for row, lines in _by_row(audit):
            if b'"action": "dropped"' in _head(lines[-1]):
                continue
            is_pending = b'"action": "pending"' in _head(lines[-1])
            yield row, is_pending, json.loads(lines[-1]) if is_pending else {}, next(kept)


# ----------------------------------------------------------------------------------------------------------- the summary


@dataclass
class Summary:
    """Counts of a cleaning, and samples of what its rules did.

    Args:
        rows: Rows of the input.
        kept: Rows that are kept, changed ones included.
        changed: Rows that are kept in another form.
        counts: By rule how many rows it changed and dropped.
        samples: By rule and action some lines of the audit.
    """

    rows: int = 0
    kept: int = 0
    changed: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "rows": self.rows,
            "kept": self.kept,
            "changed": self.changed,
            "dropped": self.rows - self.kept,
            "rules": {
                name: {"changed": self.counts[name]["changed"], "dropped": self.counts[name]["dropped"]}
                for name in self.counts
            },
        }


def summarize(audit: Path, rules: Iterable[str]) -> Summary:
    """Count what stands in an audit, and draw samples, the same ones every time.

    Args:
        audit: The file.
        rules: Names of the rules that were applied.
    """
    summary = Summary(counts={name: Counter() for name in RULES if name in set(rules)})
    draw = random.Random(0)
    kept_tail = KEPT.format(row=0).encode().partition(b",")[2]  # no text ends so: it stands in quotes

    def found() -> Iterator[bytes]:
        for line in file:
            if line.endswith(kept_tail):
                summary.rows += 1
                summary.kept += 1
            else:
                yield line

    with audit.open("rb") as file:
        for _, lines in _by_row(found()):
            summary.rows += 1
            entries = [json.loads(line) for line in lines]
            is_dropped = entries[-1]["action"] == "dropped"
            summary.kept += not is_dropped
            summary.changed += not is_dropped
            for entry in entries:
                summary.counts[entry["rule"]][entry["action"]] += 1
                _sample(summary, entry, draw)
    for chosen in summary.samples.values():
        chosen.sort(key=lambda entry: entry["row"])
    return summary


def _sample(summary: Summary, entry: dict[str, Any], draw: random.Random) -> None:
    chosen = summary.samples.setdefault((entry["rule"], entry["action"]), [])
    seen = summary.counts[entry["rule"]][entry["action"]]
    if len(chosen) < _SAMPLES:
        chosen.append(entry)
    elif (place := draw.randrange(seen)) < _SAMPLES:
        chosen[place] = entry


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Audit of a cleaning</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }}
table {{ border-collapse: collapse; width: 100%; }} td, th {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
details {{ margin: 1rem 0; }} summary {{ cursor: pointer; font-weight: 600; }}
article {{ border-left: 3px solid #999; margin: 1rem 0; padding: 0 1rem; }} article.changed {{ border-color: #2a7; }} article.dropped {{ border-color: #c33; }}
pre {{ white-space: pre-wrap; background: #f5f5f5; padding: .5rem; margin: .3rem 0; font-size: 14px; }} .label {{ color: #666; font-size: 14px; }}
</style></head><body>
<h1>Audit of a cleaning</h1>
<p>Of {rows:,} rows {kept:,} are kept, {changed:,} of them in another form; {dropped:,} are dropped. Every row has its lines in
audit.jsonl. Rows are counted from 0.</p>
<p class="label">{source}</p>
<table><tr><th>rule</th><th>what it is for</th><th class="n">changed</th><th class="n">dropped</th></tr>
{table}
</table>
{sections}
</body></html>
"""


def page(summary: Summary, source: str) -> str:
    """Return the audit as a page of HTML that needs nothing else.

    Args:
        summary: Counts and samples.
        source: What was cleaned and with which settings, for the head of the page.
    """
    table = "\n".join(
        f'<tr><td>{name}</td><td>{RULES[name]}</td><td class="n">{count["changed"]:,}</td><td class="n">{count["dropped"]:,}</td></tr>'
        for name, count in summary.counts.items()
    )
    sections = [
        _section(name, action, summary.counts[name][action], summary.samples[name, action])
        for name in summary.counts
        for action in ("changed", "dropped")
        if (name, action) in summary.samples
    ]
    return _PAGE.format(
        rows=summary.rows,
        kept=summary.kept,
        changed=summary.changed,
        dropped=summary.rows - summary.kept,
        source=html.escape(source),
        table=table,
        sections="\n".join(sections),
    )


def _section(name: str, action: str, count: int, samples: list[dict[str, Any]]) -> str:
    shown = f"{count:,}" if len(samples) == count else f"{count:,}, of which {len(samples)} drawn at random"
    articles = "\n".join(_article(entry) for entry in samples)
    return f"<details open><summary>{name}: {action}, {shown}</summary>\n{articles}\n</details>"


def _article(entry: dict[str, Any]) -> str:
    parts = [f"<p><b>Row {entry['row']}</b>: {html.escape(entry['reason'])}</p>"]
    before, after = entry["before"] or {}, entry["after"] or {}
    for label, texts, others in (("before", before, {}), ("after", after, before)):
        for name in ("question", "answer"):
            if name in texts and texts[name] != others.get(name):
                parts.append(f'<span class="label">{name} {label}</span><pre>{html.escape(texts[name])}</pre>')
    return f'<article class="{entry["action"]}">{"".join(parts)}</article>'
