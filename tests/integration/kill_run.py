"""Train, be killed at seeded moments, resume each time, and compare with the run that was never killed.

Started by test_kill.py in a process of its own: it forks a child for each life, which spares the imports. A child counts what
it does, and once it has begun the n-th piece of a phase it is killed within some milliseconds, wherever it then is.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from helpers import length_reward, make_trainer
from safetensors.torch import load_file

from trl_ulorl.checkpoints import newest_whole_checkpoint
from trl_ulorl.rollout import state

with contextlib.suppress(ImportError):
    import deepspeed  # noqa: F401 - accelerate would import it in every life

PHASES = ("decode", "score", "save", "update")
STEPS_PER_LIFE = 3  # at most, so that the run does not end before its kills
SETTINGS = {
    "num_segments": 3,
    "num_iterations": 2,  # every second checkpoint is inside a batch
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 3,
    "max_inflight_groups": 6,
}


def live(folder: Path, max_steps: int, plan: tuple[str, int, float] | None) -> None:
    """Train to the end, or until the kill that is planned: the phase, the piece of it, and the seconds after its start."""
    counts = dict.fromkeys(PHASES, 0)

    def begin(phase: str) -> None:
        counts[phase] += 1
        if plan is not None and (phase, counts[phase]) == plan[:2]:
            threading.Thread(target=lambda: (time.sleep(plan[2]), os.kill(os.getpid(), signal.SIGKILL))).start()

    def reward(completions, **kwargs):
        begin("score")
        time.sleep(0.002)
        return length_reward(completions)

    torch.set_num_threads(1)
    trainer = make_trainer(folder, reward, max_steps=max_steps, **SETTINGS)
    decode, close = trainer._collector.engine.decode, trainer._collector._on_close
    write, step = state.write_arrays, trainer.training_step

    def decoding(requests):
        begin("decode")
        yield from decode(requests)

    def writing(path, arrays):
        begin("save")
        return write(path, arrays)

    def stepping(*args, **kwargs):
        begin("update")
        return step(*args, **kwargs)

    def closing(group, outcome, version):
        with (folder / "tokens.jsonl").open("a") as file:
            ids = [rollout.completion_ids.tolist() for rollout in group.rollouts]
            file.write(json.dumps([group.group_id, ids]) + "\n")
        close(group, outcome, version)

    trainer._collector.engine.decode, state.write_arrays, trainer.training_step = decoding, writing, stepping
    trainer._collector._on_close = closing
    try:
        newest = newest_whole_checkpoint(folder / "run", discards=False)
    except ValueError:
        newest = None
    trainer.train(resume_from_checkpoint=True if newest else None)
    values = torch.cat([value.detach().reshape(-1) for value in trainer.model.parameters()])
    result = {"ledger": trainer.ledger(), "parameters": values.numpy().tobytes().hex(), "counts": counts}
    (folder / "result.json").write_text(json.dumps(result))


def fork(folder: Path, max_steps: int, plan: tuple[str, int, float] | None) -> int:
    """Return how the child ended: 0, or the number of the signal."""
    child = os.fork()
    if child == 0:
        try:
            live(folder, max_steps, plan)
            sys.stderr.flush()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must never go on as its parent
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise SystemExit(f"The run failed after a resume, with plan {plan}.")
    return 0


def prefixes(checkpoint: str) -> dict[str, list[int]]:
    """Return the tokens of every unfinished rollout in a checkpoint."""
    folder = Path(checkpoint) / "rollout"
    records, tokens = load_file(folder / "groups.safetensors"), load_file(folder / "rank0.safetensors")["token_ids"]
    ids, lengths = records["rank0.group_id"].tolist(), iter(records["rank0.segment_length"].tolist())
    start, found = 0, {}
    for place, num_segments in enumerate(records["rank0.num_segments"].tolist()):
        stop = start + sum(next(lengths) for _ in range(num_segments))
        found[f"{ids[place // 4]}.{place % 4}"] = tokens[start:stop].tolist()
        start = stop
    return found


def read_tokens(folder: Path) -> dict[str, list[int]]:
    """Return the tokens of every rollout that was closed; what came after a checkpoint may be there several times."""
    lines = map(json.loads, (folder / "tokens.jsonl").read_text().splitlines())
    return {f"{group}.{index}": ids for group, rollouts in lines for index, ids in enumerate(rollouts)}


def main(folder: Path, num_kills: int, seed: int) -> None:
    whole, killed = folder / "whole", folder / "killed"
    for each in (whole, killed):
        each.mkdir(parents=True)
    max_steps = STEPS_PER_LIFE * (num_kills + 1)
    fork(whole, max_steps, None)
    counts = json.loads((whole / "result.json").read_text())["counts"]
    rng = np.random.default_rng(seed)
    kills, seen = [], []
    while len(kills) < num_kills:
        phase = PHASES[len(kills) % len(PHASES)]
        piece = int(rng.integers(1, STEPS_PER_LIFE * counts[phase] // max_steps + 1))
        if fork(killed, max_steps, (phase, piece, float(rng.uniform(0, 0.03)))) != signal.SIGKILL:
            raise SystemExit(f"The run ended before its kills: {kills}")
        try:
            newest = newest_whole_checkpoint(killed / "run", discards=False)
        except ValueError:
            kills.append([phase, 0])
            continue
        kills.append([phase, int(newest.rpartition("-")[2])])
        seen.append(prefixes(newest))
    fork(killed, max_steps, None)
    tokens = read_tokens(killed)
    changed = [
        name for held in seen for name, ids in held.items() if name in tokens and tokens[name][: len(ids)] != ids
    ]
    result = {
        "kills": kills,
        "num_prefixes": sum(bool(ids) for held in seen for ids in held.values()),
        "changed": changed,
        **{each.name: json.loads((each / "result.json").read_text()) for each in (whole, killed)},
        "same_tokens": all(
            read_tokens(whole)[name] == ids for name, ids in tokens.items() if name in read_tokens(whole)
        ),
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
