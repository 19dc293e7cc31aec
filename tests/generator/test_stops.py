"""Stop strings against real tokenizers, built here: byte-level BPE, and byte fallback as in SentencePiece models."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from generator.stops import MAX_UNCLEAN, REPLACEMENT, StopMatcher, load_decode

CORPUS = [
    "The end of the answer.\n\nUser: what is é? Это 日本語 🙂🙂 stop",
    "</answer> </answer> END END the the answer",
]


def byte_level() -> Tokenizer:
    """Merges of ASCII words and all single bytes, so that é spans two tokens, 日 three, and 🙂 four."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = "".join(character for text in CORPUS for character in text if character.isascii())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([words], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Bytes as <0x..> tokens beside whole words, and a decoder that strips one space in front."""
    words = ["\u2581the", "\u2581end", "\u2581", "END", "é", *"abcden.:"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
BYTE_LEVEL = TOKENIZERS["byte_level"]


def decode(tokenizer: Tokenizer):
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


def matcher(*stop: str, tokenizer: Tokenizer = BYTE_LEVEL, min_tokens: int = 0) -> StopMatcher:
    return StopMatcher(decode(tokenizer), stop, min_tokens)


def encode(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text).ids


def first_end(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...], min_tokens: int = 0) -> int | None:
    """The definition, by decoding every prefix from its beginning."""
    text = decode(tokenizer)
    ignored = max(len(text(token_ids[:n]).rstrip(REPLACEMENT)) for n in range(min_tokens + 1))
    for n in range(min_tokens + 1, len(token_ids) + 1):
        if any(string in text(token_ids[:n])[max(0, ignored - len(string) + 1) :] for string in stop):
            return n
    return None


def test_the_tokenizer_of_these_tests_splits_characters_and_merges_words():
    assert len(encode("é")) == 2
    assert len(encode("🙂")) == 4
    assert len(encode("answer")) < 6


def test_a_stop_string_is_found_at_the_token_that_completes_it():
    ids = encode("the answer</answer> and more")
    end = matcher("</answer>").feed(ids)
    assert BYTE_LEVEL.decode(ids[:end]).endswith("</answer>")
    assert "</answer>" not in BYTE_LEVEL.decode(ids[: end - 1])


@pytest.mark.parametrize("stop", ["</answer>", "é?", "🙂🙂", "日本語 ", "\n\nUser:"])
def test_a_stop_string_that_straddles_segments_is_found_wherever_they_are_cut(stop):
    ids = encode(f"The end: {stop} the rest")
    end = first_end(BYTE_LEVEL, ids, (stop,))
    assert end is not None
    for position in range(end):
        stops = matcher(stop)
        assert stops.feed(ids[:position]) is None
        assert stops.feed(ids[position:]) == end - position
        assert stops.stopped


def test_a_match_inside_a_token_that_goes_on_behind_it_keeps_the_whole_token():
    ids = encode("an answer")
    assert BYTE_LEVEL.decode(ids).find("ans") + 3 < len("an answer")
    end = matcher("ans").feed(ids)
    assert BYTE_LEVEL.decode(ids[:end]) == "an answer"


def test_a_stop_string_in_front_of_an_unfinished_character_is_found_before_that_is_finished():
    first, second = encode("é")
    joined = Tokenizer(models.BPE({"END\u00c3": 0, "\u00a9": 1}, []))  # "END" and the first byte of é in one token
    joined.decoder = decoders.ByteLevel()
    assert joined.decode([0, 1]) == "ENDé"
    assert matcher("END", tokenizer=joined).feed([0, 1]) == 1
    assert matcher("é").feed([first]) is None
    assert matcher("é").feed([first, second]) == 2


def test_half_a_character_is_no_match_for_another_one_with_the_same_first_byte():
    first = encode("é")[0]
    assert encode("è")[0] == first
    assert matcher("é").feed(encode("è")) is None


def test_the_first_of_several_stop_strings_to_be_complete_wins():
    ids = encode("END the answer")
    assert matcher("answer", "the", "nothing").feed(ids) == first_end(BYTE_LEVEL, ids, ("the",))


def test_stop_strings_inside_the_minimum_do_not_count_and_later_ones_do():
    ids = encode("END") * 3
    one = len(encode("END"))
    assert matcher("END").feed(ids) == one
    assert matcher("END", min_tokens=one).feed(ids) == 2 * one
    assert matcher("END", min_tokens=2 * one).feed(ids) == 3 * one
    assert matcher("END", min_tokens=3 * one).feed(ids) is None


def test_special_tokens_inside_a_stop_string_do_not_hide_it():
    special = BYTE_LEVEL.token_to_id("<|im_end|>")
    ids = [token for token_id in encode("an </answer>") for token in [token_id, *[special] * 40]]
    end = matcher("</answer>").feed(ids)
    assert end is not None
    assert BYTE_LEVEL.decode(ids[:end]) == "an </answer>"
    assert ids[end - 1] != special


def test_bytes_that_never_become_a_character_do_not_hide_what_follows():
    stray = encode("é")[1]
    ids = [*[stray] * (3 * MAX_UNCLEAN), *encode(" END")]
    assert matcher("END").feed(ids) == len(ids)


def test_the_window_stays_small_however_long_the_response_is():
    sizes = []
    stops = StopMatcher(lambda ids: sizes.append(len(ids)) or BYTE_LEVEL.decode(ids), ["</answer>"])
    special, stray = BYTE_LEVEL.token_to_id("<|im_end|>"), encode("é")[1]
    assert stops.feed([*encode("the 日本語 of the 🙂 ") * 100, *[special] * 500, *[stray] * 500]) is None
    assert max(sizes) <= 3 * MAX_UNCLEAN


@pytest.mark.parametrize("before", range(8))
def test_a_space_that_the_decoder_strips_at_the_beginning_is_found_inside(before):
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.token_to_id(token) for token in [*"c" * before, "\u2581", "a", "b"]]
    assert matcher(" ab", tokenizer=tokenizer).feed(ids) == (len(ids) if before else None)


@pytest.mark.parametrize("stop", ["END", "é日", "\n", "🙂\nE"])
def test_characters_in_a_long_run_of_byte_tokens_are_never_torn(stop):
    """A byte-fallback decoder makes U+FFFD of every byte of a run that is no valid text as a whole."""
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in ("日本語🙂é" * 5 + "日本語🙂\nEND").encode()]
    end = matcher(stop, tokenizer=tokenizer).feed(ids)
    assert end is not None
    assert end == first_end(tokenizer, ids, (stop,))


@pytest.mark.parametrize("stop", [[], [""], ["a", ""], ["\N{REPLACEMENT CHARACTER}"]])
def test_stop_strings_that_could_not_work_are_refused(stop):
    with pytest.raises(ValueError, match="stop strings"):
        StopMatcher(decode(BYTE_LEVEL), stop)


def test_feeding_on_behind_the_end_is_refused():
    stops = matcher("END")
    stops.feed(encode("END"))
    with pytest.raises(ValueError, match="end of its response"):
        stops.feed([1])


def test_the_decoder_of_a_model_folder_skips_special_tokens_and_refuses_stop_strings_made_of_them(tmp_path):
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    special = BYTE_LEVEL.token_to_id("<|im_end|>")
    assert load_decode(str(tmp_path), ["END"])([*encode("END"), special]) == "END"
    with pytest.raises(ValueError, match=rf"stop_token_ids=\[{special}\]"):
        load_decode(str(tmp_path), ["END", "\n<|im_end|>"])


def test_a_model_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}.*stop_token_ids"):
        load_decode(str(tmp_path), ["END"])


@st.composite
def responses(draw):
    """A tokenizer, a response of any tokens (text, and stray bytes of characters), cuts, stop strings, a minimum."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    some = st.sampled_from(draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12)))
    ids = draw(st.lists(some, min_size=1, max_size=60))
    text = tokenizer.decode(ids)
    stop = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop.append(
            text[start : start + draw(st.integers(1, 6))].strip(REPLACEMENT) or draw(st.text("END é", min_size=1))
        )
    stop = tuple(string for string in stop if REPLACEMENT not in string) or ("END",)
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=5))
    return tokenizer, ids, stop, cuts, draw(st.integers(0, 8))


@given(responses())
def test_a_match_ends_where_the_definition_says_for_any_tokens_in_any_segments(case):
    tokenizer, ids, stop, cuts, min_tokens = case
    expected = first_end(tokenizer, ids, stop, min_tokens)
    stops = matcher(*stop, tokenizer=tokenizer, min_tokens=min_tokens)
    found, bounds = None, sorted([0, *cuts, len(ids)])
    for start, end in pairwise(bounds):
        if (kept := stops.feed(ids[start:end])) is not None:
            found = start + kept
            break
    assert found == expected
