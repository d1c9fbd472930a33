"""What the rules judge: a table of cases of every kind, shapes of real references, and pairs made by construction.

Pairs made by hypothesis are judged in this process, for speed; `VERIFIER_EXAMPLES` sets how many of each kind.
"""

# ruff: noqa: RUF001, SIM905 (full-width characters are what is tested; word lists read better as one string)

import json
import os
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from trl_ulorl.rewards import verify_answers
from trl_ulorl.rewards.compare import compare_formulas
from trl_ulorl.rewards.errors import Refused
from trl_ulorl.rewards.evaluate import same_formula
from trl_ulorl.rewards.extraction import extract_answer
from trl_ulorl.rewards.formula import Unreadable, read_formula
from trl_ulorl.rewards.magnitude import bounds, differ_in_size
from trl_ulorl.rewards.numerals import read_chinese, read_english
from trl_ulorl.rewards.stages import Pending, judge_without_algebra
from trl_ulorl.rewards.values import TooLarge

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "verifier_cases.jsonl").read_text(encoding="utf-8").splitlines()
]
examples = settings(
    max_examples=int(os.environ.get("VERIFIER_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def boxed(answer):
    return rf"So the result is \boxed{{{answer}}}."


def judged(prediction, reference):
    """Verdict without worker processes."""
    verdict = judge_without_algebra(prediction, reference, lenient=True)
    if not isinstance(verdict, Pending):
        return verdict.equivalent
    try:
        return compare_formulas(verdict.left, verdict.right).equivalent
    except Refused:
        return None


# --------------------------------------------------------------------------------------------------------------- table


@pytest.fixture(scope="module")
def verdicts():
    return verify_answers([(case["prediction"], case["reference"]) for case in CASES])


@pytest.mark.parametrize("category", sorted({case["category"] for case in CASES}))
def test_cases(verdicts, category):
    wrong = [
        (case["id"], verdict)
        for case, verdict in zip(CASES, verdicts, strict=True)
        if case["category"] == category and verdict.equivalent is not bool(case["expected"])
    ]
    assert wrong == []


ONE_WAY = {
    *(
        "numeric-16",
        "numeric-18",
        "percent_currency-14",
        "expression-56",
        "fp_trap-32",
        "fp_trap-34",
    ),  # what is rounded is the reference
    *("text_choice-13", "text_choice-46"),  # a yes with its reason, against a bare yes
    "expression-64",  # a reference that nobody can read decides nothing
}


def test_verdicts_are_symmetric_but_for_rounded_references(verdicts):
    swapped = []
    for case, verdict in zip(CASES, verdicts, strict=True):
        answer = extract_answer(case["prediction"])
        if answer and case["reference"] and r"\boxed" not in case["reference"] and "robust" not in case["category"]:
            swapped.append((case["id"], boxed(case["reference"]), answer, verdict.equivalent))
    back = verify_answers([(prediction, reference) for _, prediction, reference, _ in swapped])
    differing = {
        name for (name, _, _, verdict), other in zip(swapped, back, strict=True) if verdict is not other.equivalent
    }
    assert differing <= ONE_WAY


# ---------------------------------------------------------------------------------------------------------- self-match

SHAPES = r"""
\frac{3\sqrt{5}}{2}|2\sqrt{2}-1|\left(-\infty, \frac{1}{4}\right]|n=3^{k}, k \geq 1|(p, q)=(3,2)|\frac{n(n-1)}{2}+1
f(x)=x|f(x)=cx, c \in \mathbb{R}|x=-1, y=2, z=0|$2^{1009}$|2^{n-1}(n+1)|\sqrt[3]{2}+\sqrt[3]{4}|1-\frac{1}{2^{n}}
\left\{1, \frac{1}{2}, -2\right\}|a \leq 1 \text{ or } a \geq 3|[0,1) \cup (2,3]|\frac{\pi}{6}+k\pi|k \in \mathbb{Z}
\text{even } n|\text{all primes } p \equiv 1 \pmod{4}|\lfloor \frac{n}{2} \rfloor|\binom{2n}{n}|n!-1|60^{\circ}
\angle A = 45^{\circ}|3:2|(1,1,1),(2,3,6)|e^{-1}|\log_{2} 3|\ln 2|10^{-3}|6.022 \times 10^{23}|1.6 \text{ m/s}^2
9.8 \mathrm{~m} \mathrm{~s}^{-2}|-3 \hat{i} + 4\hat{j}|\vec{a} \cdot \vec{b}|\overline{AB}|\triangle ABC|x^2+y^2=1
y=\frac{1}{2}x-3|\frac{x^2}{4}+\frac{y^2}{3}=1|(x-1)^2+(y+2)^2=9|x>1|-1<x<2|x \neq 0|\begin{pmatrix}1&2\\3&4\end{pmatrix}
\sin\theta|\tan\frac{\alpha}{2}|2\cos^2 x-1|a_n=2n-1|S_n=n^2|\frac{1}{e}-1|\infty|-\infty|\emptyset|\mathbb{R}|\pm 2
4+2i|\frac{1+i}{\sqrt{2}}|F_{n+1}|\varphi(n)|\sum_{k=1}^{n} k^2|\int_0^1 f(x)\,dx|G \cong \mathbb{Z}/2|O(n \log n)
二分之一|三十六|12.5元|3小时20分|第一象限|等边三角形|x=2或x=-3|（1，－2）|１２５°|2.7×10⁴|①③|A、C|大于|增加|不存在|无解
80平方厘米|5千米|7:5|甲|17米|-2，3|(-∞，3]|{x|x≥1}|y＝2x＋1|m＜－1|a²b|√3|3√2/2|½|45%|8折|4℃|π/3
5 \text{ or } 7|12 \text{ cm}|\$3.50|25\%|2 \frac{1}{3}|-0.75|1{,}000{,}000|TRUE|No|B|(D)|AC|Thursday|10:45|3/4|0.\overline{3}
""".replace("{x|x≥1}", r"\{x:x≥1\}").replace("\n", "|")
SHAPES = [shape for shape in SHAPES.split("|") if shape]


def test_an_answer_equals_itself_whatever_its_shape():
    assert len(SHAPES) >= 110
    assert [s for s in SHAPES if judged(boxed(s), s) is not True] == []


def test_an_answer_equals_itself_without_being_compared_as_text():
    """In another layout: through `dfrac`, spaces and dollars, which normalisation removes."""
    spaced = [(shape, f"$ {shape.replace(r'frac', r'dfrac')} $") for shape in SHAPES if "$" not in shape]
    assert [pair for pair in spaced if judged(boxed(pair[0]), pair[1]) is not True] == []


ALIKE = {
    frozenset((r"60^{\circ}", "π/3")),
    frozenset(("二分之一", "½")),
    frozenset((r"\emptyset", "无解")),
    frozenset(("AC", "A、C")),
}


def test_no_two_shapes_are_equal():
    equal = [
        (one, other)
        for place, one in enumerate(SHAPES)
        for other in SHAPES[place + 1 :: 3]  # a third of the pairs; which, depends on the place
        if judged(boxed(one), other)
    ]
    assert {frozenset(pair) for pair in equal} <= ALIKE


# --------------------------------------------------------------------------------------------------- numbers as made up

fractions = st.fractions(min_value=-10_000, max_value=10_000, max_denominator=60)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def english(number):
    """Name of a whole number below 10^12."""
    for scale, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= scale:
            rest = f" {english(number % scale)}" if number % scale else ""
            return f"{english(number // scale)} {name}{rest}"
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10 - 2] + (f"-{_ONES[number % 10]}" if number % 10 else "")


def chinese(number):
    """Name of a whole number below 10^8."""
    if number >= 10_000:
        rest = number % 10_000
        zero = "零" if 0 < rest < 1000 else ""
        return f"{chinese(number // 10_000)}万{zero}{chinese(rest) if rest else ''}"
    digits, text = "零一二三四五六七八九", ""
    for place, unit in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // place % 10
        if digit:
            text += digits[digit] + unit
        elif text and not text.endswith("零") and number % place:
            text += "零"
    return text or "零"


@examples
@given(st.integers(0, 10**12 - 1))
def test_english_numerals_are_read(number):
    assert read_english(english(number)) == number
    assert read_english(re.sub(r"hundred (?!thousand|million|billion)", "hundred and ", english(number))) == number


@examples
@given(st.integers(0, 10**8 - 1))
def test_chinese_numerals_are_read(number):
    assert read_chinese(chinese(number)) == number


@pytest.mark.parametrize(
    "text", ["one two", "twenty thirty", "a", "and", "third", "one and two", "point", "two dozens of"]
)
def test_what_is_no_english_numeral(text):
    assert read_english(text) is None


@pytest.mark.parametrize("text", ["万三", "三十十", "一百零", "五六百", "第一", "12", "万", "十百"])
def test_what_is_no_chinese_numeral(text):
    assert read_chinese(text) is None


def spellings(value):
    """Ways to write a fraction, all equal by construction."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    top, bottom = size.numerator, size.denominator
    yield rf"{sign}\frac{{{top}}}{{{bottom}}}"
    yield f"{sign}{3 * top}/{3 * bottom}"
    yield rf"{sign}\dfrac {{{top}}} {{{bottom}}}"
    yield rf"{sign}{top}\div {bottom}"
    yield rf"\frac{{{sign}{2 * top}}}{{\sqrt{{{4 * bottom**2}}}}}"
    yield rf"x = {sign}\frac{{{top}}}{{{bottom}}}"
    yield rf"{sign}\frac{{{100 * top}}}{{{bottom}}}\%"
    whole, part = divmod(size, 1)
    if whole and part:
        yield rf"{sign}{whole}\frac{{{part.numerator}}}{{{part.denominator}}}"
    if size.denominator == 1:
        yield f"{sign}{top:,}"
        yield f"{sign}{top}.00"
        yield rf"\text{{{'minus ' if sign else ''}{english(top)}}}"
        yield rf"\text{{{'负' if sign else ''}{chinese(top)}}}"
        yield rf"{sign}{top}\cdot 10^{{0}}"
    if not 10_000 % bottom:
        yield f"{float(value):.4f}"


@examples
@given(fractions, st.data())
def test_numbers_equal_by_construction(value, data):
    one, other = (data.draw(st.sampled_from(sorted(spellings(value)))) for _ in range(2))
    assert judged(boxed(one), other) is True, (one, other)


@examples
@given(fractions, fractions, st.data())
def test_numbers_different_by_construction(value, second, data):
    assume(second not in (value, 100 * value, value / 100))  # a percent sign on one side only may be read either way
    one, other = (data.draw(st.sampled_from(sorted(spellings(number)))) for number in (value, second))
    assert judged(boxed(one), other) is False, (one, other)


@examples
@given(st.integers(0, 999), st.integers(1, 999), st.sampled_from(("", r"\text{ cm}", r"\%")))
def test_a_range_is_no_difference(low, width, sign):
    high = low + width
    assert judged(boxed(f"{low}-{high}{sign}"), f"-{width}{sign}") is False
    assert judged(boxed(f"{low}-{high}{sign}"), f"{low}.0 -- {high}{sign}".replace("--", "–")) is True
    assert judged(boxed(f"{low}-{high}{sign}"), f"{low}-{high + 1}{sign}") is False
    assert judged(boxed(f"{high}-{low}"), str(width)) is True


@examples
@given(st.integers(-99, 99), st.integers(2, 50), st.integers(-9, 9), st.sampled_from((r"\pmod{{{}}}", "(mod {})")))
def test_congruences(residue, modulus, turns, spelling):
    one = rf"x \equiv {residue} {spelling.format(modulus)}"
    assert judged(boxed(one), rf"x \equiv {residue + turns * modulus} \pmod {{{modulus}}}") is True
    assert judged(boxed(one), rf"x \equiv {residue + turns * modulus + 1} \pmod {{{modulus}}}") is False
    assert judged(boxed(one), rf"x \equiv {residue} \pmod {{{modulus + 1}}}") is False
    assert judged(boxed(one), str(residue)) is False


PLAIN = re.compile(r"-?(?:\\frac\{\d+\}\{\d+\}|[\d,./]+)")


@examples
@given(fractions, fractions, st.data())
def test_a_second_thought_behind_the_box(value, second, data):
    """Spelt otherwise it is the same answer; another number is a guess, if it is no rounding."""
    assume(abs(value - second) > 1 and second not in (100 * value, value / 100))
    one, same, other = (
        data.draw(st.sampled_from(sorted(filter(PLAIN.fullmatch, spellings(each))))) for each in (value, value, second)
    )
    assert judged(rf"It is \boxed{{{one}}} or {same}.", one) is True
    assert judged(rf"It is \boxed{{{one}}} or {other}.", one) is False


# ------------------------------------------------------------------------------------------------ formulas as made up

small = st.integers(-9, 9)


def polynomial(*coefficients):
    """Written out, highest power first."""
    powers = range(len(coefficients) - 1, -1, -1)
    return "+".join(f"({c})x^{{{power}}}" for c, power in zip(coefficients, powers, strict=True))


@examples
@given(small, small, small.filter(bool), st.sampled_from(("product", "square", "quotient", "log", "exponential")))
def test_formulas_equal_by_construction(a, b, c, kind):
    one, other = {
        "product": (rf"{c}(x+({a}))(x+({b}))", polynomial(c, c * (a + b), c * a * b)),
        "square": (rf"(x+({a}))^2-{b}", polynomial(1, 2 * a, a * a - b)),
        "quotient": (rf"\frac{{x+({a})}}{{{c}}}", rf"\frac{{x}}{{{c}}}+\frac{{{a}}}{{{c}}}"),
        "log": (rf"\ln(x^2+{a * a + 1})+{b}", rf"{b}+\log(x^2+{a * a + 1})"),
        "exponential": (rf"{c}e^{{x+({a})}}", rf"{c}\cdot e^{{{a}}}\cdot e^x"),
    }[kind]
    assert judged(boxed(one), other) is True, (one, other)
    assert judged(boxed(other), one) is True, (one, other)


@examples
@given(small, small, small.filter(bool), small.filter(bool))
def test_formulas_different_by_construction(a, b, c, change):
    one = rf"{c}(x+({a}))(x+({b}))"
    for other in (
        polynomial(c, c * (a + b), c * a * b + change),
        polynomial(c, c * (a + b) + change, c * a * b),
        polynomial(c + change, c * (a + b), c * a * b),
    ):
        assert judged(boxed(one), other) is False, (one, other)


@examples
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms())
def test_sets_in_any_order_tuples_in_theirs(items, random):
    shuffled = random.sample(items, len(items))
    write = ", ".join
    one, other = ([str(item) for item in several] for several in (items, shuffled))
    assert judged(boxed(rf"\{{{write(one)}\}}"), rf"\{{{write(other)}\}}") is True
    assert judged(boxed(write(one)), write(other)) is True
    assert judged(boxed(f"({write(one)})"), f"({write(other)})") is (items == shuffled)
    assert judged(boxed(rf"\{{{write(one[1:])}\}}"), rf"\{{{write(one)}\}}") is False


@examples
@given(st.integers(-50, 50), st.integers(1, 40), st.booleans(), st.booleans())
def test_intervals_and_solved_inequalities(low, width, low_open, high_open):
    high = low + width
    interval = f"{'(' if low_open else '['}{low}, {high}{')' if high_open else ']'}"
    signs = ("<" if low_open else r"\le", "<" if high_open else r"\le")
    assert judged(boxed(f"{low}{signs[0]} x{signs[1]} {high}"), interval) is True
    assert judged(boxed(interval), rf"x \in {interval}") is True
    other = f"{'[' if low_open else '('}{low}, {high}{')' if high_open else ']'}"
    assert judged(boxed(other), interval) is False
    assert judged(boxed(f"{low}{signs[0]} x{signs[1]} {high + 1}"), interval) is False


@examples
@given(small.filter(bool), small.filter(bool), small, small.filter(bool))
def test_equations_up_to_a_factor(a, b, c, factor):
    one = f"({a})x+({b})y=({c})"
    assert judged(boxed(one), f"({a * factor})x+({b * factor})y-({c * factor})=0") is True
    assert judged(boxed(one), f"({a})x+({b})y=({c + factor})") is False
    assert judged(boxed(one), f"({a + factor})x+({b})y=({c})") is False


UNITS = {
    "length": {"mm": 1, "cm": 10, "m": 1000, "km": 10**6, "厘米": 10, "米": 1000},
    "mass": {"g": 1, "kg": 1000, "千克": 1000},
    "time": {"s": 1, "min": 60, "hours": 3600, "小时": 3600, "分钟": 60},
    "speed": {"m/s": Fraction(1), "km/h": Fraction(10, 36)},
    "area": {"cm^2": 1, "m^2": 10**4, "平方米": 10**4},
    "money": {"cents": 1, "dollars": 100},
}


@examples
@given(st.integers(1, 5000), st.sampled_from(sorted(UNITS)), st.data())
def test_quantities(amount, kind, data):
    one, other = (data.draw(st.sampled_from(sorted(UNITS[kind]))) for _ in range(2))
    converted = Fraction(amount) * UNITS[kind][one] / UNITS[kind][other]
    text = rf"{amount}\text{{ {one}}}"
    assert judged(boxed(text), rf"{converted}\ \mathrm{{{other}}}") is True
    assert judged(boxed(text), rf"{converted + 1}\ \mathrm{{{other}}}") is False
    foreign = data.draw(st.sampled_from(sorted(set(UNITS) - {kind})))
    assert judged(boxed(text), rf"{amount}\text{{ {min(UNITS[foreign])}}}") is False
    assert judged(boxed(text), str(amount)) is True


# ---------------------------------------------------------------------------------------------------- any text at all

pieces = st.sampled_from(
    [
        *"0123456789abxyzABC+-*/^_()[]{},.;:!|=<> ",
        *r"\frac \sqrt \pi \text{ \boxed{ \left( \right) \infty \cup \pm yes cm one and $ %".split(),
        *"一二百分之米°½²，\x00\u202e\ud83d",
    ]
)
texts = st.lists(pieces, max_size=12).map("".join)


@examples
@given(texts)
def test_any_answer_equals_itself(text):
    assume(text.strip() and extract_answer(boxed(text)) == text.strip())
    verdict = judge_without_algebra(boxed(text), boxed(text), lenient=True)
    assert not isinstance(verdict, Pending)
    assert verdict.equivalent is True or verdict.stage in ("extraction", "reference")


@examples
@given(texts, texts)
def test_no_text_raises(one, other):
    judged(one, other)
    judged(boxed(one), other)


@examples
@given(st.sampled_from(CASES), st.sampled_from(("997", r"\text{nonsense}", r"\sqrt{997}", "Z", "997 km")), texts)
def test_a_wrong_second_box_never_helps(case, wrong, between):
    assume(judged(case["prediction"], case["reference"]) is False)
    assume(judged(boxed(wrong), case["reference"]) is not True)
    assume(r"\boxed" not in between and "answer" not in between)
    for sprayed in (f"{case['prediction']} {between} {boxed(wrong)}", f"{boxed(wrong)} {case['prediction']}"):
        assert judged(sprayed, case["reference"]) is not True


# ------------------------------------------------------------------------------------------------------- values, sizes


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
        ("10^{-20}+0", "10^{-21}", False),
        (r"e^{\pi\sqrt{163}}", "262537412640768744", False),  # they agree to 30 digits
        (r"\sin(\pi)", "0", True),
        (r"\sin(\pi)+10^{-30}", "0", False),
        ("2^{1000}+1", "2^{1000}", False),
        ("10000!+1", "10000!", False),
        (r"\sqrt{x^2}", "x", False),
        (r"\sqrt{ab}", r"\sqrt{a}\sqrt{b}", True),
        (r"(-1)^n", r"\cos(n\pi)", True),
        (r"\log x", r"\log_{10} x", True),  # a base that one side drops
        (r"\log_2 x", r"\log_3 x", False),
        (r"\sqrt[3]{-8}", "-2", True),
        ("f(x)+f(y)", "f(y)+f(x)", True),
        ("f(x)", "f(y)", False),
    ],
)
def test_same_formula(left, right, expected):
    assert same_formula(read_formula(left), read_formula(right)) is expected


@pytest.mark.parametrize(
    "tower", ["9^{9^{9^9}}", "(((9!)!)!)!", r"\exp(\exp(\exp(\exp(5))))", "((2^{99999})^{99999})^{99999}"]
)
def test_towers_are_told_from_small_numbers_by_their_size(tower):
    node = read_formula(tower)
    with pytest.raises(TooLarge):
        same_formula(node, read_formula("3"))
    assert differ_in_size(node, read_formula("3"))
    assert not differ_in_size(node, node)


def test_bounds_hold_the_value():
    """log2 of 2^10 is 10, of 20! it is 61.08: bounds are to within rounding."""
    for text, log2 in (("2^{10}", 10), ("20!", 61.077), (r"\frac{1}{8}", -3)):
        low, high = bounds(read_formula(text))
        assert low <= log2 + 1e-3
        assert high >= log2 - 1e-3


@pytest.mark.parametrize(
    "text",
    [
        *("(" * 100 + "1" + ")" * 100, "x +", r"\frac{1}", "1 2", "a ? b", "x" * 4000, r"\foo"),
        *("x" * 2500, "1*" * 1400 + "1", "5" + "!" * 2500, r"\pi " * 700),  # deep without brackets
    ],
)
def test_what_is_no_formula(text):
    with pytest.raises(Unreadable):
        read_formula(text)
    assert judged(boxed(text), "5") is False
