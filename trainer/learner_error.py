"""What every caller of the learner may have to deal with; apart from the group of actors, which needs Ray."""

from __future__ import annotations


class LearnerError(RuntimeError):
    """A learner call failed or did not return in time. The cause is the error of the first rank that reported one."""
