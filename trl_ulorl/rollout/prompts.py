"""The stream of prompts: a seeded order over the training set, with an exact position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class OtherPromptsError(ValueError):
    """A position belongs to the stream of another data set, seed or shuffling."""


class PromptStream:
    """Endless row indices over a data set: each epoch visits every row once, in an order of its own.

    The rollout takes its prompts from here and not from the dataloader, whose batches only drive the steps: more groups
    are in flight than one batch holds, and the position is part of the state.

    Args:
        num_rows: Rows of the data set.
        seed: Seed of the order.
        shuffle: False keeps the data set's own order.

    Raises:
        ValueError: If the data set is empty.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise ValueError(
                f"The training set has {num_rows} rows: at least one prompt is needed. Check its filters."
            )
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._num_rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)

    @property
    def epoch(self) -> float:
        """Passes over the data set so far."""
        return self._epoch + self._position / self._num_rows

    def take(self, num_rows: int) -> list[int]:
        """Return the next `num_rows` row indices."""
        rows = []
        for _ in range(num_rows):
            if self._position == self._num_rows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            rows.append(int(self._order[self._position]))
            self._position += 1
        return rows

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values."""
        return {
            "num_rows": self._num_rows,
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position that `state_dict` returned.

        Raises:
            ValueError: If it is no position.
            OtherPromptsError: If the data set, the seed or the shuffling differs: the rows would be others.
        """
        mine = self.state_dict()
        is_position = isinstance(state, dict) and state.keys() == mine.keys()
        if not is_position or not all(isinstance(v, int) and not isinstance(v, bool) for v in state.values()):
            raise ValueError(f"it holds no position in a stream of prompts: {str(state)[:200]}")
        changed = [key for key in ("num_rows", "seed", "shuffle") if state[key] != mine[key]]
        if changed:
            raise OtherPromptsError(
                f"The stream of prompts was saved with {', '.join(f'{k}={state[k]}' for k in changed)}, but this run "
                f"has {', '.join(f'{k}={mine[k]}' for k in changed)}: row indices would mean other prompts. Resume with "
                "the same training set, `seed` (`data_seed` where given) and `shuffle_dataset`."
            )
        if state["epoch"] < 0 or not 0 <= state["position"] <= self._num_rows:
            raise ValueError(f"it has position {state['position']} of {self._num_rows} in epoch {state['epoch']}")
        self._go_to(state["epoch"], state["position"])

    def go_to(self, num_taken: int) -> None:
        """Go to where the stream is once `num_taken` rows were taken."""
        self._go_to(*divmod(num_taken, self._num_rows))

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._order_of(epoch)
