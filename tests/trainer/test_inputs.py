import pytest

from trainer.config import Config
from trainer.dotted import DottedPathError
from trainer.inputs import make_task


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("os.path", "cannot be made: TypeError"),
        ("os.getcwd", "makes a str, which has no method `load`"),
        ("trainer.config.Config", "which has no method `load`"),
    ],
)
def test_what_is_no_task_is_refused_before_anything_is_loaded(task, words):
    with pytest.raises(DottedPathError, match=words):
        make_task(Config(task=task))
