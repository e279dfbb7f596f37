"""Adapters through the engine: chosen by name, side by side in steps, and never through each
other's cached prefixes.
"""

import pytest
import torch
from adapter_files import write_adapter
from padded_story import Story
from tiny_configs import LLAMA

from flyweight import LLM
from flyweight.batch import NOBODY
from flyweight.engine.kv_cache import salt_of
from flyweight.engine.packed import Padding, pack
from flyweight.engine.request import Request, SamplingParams, State
from flyweight.engine.rows import Rows
from flyweight.errors import OptionError, RequestError
from flyweight.models import presets
from flyweight.models.adapters import Adapters
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights
from flyweight.models.standard import plan_of

GREEDY = dict(temperature=0, max_tokens=9, ignore_eos=True)
PROMPT = [5, 9, 2, 44, 17, 3, 8, 21, 30, 12]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """The options of an LLM with random weights and two adapters."""
    monkeypatch.setitem(presets.PRESETS, "tiny", LLAMA)
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(2)
        for name, shape in {
            "self_attn.q_proj": (32, 32),
            "self_attn.k_proj": (16, 32),
            "self_attn.v_proj": (16, 32),
            "self_attn.o_proj": (32, 32),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
        }.items()
    }
    for seed, name in enumerate(("red", "blue"), 1):
        write_adapter(tmp_path / name, shapes, seed=seed, lora_alpha=64)
    return dict(
        model="preset:tiny:fp32",
        blocks=64,
        block_size=4,
        device="cpu",
        adapters={name: tmp_path / name for name in ("red", "blue")},
    )


def test_each_request_is_answered_by_its_own_adapter_in_one_batch(tiny):
    names = ["red", None, "blue", "red", None]
    alone = []
    for name in names:
        llm = LLM(
            **tiny | dict(adapters={name: tiny["adapters"][name]} if name else None), native=False
        )
        alone.append(llm.generate(PROMPT, adapter=name, **GREEDY)[0].token_ids)
    assert alone[0] == alone[3] and len({tuple(tokens) for tokens in alone}) == 3
    llm = LLM(**tiny)
    together = llm.generate([PROMPT] * 5, adapter=names, **GREEDY)
    assert [output.token_ids for output in together] == alone


def test_cached_prefixes_are_not_shared_between_adapters(tiny):
    llm = LLM(**tiny)

    def cached(name):
        return llm.generate(PROMPT, adapter=name, **GREEDY)[0].completions[0].cached_tokens

    assert [cached(name) for name in (None, "red", "blue")] == [0, 0, 0]
    assert [cached(name) for name in ("blue", None, "red")] == [8, 8, 8]
    assert len({salt_of(salt, name) for salt in (None, "a") for name in (None, "a", "red")}) == 6


def test_an_unknown_adapter_is_refused_with_the_nearest(tiny):
    llm = LLM(**tiny)
    with pytest.raises(RequestError, match=r"bleu.*blue"):
        llm.generate(PROMPT, adapter="bleu", **GREEDY)
    with pytest.raises(RequestError, match="2 prompts but 1 adapters"):
        llm.generate([PROMPT, PROMPT], adapter=["red"], **GREEDY)
    assert len(llm.generate(PROMPT, adapter="blue", **GREEDY)[0].token_ids) == 9


def test_the_native_executor_steps_aside_and_says_why(tiny):
    assert "LoRA adapters" in LLM(**tiny).executor
    with pytest.raises(OptionError, match="LoRA adapters"):
        LLM(**tiny, native=True)


def request_of(number, adapter):
    request = Request(
        number, [1], SamplingParams().with_defaults({}), seed=0, limit=99, adapter=adapter
    )
    request.state = State.RUNNING
    return request


def test_rows_keep_the_slot_of_their_request_wherever_it_moves():
    rows = Rows(4, pages=2, vocabulary=16, device=torch.device("cpu"), adapted=True)
    requests = [request_of(number, adapter) for number, adapter in enumerate((1, NOBODY, 0, 2))]
    rows.enter(requests)
    requests[0].state = requests[1].state = State.FINISHED
    rows.retain()
    slots = {rows.requests[row].number: int(rows.adapters[row]) for row in range(len(rows))}
    assert slots == {2: 0, 3: 2}
    rows.enter([request_of(7, NOBODY)])
    assert int(rows.adapters[2]) == NOBODY
    assert Rows(4, pages=2, vocabulary=16, device=torch.device("cpu")).adapters is None


def test_padded_passes_read_slots_from_their_fixed_place(tiny, tmp_path):
    """As captured passes run: padding has no adapter, and changes nothing for those that have
    one.
    """
    weights = PresetWeights(presets.PRESETS["tiny"], "fp32")
    from flyweight.models.config import ModelConfig

    adapters = Adapters.read(tiny["adapters"], plan_of(ModelConfig.from_dict(weights.config)))
    decoder = Decoder.load(weights, device="cpu", dtype=torch.float32, adapters=adapters)
    story = Story(decoder, tolerance=1e-5)
    story.rows.adapters = torch.full((8,), NOBODY, dtype=torch.int32)
    for request, slot in zip(story.requests, (0, 1, NOBODY, 1, 0, NOBODY, 1, 0), strict=True):
        request.adapter = slot
    inputs = torch.zeros(1 << 16, dtype=torch.uint8)
    story.step((0, 7), (1, 3), (2, 5), into=inputs)
    story.step((1, 2), (3, 9), into=inputs)
    story.step((4, 20), into=inputs)  # alone from its first token: the padding is its own rest
    work = story.requests[4]
    packed = pack(
        [story_work(work)], story.rows, block_size=4, padding=Padding(16, story.blocks, inputs)
    )
    assert packed.batch.adapters is not None
    assert packed.batch.adapters.tolist() == [0] * 3 + [NOBODY] * 13


def story_work(request):
    from flyweight.engine.work import Work

    return Work(request, request.computed, 3, samples=True)
