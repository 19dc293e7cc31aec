"""Command lines that cannot work: overrides, flags, sweeps, and values that do not go together."""

from __future__ import annotations

from tests.trainer.broken import TINY, Broken


def line(what: str, *arguments: str, names: tuple[str, ...] = ()) -> Broken:
    """Behind a recipe and its hardware; what has to be named is the last argument's key unless said."""
    return Broken(what, (*TINY, *arguments), names or (arguments[-1].partition("=")[0].lstrip("+~"),))


GROUPS = (
    Broken("no recipe", ("hardware=cpu",), ("recipe=NAME", "ci_tiny")),
    Broken("a mistyped recipe", ("recipe=ci_tinny", "hardware=cpu"), ("recipe=ci_tinny", "`ci_tiny`")),
    Broken("a mistyped group", ("receipt=ci_tiny", "hardware=cpu"), ("`receipt`", "`recipe`")),
    Broken("an empty recipe", ("recipe=", "hardware=cpu"), ("`recipe=`", "ci_tiny")),
    Broken("a recipe of null", ("recipe=null", "hardware=cpu"), ("`recipe=null`", "ci_tiny")),
    Broken("a list of recipes", ("recipe=[ci_tiny]", "hardware=cpu"), ("`recipe=[ci_tiny]`",)),
    Broken("a recipe by a path", ("recipe=../ci_tiny", "hardware=cpu"), ("`recipe=../ci_tiny`", "ci_tiny")),
    line("a second recipe", "+recipe=gsm8k_sync"),
    line("a mistyped algorithm", "algorithm=gpro", names=("algorithm=gpro", "`grpo`")),
    line("an unknown model group", "model=huge", names=("model=huge",)),
    Broken("unknown hardware", ("recipe=ci_tiny", "hardware=tpu"), ("hardware=tpu",)),
)

OVERRIDES = (
    line("no key", "=5", names=("`=5`",)),
    line("no value", "steps", names=("`steps`", "steps=VALUE")),
    line("a mistyped key", "stepss=3", names=("`stepss`", "`steps`")),
    line("an added unknown key", "+x=3", names=("`x`",)),
    line("the last part of a key alone", "timeout=3", names=("`timeout`", "`learner.timeout`", "`rewarding.timeout`")),
    line("an abbreviated key", "optimizer.lr=3", names=("`optimizer.lr`", "`optimizer.learning_rate`")),
    line("a key that its section lacks", "batch.zzz=3", names=("`batch.zzz`", "`batch` has prompts, streaming")),
    line("a key below a value", "batch.prompts.x=3"),
    line("two dots", "batch..prompts=3", names=("batch..prompts", "`batch.prompts`")),
    line("a value for a section", "weight_sync=keep", names=("`weight_sync`", "several keys")),
    line("a parameter of vLLM that is refused", "++sampling.bad_words=[x]", names=("`sampling.bad_words`",)),
    line("a key added a second time", "+steps=3"),
    line("a deleted key that is needed", "~steps"),
    line("a deleted key that is not there", "~nothing"),
    line("an unbalanced list", "steps=[1,"),
    line("an unbalanced interpolation", "steps=${"),
    line("an unknown resolver", "steps=${who:knows}"),
    line("two words", "steps=1 2"),
    line("an unknown function", "steps=twice(1)"),
    line("a function that fails", "steps=int(word)"),
    line("a number of 5,000 digits", f"steps={'9' * 5000}"),
    line("lists in lists in lists", f"sampling.stop={'[' * 3000}{']' * 3000}"),
    line("bytes that are no text", "name=\udcff"),
    line("an unknown key of Hydra", "hydra.nothing=1"),
    line("an unknown launcher of Hydra", "hydra/launcher=cloud", names=("hydra/launcher",)),
    line("an option of the recipe that it does not have", "data.options.steps=2", names=("data.options", "'steps'")),
)

FLAGS = (
    line("a mistyped flag", "--multrun", names=("`--multrun`", "`--multirun`")),
    line("flags that do not go together", "--cfg", "job", "--multirun", names=("`--cfg`", "`--multirun`")),
    line("--resolve alone", "--resolve", names=("`--resolve`", "--cfg")),
    line("a folder that is not there", "--config-dir", "{folder}/nowhere", names=("--config-dir", "{folder}/nowhere")),
)

SWEEPS = (
    line("several values without a sweep", "steps=1,2", names=("`steps=1,2`", "--multirun")),
    line("one of several values is wrong", "steps=1,0", "--multirun", names=("`steps=0`",)),
    line("a sweep over nothing", "steps=range(5,1)", "--multirun", names=("steps=range(5,1)",)),
    line("a sweep without a step", "steps=range(1,3,0)", "--multirun", names=("steps=range(1,3,0)",)),
    line("a sweep over an interval", "seed=interval(0,1)", "--multirun", names=("seed=interval(0,1)",)),
    line("a sweep over a pattern", "steps=glob(*)", "--multirun", names=("steps=glob(*)",)),
    line("a sweep of a thousand million jobs", "seed=range(0,1000000000)", "--multirun", names=("seed=range",)),
    line("a sweep over Hydra", "hydra.job.name=a,b", "--multirun", names=("hydra.job.name=a,b",)),
)

COMBINATIONS = (
    line("more ranks than rollouts", "learner.ranks=1000"),
    line("no room for a prompt", "engine.max_model_len=25", names=("prompt of row", "engine.max_model_len")),
    line("a budget past the context", "sampling.max_tokens=300"),
    line("a group of one", "sampling.group_size=1"),
    line("too hot for the engines", "sampling.temperature=3"),
    line("too cold for the engines", "sampling.temperature=0.001"),
    line("an evaluation too hot for the engines", "evaluation.temperature=2.5"),
    line("a stop token below 0", "sampling.stop_token_ids=[-5]"),
    line("a stop token past the vocabulary", "sampling.stop_token_ids=[64]"),
    line("a KV cache past the memory", "engine.kv_cache_mib=100000000", names=("GiB", "`engine.kv_cache_mib`")),
    line("engines past the memory", "engine.count=10000000", names=("GiB", "`engine.count`")),
    line("a hub id that is none", "model.hub_id=nonsense"),
    line("an address with a scheme", "weight_sync.address=http://head"),
    line("an address of no host", "weight_sync.address=999.1.1.1"),
    line("a cluster without a port", "ray.address=somewhere"),
    line("cores that run backwards", "engine.cpu_threads_bind=3-1"),
    line("a project that wandb refuses", "logger.wandb.project=a/b"),
    line("a check that compares nothing", "checks=[loss]"),
    line("a check that is nested too deeply", f"checks=['{'(' * 500}1{')' * 500} > 0']"),
    line("a metric that does not exist", "checkpoint.best=eval/nothing"),
    line("a warning after the failure", "watchdog.warn_after=9999"),
    line("a mixture with an unknown key", "data.mixture=[{path: a.jsonl, wieght: 1}]", names=("`wieght`", "`weight`")),
    line("a mixture of one name", "data.mixture=[{name: a},{name: a}]"),
    line("a mixture with a weight past counting", f"data.mixture=[{{name: a, weight: {'9' * 400}}}]"),
)

COMMAND_LINES = (*GROUPS, *OVERRIDES, *FLAGS, *SWEEPS, *COMBINATIONS)
