"""What a stage raises when it can't decide."""


class Refused(Exception):
    """Raised by a stage that knows that neither it nor a later one can decide the pair."""
