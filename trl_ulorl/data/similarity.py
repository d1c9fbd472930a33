"""When two questions are the same: exactly, nearly, or in long stretches. Pure functions on batches of text; numpy only.

A question is read as a sequence of tokens, and split into what it computes and how it is put:

    Find the remainder when $2^{100}$ is divided by 7.         formula  2 100 7      words  remainder divided
    What is the remainder if $2^{100}$ is divided by $7$?      formula  2 100 7      words  remainder divided

Mathematics differs by a digit where prose differs by a paragraph, so near duplicates must have the same formula tokens in
the same order, and similar words. MinHash over the words only proposes pairs; every pair is measured before it counts.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# Jaccard similarity of the words and pairs of words, from which two questions with the same formulas are nearly the same
MIN_SIMILARITY = 0.5
NGRAM = 8  # tokens of a stretch that is compared with evaluation sets
MIN_COVERAGE = 0.5  # of an evaluation problem's stretches, or of a question's
_MIN_STRETCHES = 4
_MAX_PROBLEMS_OF_A_STRETCH = (
    2  # in more evaluation problems it is a phrase of the trade ("relatively prime positive ...")
)
_MAX_CACHED_TOKENS = 200_000

NUM_BANDS, _ROWS_PER_BAND = 12, 3  # at the least similarity one band agrees with probability 0.80, at 0.7 with 0.99

_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad|begin|end)(?![A-Za-z])|\\[,;:!()\[\]> ]|\$|~|&nbsp;"
)
_ONE_IN_BRACES = re.compile(r"\{\s*(\w)\s*\}")
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|\d+(?:\.\d+)?|[^\s\w.,;:?'\"`\\]|[^\W\d_a-zA-Z]")
_SPELLINGS = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "≤": "≤", "≥": "≥"})
_SAME_TOKEN = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\leq": "≤", r"\le": "≤", r"\leqslant": "≤", r"\geq": "≥",
    r"\ge": "≥", r"\geqslant": "≥", r"\neq": r"\ne", r"\cdot": "*", r"\times": "*", r"\lt": "<", r"\gt": ">", r"\colon": ":",
    r"\dots": r"\ldots", r"\cdots": r"\ldots", r"\rightarrow": r"\to", r"\infty": "∞", r"\pi": "π", r"\mid": "|", r"\vert": "|",
}  # fmt: skip
# Words that say nothing about the problem: articles, prepositions, requests. Not "not", "no", "without" or "least".
_EMPTY_WORDS = frozenset(
    """a an the of in on to for from by with at as and or if when where which that this these those it its is are be was were
    has have had do does did can could will would should let suppose given consider such there then so we you your our
    find determine compute calculate evaluate what how give express state write show answer following problem please
    through between into over all any each every also denote denotes define defined called i solve obtain get
    about""".split()  # noqa: SIM905 - a list of its own lines for each word hides them
)
_LAYOUT_TOKENS = frozenset("{}^_()[]")
_TEXT_COMMANDS = frozenset(
    (r"\text", r"\textbf", r"\textit", r"\mathrm", r"\mathbf", r"\mbox", r"\operatorname", r"\rm", r"\bf")
)


@dataclass(frozen=True, slots=True)
class Features:
    """What is compared of one question; ids are 56-bit hashes of tokens.

    Args:
        tokens: Ids of all tokens, in order.
        formula: Ids of numbers, letters, operators and LaTeX commands, in order; brackets are left out.
        words: Ids of words that say something, in order.
    """

    tokens: tuple[int, ...]
    formula: tuple[int, ...]
    words: tuple[int, ...]


def features(question: str) -> Features:
    r"""Read a question, up to spacing, punctuation, case of its words and the layout of its LaTeX.

    Example:
        >>> features(r"Find $\dfrac{1}{23}x^{2}$.").tokens == features(r"find  \( \frac 1{23} x^2 \)").tokens
        True
    """
    text = question if question.isascii() else question.translate(_SPELLINGS)
    if "\\" in text:
        text = _LAYOUT.sub(" ", text)
    elif "$" in text or "~" in text or "&" in text:  # the same without commands, which are dear to look for
        text = text.replace("$", " ").replace("~", " ").replace("&nbsp;", " ")
    if "{" in text:
        text = _ONE_IN_BRACES.sub(r" \1 ", text)
    if len(_ids) >= _MAX_CACHED_TOKENS:  # here, as a question's ids are looked up again below
        for cache in (_ids, _formula_ids, _word_ids):
            cache.clear()
    identities = tuple(map(_ids.__getitem__, _TOKEN.findall(text)))
    return Features(
        identities,
        tuple(filter(None, map(_formula_ids.__getitem__, identities))),
        tuple(filter(None, map(_word_ids.__getitem__, identities))),
    )


class _Ids(dict[str, int]):
    """Ids of tokens, worked out at their first use; none is 0."""

    def __missing__(self, token: str) -> int:
        known = _SAME_TOKEN.get(token, token)
        is_word = is_formula = False
        if len(known) > 1 and known[0].isalpha():
            known = known.lower()
            is_word = known not in _EMPTY_WORDS
        else:
            is_formula = not (known in _LAYOUT_TOKENS or known in _TEXT_COMMANDS or known in "aAI")
        identity = int.from_bytes(blake2b(known.encode(), digest_size=7).digest(), "big")
        _formula_ids[identity] = identity * is_formula
        _word_ids[identity] = identity * is_word
        self[token] = identity
        return identity


_ids = _Ids()
# An id where it is part of a question's formulas or of its words, else 0.
_formula_ids: dict[int, int] = {}
_word_ids: dict[int, int] = {}


def similarity(first: Features, second: Features) -> float:
    """Return how alike two questions with the same formula tokens are put, in `[0, 1]`; 0 if the formulas differ.

    It is the Jaccard similarity of their words and pairs of neighbouring words.
    """
    if first.formula != second.formula:
        return 0.0
    left, right = set(shingles(first)), set(shingles(second))
    if not left and not right:
        return 1.0
    return len(left & right) / len(left | right)


def shingles(row: Features) -> list[int]:
    """Return the hashes of a question's words and of its pairs of neighbouring words."""
    words = row.words
    return [*words, *map(hash, itertools.pairwise(words))]


def token_key(row: Features) -> int:
    """Return a key that equal token sequences share, the same in every process: a signed 64-bit number."""
    return hash(row.tokens)  # a hash of integers is not seeded, unlike one of text


# ------------------------------------------------------------------------------------------------------- near duplicates

_random = np.random.default_rng(20250726)
_MULTIPLIERS = _random.integers(1, 2**63, NUM_BANDS * _ROWS_PER_BAND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_OFFSETS = _random.integers(0, 2**63, NUM_BANDS * _ROWS_PER_BAND, dtype=np.uint64)
_MIXERS = _random.integers(1, 2**63, _ROWS_PER_BAND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def band_keys(rows: Sequence[Features], salts: Iterable[int]) -> NDArray[np.uint64]:
    """Return keys of which near duplicates share at least one, with a probability that grows with their similarity.

    MinHash signatures in bands ([Leskovec et al., section 3.4](http://www.mmds.org)), mixed with the formula and a salt,
    since rows that differ in these are no near duplicates.

    Args:
        rows: Questions, `N` of them.
        salts: What else has to agree, such as a hash of the reference, `N` of them.

    Returns:
        Keys of shape `(N, 12)`.
    """
    lists = [shingles(row) or [0] for row in rows]
    if not lists:
        return np.zeros((0, NUM_BANDS), dtype=np.uint64)
    values = np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int64).view(np.uint64)
    starts = np.concatenate([[0], np.cumsum([len(shingle) for shingle in lists])[:-1]])
    base = np.array([hash((row.formula, salt)) for row, salt in zip(rows, salts, strict=True)], dtype=np.int64)
    keys = np.empty((len(lists), NUM_BANDS), dtype=np.uint64)
    for band in range(NUM_BANDS):
        key = base.view(np.uint64) * np.uint64(2 * band + 1)
        for place in range(_ROWS_PER_BAND):
            index = band * _ROWS_PER_BAND + place
            hashed = _mixed(values * _MULTIPLIERS[index] + _OFFSETS[index])
            key = _mixed((key ^ np.minimum.reduceat(hashed, starts)) * _MIXERS[place])
        keys[:, band] = key
    return keys


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread the high bits over the low ones: products alone keep the order of small numbers."""
    return values ^ (values >> np.uint64(29))


# -------------------------------------------------------------------------------------------------------------- leakage


@dataclass(frozen=True, slots=True)
class Overlap:
    """An evaluation problem that a question gives away.

    Args:
        name: The evaluation set and the problem's place in it.
        how: In what way, for a person.
    """

    name: str
    how: str


class LeakageIndex:
    """Finds questions that hold a problem of an evaluation set: the same one, nearly, or long stretches of it.

    A stretch is 8 tokens. Sharing one is no leak: "where $m$ and $n$ are relatively prime positive integers, find" stands
    in a third of AIME. So half of the problem's stretches have to be in the question, or half of the question's in the
    problem, and four at least, not counting those that stand in three evaluation problems or more.

    Args:
        problems: Name and question of each evaluation problem.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self._names: list[str] = []
        self._rows: list[Features] = []
        self._by_tokens: dict[tuple[int, ...], int] = {}
        self._by_formula: dict[tuple[int, ...], list[int]] = {}
        for name, question in problems:
            row = features(question)
            if not row.tokens or row.tokens in self._by_tokens:
                continue
            place = len(self._rows)
            self._names.append(name)
            self._rows.append(row)
            self._by_tokens[row.tokens] = place
            self._by_formula.setdefault(row.formula, []).append(place)
        counts = Counter(gram for row in self._rows for gram in _ngrams(row))
        self._problems_of: dict[int, list[int]] = {}
        self._num_ngrams: list[int] = []
        for place, row in enumerate(self._rows):
            telling = [gram for gram in _ngrams(row) if counts[gram] <= _MAX_PROBLEMS_OF_A_STRETCH]
            self._num_ngrams.append(len(telling))
            for gram in telling:
                self._problems_of.setdefault(gram, []).append(place)
        rolling = [_rolling_hashes(np.array(row.tokens, dtype=np.uint64)) for row in self._rows]
        self._rolling = np.unique(np.concatenate([*rolling, np.zeros(0, dtype=np.uint64)]))

    def __len__(self) -> int:
        return len(self._rows)

    def suspects(self, rows: Sequence[Features]) -> NDArray[np.bool_]:
        """Return which questions may hold an evaluation problem, all at a time: the others need not be looked at.

        Args:
            rows: Questions, `N` of them.

        Returns:
            Mask of shape `(N,)`; every question that `find` would find is in it.
        """
        lengths = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        is_suspect = np.array(
            [row.tokens in self._by_tokens or row.formula in self._by_formula for row in rows], dtype=bool
        )
        tokens = np.fromiter(
            itertools.chain.from_iterable(row.tokens for row in rows), dtype=np.uint64, count=int(lengths.sum())
        )
        if len(tokens) < NGRAM or not len(self._rolling):
            return is_suspect
        hashes = _rolling_hashes(tokens)  # those across two questions are chance hits at the most
        places = np.searchsorted(self._rolling, hashes).clip(max=len(self._rolling) - 1)
        hits = np.flatnonzero(self._rolling[places] == hashes)
        is_suspect[np.searchsorted(np.cumsum(lengths), hits, side="right")] = True
        return is_suspect

    def find(self, row: Features) -> Overlap | None:
        """Return the evaluation problem that a question holds, or None."""
        if (place := self._by_tokens.get(row.tokens)) is not None:
            return Overlap(self._names[place], "word for word")
        for place in self._by_formula.get(row.formula, ()):
            alike = similarity(row, self._rows[place])
            if alike >= MIN_SIMILARITY:
                return Overlap(self._names[place], f"with the same formulas and {alike:.0%} of the words")
        grams = _ngrams(row)
        hits = Counter(place for gram in grams for place in self._problems_of.get(gram, ()))
        for place, count in sorted(hits.items(), key=lambda hit: (-hit[1], hit[0])):
            shares = {"its": count / self._num_ngrams[place], "the question's": count / len(grams)}
            whose, share = max(shares.items(), key=lambda item: item[1])
            if count >= _MIN_STRETCHES and share >= MIN_COVERAGE:
                return Overlap(self._names[place], f"{share:.0%} of {whose} stretches of {NGRAM} tokens are shared")
        return None


def _ngrams(row: Features) -> set[int]:
    tokens = row.tokens
    return set(map(hash, zip(*(tokens[start:] for start in range(NGRAM)), strict=False)))


def _rolling_hashes(tokens: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each stretch of 8 tokens, shape `(len(tokens) - 7,)`; none if there are fewer."""
    if len(tokens) < NGRAM:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(len(tokens) - NGRAM + 1, dtype=np.uint64)
    for start in range(NGRAM):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[start : start + len(hashes)]
    return hashes
