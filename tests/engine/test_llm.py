"""LLM on the default real model, against transformers and against itself; and on a tiny random one
without any file.
"""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from tiny_configs import LLAMA

from flyweight import LLM, SamplingParams
from flyweight.engine.llm import TURN_TOKENS
from flyweight.engine.loading import choose_dtype, end_ids, sampling_defaults
from flyweight.engine.prompts import as_prompts
from flyweight.engine.tokenizer import Detokenizer, Tokenizer
from flyweight.errors import OptionError, RequestError, ResourceError
from flyweight.models import presets

GAP = 1e-3  # between the two best logits: closer ones may come out in either order
HALF_GAP = 0.05  # of logits, where numbers have 16 bits on their way
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of robotics say that a robot may not",
]


@pytest.fixture(scope="module")
def llm(smollm2):
    return LLM(smollm2, max_model_len=512)


@pytest.fixture(scope="module")
def reference(smollm2):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture
def tiny(monkeypatch):
    """The options of an LLM with random weights and a vocabulary of 60."""
    monkeypatch.setitem(presets.PRESETS, "tiny", LLAMA)
    return {"model": "preset:tiny:fp32", "blocks": 64, "block_size": 4}


def greedy(**options):
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | options))


def check_greedy(reference, prompt, answer, gap=GAP):
    """Each token is transformers' best after the same tokens, so the whole text is, unless the two
    best are within `gap`.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(-1).values
    chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
    assert (best - chosen).max() <= gap


@pytest.fixture(scope="module")
def exact(smollm2):
    return LLM(smollm2, max_model_len=128, exact=True)


def test_exact_greedy_tokens_are_those_of_transformers(exact, reference):
    for output in exact.generate(PROMPTS[:3], greedy(max_tokens=64)):
        assert len(output.token_ids) == 64
        check_greedy(reference, output.prompt_token_ids, output.token_ids)


def test_greedy_tokens_are_those_of_transformers_where_16_bits_can_tell(llm, reference):
    """A CPU's native kernels keep keys and values, and x beside 16-bit weights, in float16."""
    for output in llm.generate(PROMPTS[:3], greedy(max_tokens=64)):
        check_greedy(reference, output.prompt_token_ids, output.token_ids, gap=HALF_GAP)


SETTINGS = {
    "chunked": dict(max_num_batched_tokens=5, max_num_seqs=4),
    "preempted": dict(blocks=11, block_size=4, max_model_len=44),
    "without a prefix cache": dict(prefix_cache=False),
}


SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=10)


@pytest.fixture(scope="module")
def alone(llm):
    return [llm.generate(prompt, SEEDED)[0].text for prompt in PROMPTS]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_request_among_others_gets_the_tokens_it_gets_alone(alone, smollm2, reference, setting):
    other = LLM(smollm2, **({"max_model_len": 128} | SETTINGS[setting]))
    together = other.generate(PROMPTS * 2, [greedy()] * len(PROMPTS) + [SEEDED] * len(PROMPTS))
    for output in together[: len(PROMPTS)]:
        check_greedy(reference, output.prompt_token_ids, output.token_ids)
    assert [output.text for output in together[len(PROMPTS) :]] == alone
    other.engine.scheduler.check_integrity()
    assert other.engine.pool.available == other.engine.pool.blocks


def test_a_cached_prefix_changes_no_token(llm):
    prompt = PROMPTS[4] * 4
    first, second = (llm.generate(prompt, greedy())[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.completions[0].cached_tokens >= len(second.prompt_token_ids) - 17


def test_samples_share_the_prompt_and_the_first_is_the_lone_one(llm):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8)
    lone = llm.generate(PROMPTS[1] * 3, params)[0]
    several = llm.generate(
        PROMPTS[1] * 3, SamplingParams(temperature=1.0, seed=5, max_tokens=8, n=3)
    )[0]
    assert several.completions[0].text == lone.text
    assert len({completion.text for completion in several.completions}) == 3
    assert several.completions[2].cached_tokens >= 16


def test_prompt_logprobs_are_those_of_transformers(llm, exact, reference):
    for one, tolerance in ((exact, 1e-4), (llm, HALF_GAP)):
        output = one.generate(PROMPTS[1], greedy(max_tokens=1, prompt_logprobs=1))[0]
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = (
                reference(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            )
        found = torch.tensor([item.logprob for item in output.prompt_logprobs[1:]])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_stop_string_ends_the_text_wherever_the_tokens_lie(llm):
    free = llm.generate(PROMPTS[0], greedy())[0].text
    stop = free[4:9]
    stopped = llm.generate(PROMPTS[0], greedy(stop=[stop]))[0]
    assert stopped.text == free[: free.index(stop)]
    assert stopped.completions[0].stop_reason == stop


def test_the_chat_template_is_used_and_its_options_reach_it(llm):
    messages = [{"role": "user", "content": "Say hello."}]
    output = llm.chat(messages, greedy(ignore_eos=False, max_tokens=30))
    assert "<|im_start|>user\nSay hello.<|im_end|>" in output.prompt
    assert output.prompt.endswith("<|im_start|>assistant\n") and output.text.strip()
    rendered = llm.tokenizer.render_chat(
        messages, chat_template="thinking: {{ enable_thinking }}", enable_thinking=False
    )
    assert rendered == "thinking: False"
    with pytest.raises(RequestError, match="chat template refuses"):
        llm.tokenizer.render_chat(messages, chat_template="{{ raise_exception('no') }}")


def test_emoji_stream_in_whole_characters(llm):
    text = "Hi 👩‍👩‍👧‍👦! 🇫🇷 naïve 漢字 🎉 end"
    detokenizer, pieces = Detokenizer(llm.tokenizer.decode), []
    tokens = llm.tokenizer.inner.encode(text, add_special_tokens=False)
    for token in tokens:
        before = len(detokenizer.text)
        detokenizer.add(token)
        pieces.append(detokenizer.text[before:])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) and "" in pieces, (
        "some token must have held half a character"
    )


def test_streams_share_the_engine_and_give_what_generate_gives(llm):
    async def collect(prompt):
        return "".join([chunk.text async for chunk in llm.stream(prompt, greedy())])

    async def all_at_once():
        return await asyncio.gather(*(collect(prompt) for prompt in PROMPTS[:3]))

    assert asyncio.run(all_at_once()) == [
        output.text for output in llm.generate(PROMPTS[:3], greedy())
    ]


def test_leaving_a_stream_frees_its_blocks(tiny):
    model = LLM(**tiny)

    async def leave():
        stream = model.stream([1, 2, 3], greedy(max_tokens=100))
        async for _ in stream:
            break
        await stream.aclose()
        while model.engine.busy:
            await asyncio.sleep(0)

    asyncio.run(leave())
    assert model.engine.pool.available == 64
    for _ in model.stream([1, 2, 3], greedy(max_tokens=100)):
        break
    assert model.engine.pool.available == 64


def test_a_failing_step_reaches_the_reader_of_the_stream(tiny):
    model = LLM(**tiny)

    def fail(*_):
        raise ResourceError("out of memory")

    model.decoder.forward = fail

    async def read():
        async for _ in model.stream([1, 2, 3], greedy()):
            pass

    with pytest.raises(RequestError, match="out of memory"):
        asyncio.run(read())
    with pytest.raises(ResourceError):
        model.generate([1, 2, 3], greedy())


def test_a_step_that_fails_in_one_thread_is_heard_of_in_all(tiny, monkeypatch):
    """The thread that makes the step gets its own exception; the others must not get half an
    answer.
    """
    model = LLM(**tiny)
    submitted, failed = threading.Barrier(2), threading.Event()
    step = model.engine.step

    def fail():
        submitted.wait(60)
        monkeypatch.setattr(model.decoder, "forward", lambda *_: 1 / 0)
        try:
            step()
        finally:
            failed.set()

    def wait():
        submitted.wait(60)
        failed.wait(60)

    steps = {"one": fail, "other": wait}
    monkeypatch.setattr(model.engine, "step", lambda: steps[threading.current_thread().name]())
    errors = {}

    def generate():
        name = threading.current_thread().name
        try:
            model.generate([[1, 2, 3]], greedy())
        except Exception as error:
            errors[name] = error

    threads = [threading.Thread(target=generate, name=name) for name in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert isinstance(errors["one"], ZeroDivisionError)
    assert isinstance(
        errors["other"], RequestError
    ) and "the step that served this request failed" in str(errors["other"])


def test_a_failing_step_does_not_end_an_iteration_early(tiny):
    model = LLM(**tiny)
    chunks = model.iterate([1, 2, 3], greedy())
    next(chunks)
    (request,) = model.engine.scheduler.running
    # as another thread's step would
    model.engine._abandon(RuntimeError("the device fell off the bus"))
    with pytest.raises(RequestError, match="fell off the bus"):
        list(chunks)
    assert request.finish_reason == "failed"


def test_random_presets_take_token_ids_and_say_so_about_text(tiny):
    model = LLM(**tiny)
    one, two = model.generate([[1, 2, 3], [4, 5]], greedy())
    assert (len(one.token_ids), len(two.token_ids), one.text) == (12, 12, "")
    with pytest.raises(RequestError, match="has no tokenizer; give the prompt as token ids"):
        model.generate("text")
    longest = (
        "has 200 tokens, but the context holds 128.*"
        "shorten the prompt: the model is made for no more"
    )
    with pytest.raises(RequestError, match=longest):
        model.generate([1] * 200)
    with pytest.raises(RequestError, match="shorten the prompt or raise max_model_len"):
        LLM(**tiny, max_model_len=64).generate([1] * 64)


def test_options_that_do_not_fit_are_refused(tiny):
    with pytest.raises(OptionError, match="max_model_len 500 is more than the 128"):
        LLM(**tiny, max_model_len=500)
    with pytest.raises(OptionError, match="did you mean 'float16'"):
        LLM(**tiny, dtype="float17")
    with pytest.raises(ResourceError, match="lower max_model_len"):
        LLM(tiny["model"], memory_fraction=1e-9)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        LLM(**tiny).generate([[1], [2]], [greedy()])


def test_every_kind_of_prompt_is_told_from_a_list_of_them():
    chat = [{"role": "user", "content": "hi"}]
    assert as_prompts("a") == ["a"] and as_prompts(["a", "b"]) == ["a", "b"]
    assert as_prompts([1, 2]) == [[1, 2]] and as_prompts([[1], [2]]) == [[1], [2]]
    assert as_prompts(chat) == [chat] and as_prompts([chat, chat]) == [chat, chat]
    assert as_prompts([]) == []


def test_generation_config_gives_defaults_and_ends():
    assert sampling_defaults({"temperature": 0.6, "top_k": 20, "top_p": None}) == {
        "temperature": 0.6,
        "top_k": 20,
    }
    assert sampling_defaults({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert end_ids((1,), {"eos_token_id": [2, 3]}, None) == {1, 2, 3}
    assert end_ids((), {"eos_token_id": 4}, None) == {4}


def test_the_type_of_numbers_follows_device_and_config():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype(None, {"dtype": "bfloat16"}, cpu) is torch.float32
    assert choose_dtype(None, {"torch_dtype": "float16"}, cuda) is torch.float16


def test_a_model_without_a_chat_template_says_so():
    class Plain:
        chat_template = None

    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(Plain()).render_chat([{"role": "user", "content": "hi"}])


def test_prompts_beside_answers_get_as_many_tokens_as_asked():
    llm = LLM("preset:tiny", device="cpu", blocks=16, max_model_len=64, prompt_tokens_beside=7)
    assert llm.engine.scheduler.prompt_tokens_beside == 7
    with pytest.raises(OptionError, match="turns is for a GPU"):
        LLM("preset:tiny", device="cpu", turns=True)


@pytest.mark.parametrize(
    "given", [{}, {"turns": False}, {"prompt_tokens_beside": 96}, {"speculate": "ngram"}]
)
def test_a_server_takes_turns_where_passes_are_captured_and_nobody_guesses(given):
    llm = LLM("preset:tiny", device="cpu", blocks=16, max_model_len=64, **given)
    scheduler = llm.engine.scheduler
    llm.pace_prompts()
    assert scheduler.turn_tokens is None, "no passes are captured on a CPU"
    llm.engine.runner.passes = SimpleNamespace(patient=False, alone=True)
    llm.pace_prompts()
    assert scheduler.turn_tokens is None, "parts of prompts are not captured"
    llm.engine.runner.passes = SimpleNamespace(patient=False, alone=False)
    llm.pace_prompts()
    assert (scheduler.turn_tokens is None) == bool(
        {"turns", "speculate"} & set(given)
    ) and llm.engine.runner.passes.patient
    assert scheduler.turn_tokens in (None, given.get("prompt_tokens_beside", TURN_TOKENS))
