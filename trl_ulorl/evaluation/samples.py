"""The samples of an evaluation in files beside its output, so that one which was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import IO, Any

from .runner import Try


class SampleFile:
    """`NAME.samples.jsonl` beside `NAME.json`: a line with the settings, then one for each try as it ends.

    Further processes write files of their own, `NAME.samples-1.jsonl` and so on; all are read at the start, whatever the
    number of processes is by then. A line that was being written when its process was killed is dropped.

    Args:
        output: Where the result will be.
        settings: All that the samples depend on, as JSON values.
        rank: This process.

    Raises:
        ValueError: If there are samples made with other settings, or there is a result without its samples.

    Attributes:
        path: This process's file.
        tries: All tries so far, without their texts, by problem and attempt.
    """

    def __init__(self, output: Path, settings: dict[str, Any], *, rank: int = 0) -> None:
        self.path = output.with_name(f"{output.stem}.samples{f'-{rank}' if rank else ''}.jsonl")
        self._settings = settings
        paths = sorted(output.parent.glob(f"{escape(output.stem)}.samples*.jsonl"))
        if output.exists() and not paths:
            raise ValueError(
                f"`--output` ({output}) exists, but the samples it was made from do not. Choose another name, or remove the "
                "file."
            )
        self.tries: dict[tuple[int, int], Try] = {}
        for path in paths:
            for each in self._read(path):
                self._add(each)
        self._file: IO[str] | None = None

    def _read(self, path: Path) -> Iterator[Try]:
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return
        try:
            records = [json.loads(line) for line in lines]
            self._check(path, records[0]["settings"])
            yield from (Try(**record) for record in records[1:])
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is no file of samples ({type(error).__name__}: {error}). Move it away, or choose another `--output`."
            ) from error

    def _check(self, path: Path, theirs: dict[str, Any]) -> None:
        differences = [
            f"`{name}` ({theirs.get(name)!r} then, {self._settings.get(name)!r} now)"
            for name in sorted({*theirs, *self._settings})
            if theirs.get(name) != self._settings.get(name)
        ]
        if differences:
            raise ValueError(
                f"{path} holds samples made with other settings: {', '.join(differences)}. Choose another `--output`, or "
                "remove the file to sample anew."
            )

    def append(self, new: Try) -> None:
        """Keep a try."""
        if self._file is None:
            self._file = self._opened()
        self._file.write(json.dumps(asdict(new), ensure_ascii=False) + "\n")
        self._file.flush()
        self._add(new)

    def _add(self, new: Try) -> None:
        # Without the text, which no figure needs: at 128k tokens each, thousands of them fill the memory.
        self.tries[new.problem, new.attempt] = replace(new, text="")

    def _opened(self) -> IO[str]:
        """Open the file behind its last whole line."""
        self.path.touch()
        with self.path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        # A lone surrogate, which a server's JSON may hold and UTF-8 can't, is written as JSON's own escape.
        opened = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        if b"\n" not in content:
            opened.write(json.dumps({"settings": self._settings}, ensure_ascii=False) + "\n")
        return opened

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
