from .compare import compare_formulas
from .errors import Refused
from .stages import STAGE_NAMES, Pending, Verdict, judge_without_algebra

def verify_answer(prediction, reference, *, lenient=True):
    v = judge_without_algebra(prediction, reference, lenient=lenient)
    if isinstance(v, Verdict): return v
    try:
        c = compare_formulas(v.left, v.right)
    except Refused as e:
        return v.undecided("refused", str(e))
    return v.decided(c.equivalent, presumed=c.presumed)
