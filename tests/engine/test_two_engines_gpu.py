"""Engines beside each other, and models whose sizes are no multiples of what kernels read at
once.
"""

import threading

import pytest
import torch

from flyweight.engine.llm import LLM
from flyweight.engine.request import SamplingParams
from flyweight.models import presets
from flyweight.models.decode_step import unsupported_reason
from flyweight.models.decoder import Decoder
from flyweight.models.presets import PresetWeights

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[7 * i + j % 11 + 3 for j in range(5 + 9 * i)] for i in range(12)]


def answers(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_two_engines_on_two_streams_give_what_each_gives_alone():
    """Their kernels hand partial sums and packed inputs over in memory: a shared buffer would mix
    the two.
    """
    engines = [
        LLM(f"preset:tiny:{scheme}", max_num_seqs=16, max_model_len=256)
        for scheme in ("int4", "w8a8")
    ]
    alone = [answers(llm) for llm in engines]
    found: list[list[list[list[int]]]] = [[], []]

    def run(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(6):
                found[which].append(answers(engines[which]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(2):
        assert all(one == alone[which] for one in found[which]) and len(found[which]) == 6
    assert engines[0].decoder.workspace is not engines[1].decoder.workspace


@pytest.mark.parametrize("vocabulary", [1001, 1004, 4099])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_of_any_size_keeps_its_graphs(vocabulary, tied, monkeypatch):
    config = presets.PRESETS["tiny"] | dict(vocab_size=vocabulary, tie_word_embeddings=tied)
    monkeypatch.setitem(presets.PRESETS, "odd", config)
    llm = LLM("preset:odd:int4", max_num_seqs=4, max_model_len=128)
    assert unsupported_reason(llm.decoder, 16) is None and llm.engine.runner.steps is not None
    exact = Decoder.load(
        PresetWeights("odd", "int4", device="cuda"), device="cuda", dtype=torch.bfloat16, exact=True
    )
    prompt = [11, 12, 13, 14]
    answer = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[
        0
    ].token_ids
    assert max(answer) < vocabulary
    logits = exact.forward_whole(torch.tensor([prompt + answer], device="cuda"))[
        0, len(prompt) - 1 : -1
    ]
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.05 * logits.std()
    assert (
        clear.any()
        and logits.argmax(-1)[clear].tolist() == torch.tensor(answer, device="cuda")[clear].tolist()
    )
