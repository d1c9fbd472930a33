"""How often the verifier is right beside math-verify and TRL's accuracy_reward, by category, and how fast it is.

Each verifier judges every case by rules alone. The peers run in child processes that are killed after ten seconds a
pair; a peer that is not installed is left out, and named. Speed is that of warm workers on pairs that text, numbers or
units decide, on pairs that each need the symbolic stage, and on those with 5 % hostile pairs among them.

Cases are lines with `prediction`, `reference`, `expected` (1 or 0) and `category`. Where one has `"expand": true`,
`<<REP:n:text>>` in it stands for n times the text and `<<CHR:hex>>` for a character.

Writes outputs/bench/verifier.json and prints the same as tables. Ends with 1 if a verdict of ours is a false positive
or took over three seconds, or if a speed misses its target.

    python benchmarks/verifier.py [CASES.jsonl] [--output FILE]
"""

import argparse
import json
import re
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from trl_ulorl.cli.peers import PEERS, Peer
from trl_ulorl.rewards import verify_answer, verify_answers
from trl_ulorl.rewards.pool import TIME_LIMIT_SECONDS, num_workers

CASES = Path(__file__).parents[1] / "tests" / "data" / "verifier_cases.jsonl"
OURS = "trl-ulorl"
MOST_SECONDS = 3.0
TARGETS = {"text": 1000, "numbers": 1000, "units": 1000, "symbolic": 100}  # verdicts a second
HOSTILE = (
    r"\int e^{x^2}\sin(x^3)\,dx",
    r"\prod_{k=1}^{100000000}\frac{k}{k+1}",
    r"\sum_{k=1}^{10^{12}}\sin(k^2)",
    "9^{9^{9^9}}",
    "(((9!)!)!)!",
)
HOSTILE_SHARE = 20  # one in


def expanded(text: str) -> str:
    """Write out the marks that keep megabytes out of a file of cases."""
    text = re.sub(r"<<REP:(\d+):(.*?)>>", lambda mark: mark[2] * int(mark[1]), text, flags=re.DOTALL)
    return re.sub(r"<<CHR:([0-9a-fA-F]+)>>", lambda mark: chr(int(mark[1], 16)), text)


def read_cases(path: Path) -> list[dict]:
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for case in cases:
        if case.get("expand"):
            case |= {name: expanded(case[name]) for name in ("prediction", "reference")}
    return cases


def outcome(verdict: bool | None, expected: int) -> str:
    if verdict is None:
        return "none"
    if verdict == bool(expected):
        return "right"
    return "false_positive" if verdict else "false_negative"


def table(cases: list[dict], judge, name: str) -> dict:
    """Counts by category of a verifier: `judge` returns verdict, seconds and what failed."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    slowest, failures, missed = 0.0, defaultdict(int), []
    for case in tqdm(cases, desc=name, file=sys.stderr):
        verdict, seconds, failure = judge(case["prediction"], case["reference"])
        kind = outcome(verdict, case["expected"])
        counts[case["category"]][kind] += 1
        counts[case["category"]]["cases"] += 1
        slowest = max(slowest, seconds)
        if failure:
            failures[failure] += 1
        if kind != "right":
            missed.append(case.get("id", case["prediction"][-60:]))
    total = {kind: sum(count[kind] for count in counts.values()) for kind in (*KINDS, "cases")}
    return {
        "categories": {category: dict(count) for category, count in counts.items()},
        "total": total,
        "slowest_seconds": slowest,
        "failures": dict(failures),
        "missed": missed,
    }


KINDS = ("right", "false_negative", "false_positive", "none")


def judge_ours(prediction: str, reference: str) -> tuple[bool | None, float, str]:
    start = time.monotonic()
    verdict = verify_answer(prediction, reference)
    failure = verdict.stage if verdict.stage in ("timeout", "error") else ""
    return verdict.equivalent, time.monotonic() - start, failure


def boxed(answer: str) -> str:
    return rf"So the result is \boxed{{{answer}}}."


def speed_pairs() -> dict[str, list[tuple[str, str]]]:
    """Distinct pairs, so that no cache helps."""
    numbers = range(2000)
    return {
        "text": [(boxed(rf"\left( {n}, \dfrac12 \right)"), rf"({n},\frac{{1}}{{2}})") for n in numbers],
        "numbers": [(boxed(rf"\frac{{{n}}}{{4}}"), f"{n / 4}") for n in numbers],
        "units": [(boxed(rf"{n}\text{{ cm}}"), f"{n / 100} m") for n in numbers],
        "symbolic": [
            (boxed(rf"\frac{{x+{n}}}{{\sqrt{{{k}}}}}"), rf"\frac{{\sqrt{{{k}}}}}{{{k}}}(x+{n})")
            for n in range(50)
            for k in range(2, 12)
        ],
    }


def seconds_for(pairs: list[tuple[str, str]]) -> float:
    start = time.monotonic()
    verify_answers(pairs)
    return time.monotonic() - start


def measure_speed() -> dict:
    pairs = speed_pairs()
    verify_answers([pair for several in pairs.values() for pair in several[:20]])  # warm: pint, workers
    speed = {name: len(several) / seconds_for(several) for name, several in pairs.items()}
    own_seconds = seconds_for(pairs["symbolic"])
    hostile = [
        (boxed(HOSTILE[place // HOSTILE_SHARE % len(HOSTILE)]), "3") if place % HOSTILE_SHARE == 0 else pair
        for place, pair in enumerate(pairs["symbolic"])
    ]
    return {
        "verdicts_per_second": speed,
        "workers": num_workers(),
        "batch_seconds": own_seconds,
        "batch_seconds_with_hostile_pairs": seconds_for(hostile),
        "time_limit_seconds": TIME_LIMIT_SECONDS,
    }


def print_tables(result: dict) -> None:
    names = list(result["verifiers"])
    categories = list(result["verifiers"][OURS]["categories"])
    print("right of all, by category\n" + "".join(f"  {place}: {name}\n" for place, name in enumerate(names, 1)))
    print(f"{'':18}" + "".join(f"{place:>10}" for place in range(1, len(names) + 1)))
    for category in categories:
        row = [result["verifiers"][name]["categories"][category] for name in names]
        print(f"{category:18}" + "".join(f"{count.get('right', 0):>6}/{count['cases']:<3}" for count in row))
    for kind in KINDS:
        print(f"{kind:18}" + "".join(f"{result['verifiers'][name]['total'][kind]:>10}" for name in names))
    print(f"{'slowest, s':18}" + "".join(f"{result['verifiers'][name]['slowest_seconds']:>10.2f}" for name in names))
    for name, reason in result["missing"].items():
        print(f"left out: {name} ({reason})")
    print(f"missed by ours: {', '.join(result['verifiers'][OURS]['missed']) or 'none'}")
    speed = result["speed"]
    print("\nverdicts a second, warm, on " + f"{speed['workers']} workers")
    for name, figure in speed["verdicts_per_second"].items():
        print(f"{name:18}{figure:10.0f}   at least {TARGETS[name]}")
    print(
        f"a batch that needs algebra: {speed['batch_seconds']:.1f} s, with 5 % hostile pairs "
        f"{speed['batch_seconds_with_hostile_pairs']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="?", default=CASES)
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/verifier.json"))
    args = parser.parse_args()
    cases = read_cases(args.cases)
    verify_answers([(boxed("x+1"), "1+x"), (boxed("1 cm"), "1 m")])  # workers and pint are there
    verifiers, missing = {OURS: table(cases, judge_ours, OURS)}, {}
    for name in PEERS:
        try:
            with Peer(name) as peer:
                verifiers[name] = table(cases, peer.verify, name)
        except ImportError as error:
            missing[name] = str(error)
    result = {"cases": str(args.cases), "verifiers": verifiers, "missing": missing, "speed": measure_speed()}
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print_tables(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    ours, speed = verifiers[OURS], result["speed"]
    extra = speed["batch_seconds_with_hostile_pairs"] - speed["batch_seconds"]
    is_missed = (
        ours["total"]["false_positive"] > 0
        or ours["slowest_seconds"] > MOST_SECONDS
        or any(speed["verdicts_per_second"][name] < target for name, target in TARGETS.items())
        or extra > TIME_LIMIT_SECONDS * speed["workers"]
    )
    sys.exit(int(is_missed))


if __name__ == "__main__":
    main()
