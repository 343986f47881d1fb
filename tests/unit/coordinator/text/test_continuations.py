"""Outputs that continue a prompt's text: the space between the two, and stop strings that are control tokens."""

from __future__ import annotations

import json

import pytest

from common.core.request import FinishReason
from coordinator.api.choice import Choice
from coordinator.api.openai import parse_chat
from coordinator.api.parsed_choice import OutputReading, ParsedChoice
from coordinator.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from coordinator.text.tokenizer import TextModel, _WindowDetokenizer
from tests.tiny_tokenizers import CORPUS, KINDS, checkpoint_files

TEXTS = [line for line in CORPUS if line.strip()] + ["Größe und 你好 🙂 naïve", "a  b   c", "x\ny z", "the the the"]


@pytest.fixture(scope="module", params=KINDS)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = KINDS[request.param]()
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in checkpoint_files(request.param).items():
        (directory / name).write_text(json.dumps(content))
    return TextModel(directory, vocab_size=tokenizer.get_vocab_size())


@pytest.mark.parametrize("sample", TEXTS)
def test_prompt_and_output_together_are_the_whole_text(text: TextModel, sample: str) -> None:
    """Wherever a text is cut between two tokens, neither a space nor a character is lost or doubled."""
    ids = text.encode(sample)
    whole = text.decode(ids)
    for cut in range(1, len(ids)):
        before = text.decode(ids[:cut])
        stream = text.detokenizer(after=ids[:cut])
        output = "".join([*map(stream.push, ids[cut:]), stream.finish()])
        if before.endswith("�"):  # within a character: it is shown with the output
            assert (whole.endswith(output) and "�" not in output) or "�" in whole
        else:
            assert before + output == whole, (ids[:cut], ids[cut:])


def test_a_character_that_only_the_prompt_has_begun_is_shown_with_an_echo(text: TextModel) -> None:
    """Without one, the output would be no JSON even if its tokens are."""
    whole, braces = text.encode("🙂", add_special_tokens=False), text.encode("{}", add_special_tokens=False)
    cuts = [cut for cut in range(1, len(whole)) if text.decode(whole[:cut]).endswith("�")]
    if not cuts:
        pytest.skip("no token of this tokenizer is a part of a character")
    for cut in cuts:
        own, echoed = (text.detokenizer(after=whole[:cut], echoed=echoed) for echoed in (False, True))
        completed, ended = text.detokenizer(after=whole[:cut]), text.detokenizer(after=whole[:cut])
        assert "".join([*map(own.push, braces), own.finish()]).lstrip() == "{}"
        assert "".join([*map(echoed.push, braces), echoed.finish()]).startswith("�")
        assert "".join([*map(completed.push, whole[cut:]), completed.finish()]).endswith("🙂")
        assert ended.finish() == ""


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "unigram"])
def test_a_first_space_is_kept_after_a_prompt_and_dropped_at_a_beginning(text: TextModel, kind: str) -> None:
    ids = text.encode("the receiver", add_special_tokens=False)
    if not isinstance(text.detokenizer(), _WindowDetokenizer):
        pytest.skip("a byte-level tokenizer has its spaces in the tokens' bytes")
    word = text.encode("the", add_special_tokens=False)
    alone, after = text.detokenizer(), text.detokenizer(after=word)
    assert "".join(map(alone.push, ids)).startswith("the")
    assert "".join(map(after.push, ids)).startswith(" the")


def test_a_stop_string_that_is_a_control_token_is_its_id(text: TextModel) -> None:
    found = text.control_tokens(["</s>", "</s> ", "the", ""])
    ((token, stop),) = found.items()
    assert stop == text.token_text(token) == "</s>" and text.is_special(token)


@pytest.mark.parametrize("parsed", [False, True])
def test_an_output_that_continues_a_message_keeps_its_first_space(text: TextModel, parsed: bool) -> None:
    """As it does for completions; one that begins a message does not begin with a space."""
    if not isinstance(text.detokenizer(), _WindowDetokenizer):
        pytest.skip("a byte-level tokenizer has its spaces in the tokens' bytes")
    prompt = text.encode("the sender", add_special_tokens=False)
    ids = text.encode("the sender of the receiver", add_special_tokens=False)[len(prompt) :]
    options = parse_chat({"messages": [{"role": "user", "content": "x"}]}).options
    reading = OutputReading(OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]), None, False, True)
    shown = {}
    for continues in (False, True):
        if parsed:
            choice: Choice = ParsedChoice(0, prompt, options, text, None, reading, continues=continues)
        else:
            choice = Choice(0, prompt, options, text, None, continues=continues)
        list(choice.feed(ids, [], FinishReason.LENGTH))
        shown[continues] = "".join(choice.text)
    whole = text.decode([*prompt, *ids])
    assert text.decode(prompt) + shown[True] == whole and shown[True].startswith(" ")
    assert shown[False] == shown[True].removeprefix(" ")
