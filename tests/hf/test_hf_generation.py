"""generate(): with a cache as without, in a batch as alone, in pieces as in one go."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, TextStreamer, pipeline

from hf.hf_cases import EVERY_KIND, GREEDY, STACKS, prompt, shallow_model, small_model, words
from model_cases import assert_close
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.hf import TitansCache, TitansForCausalLM

# segment_len is 8, window 6, chunk_size 4: shorter, equal to the window, to the segment, across, far beyond. The first
# and the last are written on across four segments, the others across two.
PROMPTS = {3: 23, 6: 12, 8: 12, 13: 12, 45: 21}
every_architecture = pytest.mark.parametrize("architecture", EVERY_KIND)


def decoded(model: TitansForCausalLM, ids: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Sequences and the logits of every decoded token, before generate() makes them float32."""
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, arguments, result: logits.append(result))
    settings = GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True} | settings
    out = model.generate(ids, **settings)
    hook.remove()
    assert isinstance(out.past_key_values, TitansCache)
    assert [step.shape[1] for step in logits] == [1] * len(logits), "no logits that nobody needs"
    return out.sequences, torch.cat(logits, dim=1)


@pytest.mark.parametrize(("length", "new"), PROMPTS.items())
@every_architecture
def test_cached_logits_are_those_of_one_parallel_pass(architecture: str, length: int, new: int) -> None:
    model = shallow_model(architecture, torch.float64, attention_conv_size=2)
    sequences, logits = decoded(model, prompt(length, 2), max_new_tokens=new)
    assert sequences.shape == (2, length + new)
    assert_close(logits, model(sequences).logits[:, length - 1 : -1], 1e-9)


@pytest.mark.parametrize("length", [8, 45])
@every_architecture
def test_cached_logits_are_those_of_one_parallel_pass_in_float32(architecture: str, length: int) -> None:
    model = shallow_model(architecture)
    sequences, logits = decoded(model, prompt(length, 2), max_new_tokens=PROMPTS[length])
    assert_close(logits, model(sequences).logits[:, length - 1 : -1], 1e-4)


LENGTHS = (3, 13, 21, 1)


@cache
def each_alone(architecture: str) -> list[tuple[Tensor, Tensor]]:
    """What prompts of these lengths are written on with, one at a time."""
    model = shallow_model(architecture, torch.float64)
    return [decoded(model, prompt(length, seed=row)) for row, length in enumerate(LENGTHS)]


@every_architecture
def test_a_left_padded_batch_decodes_as_each_prompt_alone(architecture: str) -> None:
    model, lengths = shallow_model(architecture, torch.float64), LENGTHS
    ids, mask = torch.zeros(4, 21, dtype=torch.long), torch.zeros(4, 21, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 21 - length :], mask[row, 21 - length :] = prompt(length, seed=row)[0], 1
    sequences, logits = decoded(model, ids, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone, its_logits = each_alone(architecture)[row]
        assert torch.equal(sequences[row, 21 - length :], alone[0])
        assert_close(logits[row], its_logits[0], 1e-9)


@every_architecture
def test_a_right_padded_batch_is_written_on_after_each_rows_last_word(architecture: str) -> None:
    model, lengths = shallow_model(architecture, torch.float64), LENGTHS
    ids, mask = torch.zeros(4, 21, dtype=torch.long), torch.zeros(4, 21, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = prompt(length, seed=row)[0], 1
    sequences, logits = decoded(model, ids, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone, its_logits = each_alone(architecture)[row]
        assert torch.equal(sequences[row, 21:], alone[0, length:])
        assert_close(logits[row], its_logits[0], 1e-9)


@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": None}], ids=str)
def test_drafts_follow_the_last_word_of_a_right_padded_prompt(drafts: dict[str, Any]) -> None:
    model, ids = shallow_model("mac", torch.float64), prompt(11, 2)[:1]
    drafts = {name: model if value is None else value for name, value in drafts.items()}
    padded = torch.cat((ids, torch.zeros(1, 5, dtype=torch.long)), dim=1)
    mask = torch.ones_like(padded)
    mask[:, 11:] = 0
    plain = model.generate(ids, max_new_tokens=9, **GREEDY)[:, 11:]
    drafted = model.generate(padded, attention_mask=mask, max_new_tokens=9, **GREEDY, **drafts)[:, 16:]
    assert torch.equal(drafted, plain)


def test_the_last_places_are_those_of_the_text_and_padding_has_the_word_before() -> None:
    """So a training that asks for the last places, of which padding is left out later, gets them in order."""
    model, ids = shallow_model("lmm", torch.float64), prompt(11, 2)
    mask = torch.ones_like(ids)
    mask[0, 9:], mask[1, :3] = 0, 0
    whole, last = (model(ids, attention_mask=mask, logits_to_keep=count).logits for count in (0, 4))
    torch.testing.assert_close(last[1], whole[1, 7:])
    torch.testing.assert_close(last[0], whole[0, [7, 8, 8, 8]])


@pytest.mark.parametrize("architecture", STACKS)
def test_a_model_without_persistent_tokens_decodes(architecture: str) -> None:
    model, ids = shallow_model(architecture, torch.float64, num_persistent=0), prompt(11, 2)
    sequences, logits = decoded(model, ids)
    assert_close(logits, model(sequences).logits[:, 10:-1], 1e-9)


def test_a_text_ends_at_a_string() -> None:
    tokenizer, ids = byte_tokenizer(), prompt(11)
    model = small_model("mac", vocab_size=259)
    letters = GREEDY | {"max_new_tokens": 12, "suppress_tokens": [*range(65), *range(91, 259)]}
    free = model.generate(ids, **letters)
    stop = tokenizer.decode(free[0, 13:14])
    ended = model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **letters)
    assert ended.shape[1] <= 14
    assert torch.equal(ended, free[:, : ended.shape[1]])


@every_architecture
def test_greedy_sampling_and_beams_need_no_cache(architecture: str) -> None:
    model, ids = shallow_model(architecture), prompt(5, 2)
    for settings in ({"do_sample": False}, {"do_sample": True, "top_k": 10}, {"num_beams": 3, "do_sample": False}):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            found.append(model.generate(ids, max_new_tokens=6, use_cache=use_cache, pad_token_id=0, **settings))
        assert torch.equal(*found), settings


def test_several_samples_per_prompt_are_of_that_prompt() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        settings = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 9, "pad_token_id": 0}
        found.append(model.generate(ids, use_cache=use_cache, **settings))
    assert torch.equal(*found)
    assert found[0].shape == (6, 20)
    assert torch.equal(found[0][:, :11], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row.tolist()) for row in found[0]}) > 2


@every_architecture
def test_the_cache_that_is_returned_can_be_continued(architecture: str) -> None:
    model, ids = shallow_model(architecture, torch.float64), prompt(11, 2)
    whole, _ = decoded(model, ids)
    first = model.generate(ids, max_new_tokens=7, return_dict_in_generate=True, **GREEDY)
    cache = first.past_key_values
    assert cache.get_seq_length() == 11 + 6, "the last token has not been read"
    rest = model.generate(first.sequences, past_key_values=cache, max_new_tokens=5, **GREEDY)
    assert torch.equal(rest, whole)


@pytest.mark.parametrize("architecture", ["mac", "mal", "attention"])
def test_a_prompt_may_be_read_in_pieces(architecture: str) -> None:
    model, ids = shallow_model(architecture, torch.float64), prompt(21, 2)
    whole, _ = decoded(model, ids)
    cache = TitansCache()
    for start, stop in ((0, 5), (5, 14)):
        model(ids[:, start:stop], past_key_values=cache)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=12, **GREEDY), whole)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, max_new_tokens=12, **GREEDY), whole)


@pytest.mark.parametrize("architecture", ["mac", "lmm", "sliding"])
def test_a_padded_prompt_may_be_read_in_pieces(architecture: str) -> None:
    """The mask of a later piece covers what came before, as generate() passes it."""
    model, ids = shallow_model(architecture, torch.float64), prompt(21, 2)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :9] = 0
    whole, _ = decoded(model, ids, attention_mask=mask)
    cache = TitansCache()
    model(ids[:, :12], mask[:, :12], cache)
    model(ids[:, 12:17], mask[:, :17], cache)
    again = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **GREEDY)
    assert torch.equal(again, whole)


@every_architecture
def test_several_questions_can_be_asked_of_one_memory(architecture: str) -> None:
    model, document = shallow_model(architecture, torch.float64), prompt(30)
    read = model(document, use_cache=True).past_key_values
    for seed in (1, 2):
        text = torch.cat([document, prompt(4, seed=seed)], dim=1)
        answer = model.generate(text, past_key_values=copy.deepcopy(read), max_new_tokens=4, **GREEDY)
        assert torch.equal(answer, model.generate(text, max_new_tokens=4, **GREEDY))
    assert read.get_seq_length() == 30


def test_embeddings_may_be_the_prompt() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    whole = model.generate(ids, max_new_tokens=8, **GREEDY)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=8, **GREEDY)
    assert torch.equal(embedded, whole[:, 11:])


def test_embeddings_beside_a_cache_are_those_of_the_whole_text() -> None:
    """transformers leaves out as many of them as the cache has read, whatever they are of."""
    model, ids = small_model("mac"), prompt(11, 2)
    embeds, expected = model.get_input_embeddings()(ids), model.generate(ids, max_new_tokens=8, **GREEDY)

    def go_on(start: int, columns: int) -> Tensor:
        cache = model(ids[:, :5], use_cache=True).past_key_values
        mask = torch.ones(2, columns, dtype=torch.long)
        return model.generate(
            inputs_embeds=embeds[:, start:], attention_mask=mask, past_key_values=cache, max_new_tokens=8, **GREEDY
        )

    assert torch.equal(go_on(0, 11), expected[:, 11:])
    for columns in (6, 11):
        with pytest.raises(ValueError, match=r"got inputs_embeds of \d tokens and a cache that has read 5; expected"):
            go_on(5 if columns == 11 else 6, columns)


def test_generation_works_in_inference_mode_and_changes_no_weight() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = model.generate(ids, max_new_tokens=8, **GREEDY)
    for backend in ("chunked", "reference"):
        other = small_model("mac", memory_backend=backend)
        with torch.inference_mode():
            assert torch.equal(other.generate(ids, max_new_tokens=8, **GREEDY), expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_text_ends_at_its_end_token() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    free = model.generate(ids, max_new_tokens=12, **GREEDY)
    end = int(free[0, 14])
    ended = model.generate(ids, max_new_tokens=12, eos_token_id=end, **GREEDY)
    first = (free[0, 11:] == end).nonzero()[0].item() + 11
    assert torch.equal(ended[0, : first + 1], free[0, : first + 1])
    assert not ended[0, first + 1 :].any(), "padding follows"


@pytest.mark.parametrize("positional", [False, True])
def test_a_generation_config_decides_about_the_cache(positional: bool) -> None:
    model, ids = small_model("mac"), prompt(11)
    config = GenerationConfig(max_new_tokens=3, use_cache=False, return_dict_in_generate=True, **GREEDY)
    out = model.generate(ids, config) if positional else model.generate(ids, generation_config=config)
    assert out.past_key_values is None
    config.use_cache = True
    assert isinstance(model.generate(ids, generation_config=config).past_key_values, TitansCache)


def test_a_saved_choice_of_no_cache_holds_beside_another_config(tmp_path: Path) -> None:
    """Only after transformers has put its own defaults together is it known whether there is to be a cache."""
    model, ids = small_model("mac"), prompt(11)
    expected = model.generate(ids, max_new_tokens=6, **GREEDY)
    model.generation_config.use_cache = False
    model.save_pretrained(tmp_path)
    model = TitansForCausalLM.from_pretrained(tmp_path).eval()
    assert model.generation_config.use_cache is False
    for settings in (
        {"max_new_tokens": 6, **GREEDY},
        {"generation_config": GenerationConfig(max_new_tokens=6, **GREEDY)},
    ):
        assert torch.equal(model.generate(ids, **settings), expected)
    embedded = model.get_input_embeddings()(ids)
    written = model.generate(inputs_embeds=embedded, max_new_tokens=6, use_cache=False, **GREEDY)
    assert torch.equal(written, expected[:, 11:])
    with pytest.raises(ValueError, match="got past_key_values and use_cache=False; expected one of them"):
        model.generate(ids, past_key_values=TitansCache(), use_cache=False, max_new_tokens=3, **GREEDY)
    with pytest.raises(ValueError, match=r"got return_state in generate\(\), whose outputs have none"):
        model.generate(ids, return_state=True, use_cache=False, max_new_tokens=3, **GREEDY)


def test_a_prompt_that_the_cache_has_read_is_refused() -> None:
    model, ids = small_model("mac"), prompt(11)
    expected = model.generate(ids, max_new_tokens=4, **GREEDY)
    cache = model(ids[:, :-1]).past_key_values
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY), expected)
    for length in (11, 13):
        cache = model(prompt(length)).past_key_values
        with pytest.raises(
            ValueError, match=rf"got a prompt of 11 tokens and a cache that has read {length}; expected"
        ):
            model.generate(ids, past_key_values=cache, max_new_tokens=4, **GREEDY)


def test_padding_on_the_right_is_not_read_in_pieces() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with pytest.raises(ValueError, match="got prefill_chunk_size and a prompt with padding on the right; expected"):
        model.generate(ids, attention_mask=mask, prefill_chunk_size=4, max_new_tokens=3, **GREEDY)
    ids[1, 7:] = model.generation_config.pad_token_id = 0  # transformers finds the mask itself
    model.generation_config.prefill_chunk_size = 4
    with pytest.raises(ValueError, match="got prefill_chunk_size and a prompt with padding on the right; expected"):
        model.generate(ids, generation_config=GenerationConfig(max_new_tokens=3, do_sample=False))


def test_hidden_states_of_every_step_can_be_asked_for() -> None:
    settings = GREEDY | {"max_new_tokens": 3, "return_dict_in_generate": True, "output_hidden_states": True}
    out = small_model("mac").generate(prompt(11), **settings)
    assert [step[0].shape[1] for step in out.hidden_states] == [11, 1, 1]


def test_text_streams_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = small_model("mac"), words()
    ids = prompt(11)
    written = model.generate(ids, streamer=TextStreamer(tokenizer, skip_prompt=True), max_new_tokens=8, **GREEDY)
    assert capsys.readouterr().out.split() == tokenizer.decode(written[0, 11:]).split()


def test_the_pipeline_writes_text() -> None:
    model, tokenizer = small_model("mac"), words()
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = [tokenizer.decode(prompt(length)[0]) for length in (11, 4)]
    settings = GREEDY | {"max_new_tokens": 8, "max_length": None, "return_full_text": False}
    answers = write(texts, batch_size=2, **settings)
    for text, [answer] in zip(texts, answers, strict=True):
        alone = model.generate(tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=8, **GREEDY)
        assert answer["generated_text"].split() == tokenizer.decode(alone[0]).split()[-8:]


def test_a_cache_of_another_kind_is_refused(unchecked: None) -> None:
    with pytest.raises(ValueError, match="got past_key_values of type DynamicCache; expected TitansCache"):
        small_model("mac").generate(prompt(11), past_key_values=DynamicCache(), max_new_tokens=3, **GREEDY)
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 20, 8), torch.ones(1, 2, 20, 8), 0)
    with pytest.raises(ValueError, match="got past_key_values of type DynamicCache; expected TitansCache"):
        small_model("mac").generate(prompt(11), past_key_values=filled, max_new_tokens=3, **GREEDY)


@pytest.mark.parametrize("by_config", [False, True])
def test_a_kind_of_cache_is_refused_for_what_it_is(by_config: bool) -> None:
    asked = {"cache_implementation": "static"}
    settings = {"generation_config": GenerationConfig(**asked)} if by_config else asked
    with pytest.raises(ValueError, match=r"got cache_implementation='static'; expected none: .* state of its memory"):
        small_model("mac").generate(prompt(11), **settings)


def test_continuous_batching_is_refused_for_what_it_is() -> None:
    with pytest.raises(ValueError, match=r"got generate_batch\(\), which pages keys and values; expected generate"):
        small_model("mac").generate_batch([[1, 2, 3]])


def test_a_cache_of_another_batch_is_refused() -> None:
    model = small_model("mac")
    cache = model(prompt(5)).past_key_values
    with pytest.raises(ValueError, match="got a state of 1 rows and 2 rows of input"):
        model.generate(prompt(11, 2), past_key_values=cache, max_new_tokens=3, **GREEDY)


def test_a_prompt_without_a_token_is_refused() -> None:
    model = small_model("lmm")
    with pytest.raises(ValueError, match="got a prompt without a token; expected one at least"):
        model.generate(torch.zeros(2, 0, dtype=torch.int64), max_new_tokens=3)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (prompt(5)[0], None, r"got a prompt int64 \(5,\); expected ids \(B, T\): prompt\[None\] of a single row"),
        ([[1, 2]], None, "got prompt of type list; expected a tensor, rows first"),
        (prompt(5, 2), [[1] * 5] * 2, "got attention_mask of type list; expected a tensor"),
        (prompt(5, 2), torch.ones(2, 4), r"got attention_mask float32 \(2, 4\) for a prompt \(2, 5\); expected"),
        (prompt(5, 2), torch.ones(2, 6), r"got attention_mask float32 \(2, 6\) for a prompt"),
        (prompt(5, 2), torch.ones(1, 5), r"got attention_mask float32 \(1, 5\) for a prompt"),
    ],
)
def test_a_prompt_of_another_form_is_refused(ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model("lmm").generate(ids, attention_mask=mask, max_new_tokens=3)


@pytest.mark.parametrize("masked", [True, False])
def test_a_row_that_ended_early_is_not_gone_on_with(masked: bool) -> None:
    """It has read the padding behind its end while the other row was written on; nobody says so but the ids."""
    model, ids = shallow_model("mac", torch.float64), prompt(11, 2)
    free = model.generate(ids, max_new_tokens=12, **GREEDY)
    end = next(int(token) for token in free[0, 12:] if token not in free[1])
    out = model.generate(ids, max_new_tokens=12, eos_token_id=end, return_dict_in_generate=True, **GREEDY)
    said = torch.cat([out.sequences, prompt(5, 2, seed=8)], dim=1)
    given = {"past_key_values": out.past_key_values, "attention_mask": (said != 0).long() if masked else None}
    with pytest.raises(
        ValueError, match=r"past_key_values whose row 0 has read 22 tokens, some of which the mask leaves out"
    ):
        model.generate(said, max_new_tokens=2, **given, **GREEDY)
    model.generate(said[1:], max_new_tokens=2, **GREEDY)
    state = model(ids, return_state=True).state  # a cache that begins there has no slots of what was read before
    padded, mask = prompt(5, 2, seed=9), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    given = {"max_new_tokens": 3, "return_dict_in_generate": True} | GREEDY
    turn = model.generate(padded, attention_mask=mask, past_key_values=TitansCache(state), **given)
    text = torch.cat([turn.sequences, prompt(3, 2, seed=4)], dim=1)
    mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], dim=1)
    model.generate(text, attention_mask=mask, past_key_values=turn.past_key_values, **given)
    together = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    model.generate(together.sequences, past_key_values=together.past_key_values, max_new_tokens=2, **GREEDY)


def test_a_row_of_padding_alone_is_refused() -> None:
    """Of a prompt, and of what comes after a cache: the last output before it is not kept."""
    model, ids = small_model("mac"), prompt(11, 2)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="got nothing but padding in row 1, beside what a cache may have read"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
    read = model(ids, use_cache=True).past_key_values
    text, whole = torch.cat([ids, ids[:, :4]], dim=1), torch.cat([torch.ones_like(ids), mask[:, :4]], dim=1)
    with pytest.raises(ValueError, match="got nothing but padding in row 1, beside what a cache may have read"):
        model.generate(text, attention_mask=whole, past_key_values=read, max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize("told", [True, False], ids=["mask", "padding"])
def test_guidance_begins_at_the_last_token_of_each_row(told: bool) -> None:
    model, settings = shallow_model("mac", torch.float64), GREEDY | {"guidance_scale": 3.0, "max_new_tokens": 5}
    rows = [prompt(11, seed=1), prompt(7, seed=2)]
    expected = [model.generate(ids, num_beams=2, **settings)[0, ids.shape[1] :] for ids in rows]
    assert not torch.equal(expected[1], model.generate(rows[1], num_beams=2, max_new_tokens=5, **GREEDY)[0, 7:]), (
        "guidance changes what is written"
    )
    model.generation_config.pad_token_id = 0
    ids = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (0, 4))])
    mask = {"attention_mask": (torch.arange(11) < torch.tensor([[11], [7]])).long()} if told else {}
    assert torch.equal(model.generate(ids, num_beams=2, **mask, **settings)[:, 11:], torch.stack(expected))


def test_guidance_needs_a_token_to_begin_with() -> None:
    model, settings = shallow_model("lmm"), GREEDY | {"guidance_scale": 3.0, "max_new_tokens": 2}
    ids = prompt(5)
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="inputs_embeds alone; expected negative_prompt_ids too"):
        model.generate(inputs_embeds=embeds, **settings)
    guided = model.generate(inputs_embeds=embeds, negative_prompt_ids=ids[:, -1:], **settings)
    assert torch.equal(guided, model.generate(ids, **settings)[:, 5:])
