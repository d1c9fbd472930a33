"""What a rollout engine is: it continues rollouts by a budget of tokens each, and knows nothing of groups or rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """One sequence to continue.

    Args:
        token_ids: Prompt and completion so far, int32, shape `(P + T,)`.
        max_new_tokens: Budget of new tokens, at least one.
    """

    token_ids: NDArray[Any]
    max_new_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodedSegment:
    """What an engine added to one request.

    Args:
        request_index: The request's place in the call.
        token_ids: New ids, shape `(N,)` with `1 <= N <= max_new_tokens`; an end-of-sequence token is included.
        per_token_logps: Log-probability in nats of each new id at the sampling temperature, over the full vocabulary,
            shape `(N,)`.
        is_stopped: Whether the last id is an end-of-sequence token.
    """

    request_index: int
    token_ids: NDArray[Any]
    per_token_logps: NDArray[Any]
    is_stopped: bool


class SegmentEngine(Protocol):
    """Decodes segments with the current weights of the policy."""

    def decode(self, requests: Sequence[DecodeRequest]) -> Iterator[DecodedSegment]:
        """Continue every request; yield each result as soon as it is there, in any order.

        Every rank calls it once a round, with no requests where it has nothing to decode, since gathering sharded
        weights is a collective operation. No key-value cache may outlive the call: the weights change between calls.
        """
        ...


class DecodeStream(Protocol):
    """Sequences that decode side by side under one policy, and that come and go while the others decode on.

    Attributes:
        num_steps: Decode steps taken so far: the most tokens that any one sequence could have got.
    """

    num_steps: int

    def submit(self, key: int, request: DecodeRequest) -> None:
        """Start to decode a sequence; its results carry `key` as their `request_index`."""
        ...

    def step(self) -> list[DecodedSegment]:
        """Decode on, for one step at least, and return the sequences that have ended or used up their budget.

        Must not be called without a submitted sequence that has not ended.
        """
        ...

    def interrupt(self) -> list[DecodedSegment]:
        """Stop every sequence and return what each has so far; one that has no new token yet is left out.

        No sampled token is lost: what `step` has not returned, this does.
        """
        ...


class StreamingEngine(SegmentEngine, Protocol):
    """An engine that the continuous schedule can drive."""

    def stream(self) -> AbstractContextManager[DecodeStream]:
        """Open a stream under the current weights; leaving it stops what still decodes.

        Every rank opens one per rollout step, since gathering sharded weights is a collective operation.
        """
        ...
