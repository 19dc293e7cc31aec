"""Which model a run uses: from ``model.path`` to a folder that ``transformers`` and vLLM load, with its special ids.

Nothing here imports torch, and ``transformers`` only for the tokenizer: the command starts quickly and says what is
wrong with a path before anything heavy is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from generator.task import ModelError
from trainer import embedded
from trainer.dotted import DottedPathError, resolve_dotted
from trainer.model_cache import build_once, default_cache_dir, missing_parts
from trainer.raised import raised
from trainer.wording import clipped, shown

DeviceKind = Literal["cpu", "gpu"]

SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings of models that rescale or cap the logits after the head: without them log-probabilities would silently
differ from the engine's, so a learner refuses the model."""
FACTORY_PREFIX = "factory:"
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_FORMAT = 2
"""Raise it when the conversion changes, so that folders of the older one are not used."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model folder and what the rest of the run needs to know of it before anything is loaded."""

    path: str
    """A local folder with configuration, weights and tokenizer."""
    source: str
    """What was taken, in one phrase."""
    reason: str
    """Why it was taken."""
    eos_token_ids: tuple[int, ...]
    """Every id that ends a sequence: of the generation configuration, the configuration and the tokenizer."""
    max_position_embeddings: int
    dtype: str
    """``float32`` or ``bfloat16``: what engines and the learner's forward pass compute in."""
    vocabulary: int | None = None
    """Rows of the embedding, where the configuration says it; the tokenizer may know fewer tokens, or more."""
    attention_heads: int | None = None
    """Of a layer, where the configuration says it."""
    key_value_heads: int | None = None
    """Of a layer, where the configuration says it; at most as many as attention heads."""
    scaled_logits: str | None = None
    """The setting that makes it a model which cannot be trained here, with its value; see ``SCALED_LOGITS``."""


def resolve_model(
    path: str,
    *,
    hub_id: str,
    cache_dir: str | Path | None,
    device_kind: DeviceKind,
    dtype: str,
    reachable: Callable[[], bool] | None = None,
) -> ResolvedModel:
    """Find, fetch, convert or build the model that ``path`` names.

    ``path`` is a folder, a hub id (``owner/name``), ``factory:package.module:function`` (called with an empty folder
    to write the model into), or ``auto``: on CPU the embedded SmolLM2-135M-Instruct; on GPU ``hub_id``, or the embedded
    model where no hub answers. Fetched and built models live in ``cache_dir`` (default: :func:`default_cache_dir`) or
    in the hub's own cache. ``reachable`` answers whether the hub does; default :func:`hub_reachable`.

    Raises :class:`ModelError` that names what was looked for and where.
    """
    try:
        cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    except RuntimeError as error:  # a home of nobody
        raise ModelError(f"model.cache_dir {cache_dir!r} cannot be looked up: {error}") from error
    folder, source, reason = _locate(path, hub_id, cache, device_kind, reachable or hub_reachable)
    return _describe(folder, source, reason, _resolve_dtype(dtype, device_kind))


def load_tokenizer(path: str) -> Any:
    """The tokenizer in the model folder ``path``. Where it has a ``tokenizer.json``, without importing torch."""
    try:
        if (Path(path) / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # `tokenizers` raises plain Exception for a file that it cannot read
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def hub_reachable(timeout: float = 4.0) -> bool:
    """Whether the model hub answers within ``timeout`` seconds; ``False`` at once with ``HF_HUB_OFFLINE``.

    Asked in a thread of its own: name resolution knows no timeout.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered, finished = threading.Event(), threading.Event()

    def ask() -> None:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        # An error status is no answer: it may be a proxy's refusal.
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=timeout):
            answered.set()
        finished.set()

    threading.Thread(target=ask, name="hub-reachable", daemon=True).start()
    finished.wait(timeout)
    return answered.is_set()


def _locate(
    path: str, hub_id: str, cache: Path, device_kind: DeviceKind, reachable: Callable[[], bool]
) -> tuple[Path, str, str]:
    """The folder, the source and the reason for a configured path."""
    if path == "auto" and device_kind == "gpu":
        found = _from_hub(hub_id, reachable)
        if found is not None:
            return found, f"hub model {hub_id}", "model.path is auto and the run is on GPU (model.hub_id)"
        why = f"{hub_id} is not in the hub's cache and the hub does not answer"
        return embedded_model(cache), f"embedded {EMBEDDED_NAME}", why
    if path == "auto":
        return embedded_model(cache), f"embedded {EMBEDDED_NAME}", "model.path is auto and the run is on CPU"
    if path.startswith(FACTORY_PREFIX):
        return _from_factory(path, cache), f"built by {path.removeprefix(FACTORY_PREFIX)}", "model.path names a factory"
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home of nobody
        what = getattr(error, "strerror", None) or error
        raise ModelError(f"model.path {clipped(path)!r} cannot be looked up: {what}") from error
    if is_folder:
        return folder, f"folder {folder}", "model.path names a folder"
    if exists:
        raise ModelError(f"model.path {path!r} is a file; a model is a folder with config.json, weights and tokenizer")
    if HUB_ID.match(path):
        found = _from_hub(path, reachable)
        if found is not None:
            return found, f"hub model {path}", "model.path names a hub id"
        raise ModelError(
            f"model.path {path!r} is no folder here ({folder.absolute()} does not exist), and as a hub id it is not in "
            "the hub's cache and the hub does not answer; give the path of a model folder, or model.path=auto"
        )
    raise ModelError(
        f"model.path {path!r} names no model: the folder {folder.absolute()} does not exist, and it is no hub id "
        f"of the form owner/name; give a folder, a hub id, {FACTORY_PREFIX}package.module:function, or auto"
    )


def _from_hub(hub_id: str, reachable: Callable[[], bool]) -> Path | None:
    """The folder of a hub model, from the hub's cache or fetched; ``None`` when no hub answers."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=True))
        if not missing_parts(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is no id of a model at the hub: {error}") from error
    if not reachable():
        return None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"the hub model {hub_id} cannot be fetched: {error}") from error


def embedded_model(cache: Path | None = None) -> Path:
    """The folder of the embedded model, converted into the cache (default: :func:`default_cache_dir`) once."""
    cache = cache or default_cache_dir()
    name = f"{EMBEDDED_NAME}-bf16-v{EMBEDDED_FORMAT}"
    gguf = embedded.find_gguf()
    if gguf is None:
        if not missing_parts(cache / name):
            return cache / name
        raise ModelError(
            f"the embedded {EMBEDDED_NAME} is not installed: there is no package {embedded.PACKAGE} with a GGUF file; "
            f"run `{embedded.INSTALL_HINT}`, or set model.path to a model folder"
        )
    return build_once(cache, name, lambda folder: embedded.convert(gguf, folder))


def _from_factory(path: str, cache: Path) -> Path:
    """The folder that a factory wrote, cached under a name that changes with the factory's source file."""
    dotted = path.removeprefix(FACTORY_PREFIX)
    try:
        build = resolve_dotted(dotted, "model.path")
        source = Path(inspect.getfile(build)).read_bytes()
    except DottedPathError as error:
        raise ModelError(str(error)) from error
    except (TypeError, OSError) as error:
        raise ModelError(f"model.path: {dotted} is no function that a file holds: {error}") from error
    name = f"{dotted.replace(':', '.')}-{hashlib.sha256(source).hexdigest()[:12]}"

    def write(folder: Path) -> None:
        try:
            build(folder)
        except (OSError, ModelError):
            raise
        except Exception as error:
            raise ModelError(f"model.path: {dotted} cannot build the model: {raised(error)}") from error

    return build_once(cache, name, write)


def _describe(folder: Path, source: str, reason: str, dtype: str) -> ResolvedModel:
    missing = missing_parts(folder)
    if missing:
        raise ModelError(f"{folder} is no model folder: it lacks {', '.join(missing)}")
    config = _read_json(folder / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelError(f"{folder / 'config.json'}: text_config is {shown(text)}, not an object")
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    eos: dict[int, None] = {}  # a set that keeps its order
    for value in (*(part.get("eos_token_id") for part in (generation, text, config)), _tokenizer_eos(folder)):
        eos.update(dict.fromkeys(_ids(value, folder)))
    if not eos:
        raise ModelError(
            f"{folder} names no end-of-sequence token in its configuration, generation configuration or tokenizer"
        )
    context = text.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ModelError(f"{folder / 'config.json'} has no max_position_embeddings, so the context length is unknown")
    return ResolvedModel(
        str(folder.absolute()),
        source,
        reason,
        tuple(eos),
        context,
        dtype,
        vocabulary=_number(text, "vocab_size"),
        attention_heads=_number(text, "num_attention_heads"),
        key_value_heads=_number(text, "num_key_value_heads"),
        scaled_logits=next(
            (f"{name}={text[name]}" for name in SCALED_LOGITS if text.get(name) not in (None, 1, 1.0)), None
        ),
    )


def _number(configuration: dict[str, Any], key: str) -> int | None:
    value = configuration.get(key)
    return value if isinstance(value, int) else None


def _tokenizer_eos(folder: Path) -> int | None:
    """The tokenizer's own end-of-sequence id, read from its files without building it."""
    configuration, tokenizer = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not configuration.is_file() or not tokenizer.is_file():
        return None
    name = _read_json(configuration).get("eos_token")
    try:
        ids = {token["content"]: token["id"] for token in _read_json(tokenizer).get("added_tokens", [])}
        return ids.get(name["content"] if isinstance(name, dict) else name)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{tokenizer} or {configuration.name} has tokens of another form: {error}") from error


def _ids(value: Any, folder: Path) -> Iterator[int]:
    """The ids in a configuration entry that may be absent, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise ModelError(f"{folder}: eos_token_id is {shown(value)}; it must be a token id or a list of them")
        yield one


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _resolve_dtype(dtype: str, device_kind: DeviceKind, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``auto`` is bfloat16 on GPU and on CPUs with bfloat16 units; elsewhere it would be several times slower."""
    if dtype != "auto":
        return dtype
    if device_kind == "gpu":
        return "bfloat16"
    try:
        flags = cpuinfo.read_text()
    except OSError:
        return "float32"
    return "bfloat16" if re.search(r"\b(avx512_bf16|amx_bf16)\b", flags) else "float32"
