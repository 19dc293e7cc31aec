from trainer import help as trainer_help
from trainer.checks import all_keys
from trainer.compose import GROUPS


def test_help_names_every_group_and_only_keys_that_exist():
    page = trainer_help.help_page()
    assert set(trainer_help.config_groups()) == set(GROUPS)
    assert set(trainer_help.COMMON_KEYS) <= set(all_keys())
    assert len(trainer_help.COMMON_KEYS) == 20
    for name in (*GROUPS, *trainer_help.COMMON_KEYS, "gsm8k_fully_async"):
        assert f"  {name}" in page or f" {name}" in page
