"""How fast the rules of `trl-ulorl clean` are that need no model, and whether memory grows with the rows.

A million short rows are made up from templates (word problems, formulas, multiple choice, proofs, yes or no; one in
twenty repeats an earlier one, one in fifty nearly) and cleaned with two processes, compared with an evaluation set of 100
problems. A tenth of the rows is cleaned first: what the memory grows by from there is what it takes per row.

Writes outputs/bench/cleaning.json and prints the same. Besides rows per second of wall-clock time, which another process
on the machine lowers, rows per second of processor time are given.

    python benchmarks/cleaning.py [--rows N] [--num_proc N] [--output FILE]
"""

import argparse
import json
import random
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Self

LEAST_ROWS_PER_SECOND = 20_000  # on two cores
MOST_BYTES_PER_ROW = 200  # that memory grows by
NAMES = [
    "Alice",
    "Bob",
    "Carla",
    "Dmitri",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Pedro",
]
THINGS = [
    "apples",
    "books",
    "coins",
    "marbles",
    "stamps",
    "tickets",
    "candles",
    "pencils",
    "shells",
    "bricks",
    "lamps",
    "ropes",
    "tiles",
    "maps",
    "bells",
    "jars",
]
PLACES = [
    "market",
    "harbour",
    "library",
    "workshop",
    "garden",
    "station",
    "museum",
    "bakery",
    "village",
    "school",
    "orchard",
    "castle",
]


def make_row(draw: random.Random) -> tuple[str, str]:
    name, other = draw.sample(NAMES, 2)
    thing, place = draw.choice(THINGS), draw.choice(PLACES)
    a, b, c = (draw.randrange(2, 1000) for _ in range(3))
    kind = draw.random()
    if kind < 0.35:
        question = (
            f"{name} buys {a} {thing} at the {place} and gives {b} of them to {other}. How many {thing} does {name} have "
            f"left after buying {c} more?"
        )
        return question, str(a - b + c)
    if kind < 0.65:
        return f"Find the remainder when ${a}^{{{b}}} + {c}$ is divided by ${c + 7}$.", str(
            (pow(a, b, c + 7) + c) % (c + 7)
        )
    if kind < 0.85:
        return (
            rf"Evaluate the integral \( \int_0^{{{a}}} ({b}x + {c}) \, dx \).",
            rf"\boxed{{{a * a * b // 2 + a * c}}}",
        )
    if kind < 0.9:
        return f"What is ${a} + {b}$? (A) {a + b} (B) {a - b} (C) {a * b} (D) {c}", "A"
    if kind < 0.95:
        return f"Is ${a * 1000 + b}$ a prime number that is larger than {c}?", draw.choice(("Yes", "No"))
    return f"Let $f(x) = {a}x + {b}$. (a) Find $f({c})$. (b) Find $f'({c})$.", f"{a * c + b}, {a}"


def write_rows(path: Path, num_rows: int) -> None:
    draw = random.Random(0)
    kept: list[tuple[str, str]] = []
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_rows):
            chance = draw.random()
            if kept and chance < 0.05:
                question, answer = draw.choice(kept)
            elif kept and chance < 0.07:
                question, answer = draw.choice(kept)
                question = question.replace("Find the", "Compute the").replace("How many", "Tell how many")
            else:
                question, answer = make_row(draw)
                if index % 20 == 0:
                    kept.append((question, answer))
            file.write(json.dumps({"problem": question, "answer": answer, "source": "benchmark"}) + "\n")


class Memory:
    """The most memory of this process and its children that is theirs alone, in bytes, looked at now and then.

    Pages of files that are mapped are left out: the system takes them back when it needs them.
    """

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.most = max(self.most, sum(map(anonymous_bytes, [Path("/proc/self"), *children()])))


def children() -> list[Path]:
    pids = Path("/proc/self/task").glob("*/children")
    return [Path("/proc") / pid for path in pids for pid in path.read_text().split()]


def anonymous_bytes(process: Path) -> int:
    try:
        line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) * 1024


def processor_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(num_rows: int, num_proc: int, folder: Path) -> dict[str, float]:
    from trl_ulorl.data.cleaning import CleaningSettings, clean

    write_rows(folder / "rows.jsonl", num_rows)
    settings = CleaningSettings(
        str(folder / "rows.jsonl"), streaming=True, against=(str(folder / "evaluation.jsonl"),)
    )
    started, used = time.perf_counter(), processor_seconds()
    with Memory() as memory:
        summary = clean(settings, folder / "clean", num_proc=num_proc)
    seconds, used = time.perf_counter() - started, processor_seconds() - used
    return {
        "rows": num_rows,
        "kept": summary.kept,
        "seconds": seconds,
        "processor_seconds": used,
        "rows_per_second": num_rows / seconds,
        "rows_per_processor_second": num_rows / used,
        "most_bytes": memory.most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--num_proc", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/cleaning.json"))
    args = parser.parse_args()
    folder = args.output.parent / "cleaning"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw = random.Random(1)
    with (folder / "evaluation.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"problem": make_row(draw)[0]}) + "\n" for _ in range(100))
    small = measure(args.rows // 10, args.num_proc, folder)
    large = measure(args.rows, args.num_proc, folder)
    growth = (large["most_bytes"] - small["most_bytes"]) / (large["rows"] - small["rows"])
    for figures in (small, large):
        print(
            "{rows:9,d} rows: {seconds:6.1f} s, {rows_per_second:8,.0f} rows/s; {processor_seconds:6.1f} s of processors, "
            "{rows_per_processor_second:8,.0f} rows/s of one; {kept:,d} kept; at most {most_bytes:,d} bytes".format(
                **figures
            )
        )
    print(f"Memory grows by {growth:.0f} bytes a row (at most {MOST_BYTES_PER_ROW}).")
    result = {"small": small, "large": large, "bytes_per_row": growth, "num_proc": args.num_proc}
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder)
    if large["rows_per_second"] < LEAST_ROWS_PER_SECOND or growth > MOST_BYTES_PER_ROW:
        raise SystemExit("The rules are too slow, or memory grows with the rows.")


if __name__ == "__main__":
    main()
