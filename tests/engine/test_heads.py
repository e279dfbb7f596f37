"""Heads that guess from the model's hidden states give the guesses that a plain forward pass
gives.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from flyweight import LLM
from flyweight.engine.speculation.option import Speculation
from flyweight.errors import CheckpointError, OptionError
from flyweight.kernels.accept import last_rows
from flyweight.models import presets
from flyweight.models.config import ModelConfig
from flyweight.models.heads import eagle3
from flyweight.models.presets import PRESETS, preset_config
from flyweight.models.standard import plan_of

HIDDEN, HEADS, KV_HEADS, SIZE, VOCABULARY, TOKENS = 64, 4, 2, 16, 128, 512
PROMPTS = [[5, 6, 7, 8] * 9, [300, 2, 9], list(range(40, 75))]


@pytest.fixture(scope="module", autouse=True)
def layered():
    PRESETS["six-layers"] = preset_config("tiny") | dict(
        num_hidden_layers=6,
        vocab_size=TOKENS,
        hidden_size=HIDDEN,
        intermediate_size=96,
        head_dim=SIZE,
    )
    yield
    del PRESETS["six-layers"]


def random_head(seed=0, layer="midlayer.", **changes):
    """Weights of which the guesses depend on every part."""
    config = (
        dict(
            architectures=["LlamaForCausalLMEagle3"],
            model_type="llama",
            hidden_act="silu",
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=SIZE,
            vocab_size=TOKENS,
            draft_vocab_size=VOCABULARY,
            rms_norm_eps=1e-5,
            rope_theta=1e4,
            max_position_embeddings=64,
        )
        | changes
    )
    torch.manual_seed(seed)
    tensors = {}
    for name, shape in eagle3.shapes(config, HIDDEN).items():
        tensors[name] = (
            torch.randn(shape) / shape[-1] ** 0.5
            if len(shape) == 2
            else 1 + 0.3 * torch.randn(shape)
        )
    kept = torch.randperm(TOKENS)[:VOCABULARY].sort().values
    tensors["d2t"] = kept - torch.arange(VOCABULARY)
    tensors["t2d"] = torch.isin(torch.arange(TOKENS), kept)
    return config, {name.replace("midlayer.", layer): value for name, value in tensors.items()}


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return str(folder)


def head_alone(llm):
    """Its drafter, with nothing looked up before it guesses."""
    llm.engine.speculator.drafter = llm.engine.speculator.drafter.other
    return llm.engine.speculator.drafter


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def turn(x):
    """Rope of [tokens, heads, size]."""
    angles = torch.arange(len(x))[:, None] / 1e4 ** (torch.arange(SIZE // 2) * 2 / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.split(SIZE // 2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def forward(w, embeddings, hidden, *, norm_first=False):
    """The head's layer over a whole sequence, as SafeAILab/EAGLE has it."""
    normed = rms(hidden, w["midlayer.hidden_norm.weight"])
    residual = normed if norm_first else hidden
    x = torch.cat([rms(embeddings, w["midlayer.input_layernorm.weight"]), normed], -1)
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(x), -1, SIZE) for name in "qkv"
    )
    q, k = turn(q), turn(k)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    scores += torch.full((len(x), len(x)), -torch.inf).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = residual + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    y = rms(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T


def guesses_after(w, decoder, tokens, count, *, norm_first=False):
    """What the head guesses for a text of which everything but the last token went through the
    model.
    """
    decoder.forward_whole(torch.tensor([tokens[:-1]]))
    embedding = decoder.embedding(torch.tensor(tokens))
    hidden, found = decoder.taps.states[0] @ w["fc.weight"].T, []
    for _ in range(count):
        inputs = (
            torch.cat([embedding[1:], decoder.embedding(torch.tensor(found))])
            if found
            else embedding[1:]
        )
        out = forward(w, inputs, hidden, norm_first=norm_first)
        best = int((rms(out[-1], w["norm.weight"]) @ w["lm_head.weight"].T).argmax())
        found.append(best + int(w["d2t"][best]))
        hidden = torch.cat([hidden, out[-1:]])
    return found


def watch(llm):
    """Every text that was guessed after, with its guesses."""
    drafter, seen = head_alone(llm), []
    propose = drafter.propose

    def watched(requests, most):
        found = propose(requests, most)
        seen.extend(
            (list(request.tokens), list(found[request.number]))
            for request in requests
            if request.number in found
        )
        return found

    drafter.propose = watched
    return seen


@pytest.mark.parametrize("layer, norm_first", [("midlayer.", False), ("layers.0.", True)])
def test_eagle3_guesses_are_those_of_a_plain_forward_pass(tmp_path, layer, norm_first):
    config, tensors = random_head(layer=layer, norm_before_residual=norm_first)
    folder = write(tmp_path / "head", config, tensors)
    plain = LLM("preset:six-layers:fp32", device="cpu", max_model_len=96, native=False)
    want = [
        output.completions[0].token_ids
        for output in plain.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    ]
    llm = LLM(
        "preset:six-layers:fp32",
        device="cpu",
        max_model_len=96,
        speculate=f"eagle3:{folder}:3",
        max_num_batched_tokens=20,  # prompts come in chunks
    )
    seen = watch(llm)
    got = llm.generate(PROMPTS, max_tokens=12, temperature=0, ignore_eos=True)
    assert [output.completions[0].token_ids for output in got] == want
    assert len(seen) > 20
    named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    for tokens, guesses in seen[:: len(seen) // 9]:
        assert (
            guesses
            == guesses_after(named, llm.decoder, tokens, 3, norm_first=norm_first)[: len(guesses)]
        )


def test_guesses_go_on_after_right_ones(tmp_path):
    """The rows that were kept have their places in the head's cache, those that were not are
    written over.
    """
    config, tensors = random_head(seed=1)
    llm = LLM(
        "preset:six-layers:fp32",
        device="cpu",
        max_model_len=96,
        speculate=f"eagle3:{write(tmp_path / 'head', config, tensors)}:3",
    )
    plain = LLM("preset:six-layers:fp32", device="cpu", max_model_len=96, native=False)
    (want,) = plain.generate([PROMPTS[0]], max_tokens=24, temperature=0, ignore_eos=True)
    text = PROMPTS[0] + want.completions[0].token_ids
    drafter = head_alone(llm)
    propose, seen = drafter.propose, []

    def mostly_right(requests, most):
        found = propose(requests, most)
        for request in requests:
            if request.number in found:
                seen.append((list(request.tokens), list(found[request.number])))
                begin = len(request.tokens)
                found[request.number] = [*text[begin : begin + 2], 1][: most[request.number]]
        return found

    drafter.propose = mostly_right
    (got,) = llm.generate([PROMPTS[0]], max_tokens=24, temperature=0, ignore_eos=True)
    assert got.completions[0].token_ids == want.completions[0].token_ids
    assert got.completions[0].accepted_tokens >= 14
    for tokens, guesses in seen:
        assert guesses == guesses_after(tensors, llm.decoder, tokens, 3)[: len(guesses)]


def test_a_head_of_another_model_is_refused(tmp_path):
    config, tensors = random_head()
    for change, words in [
        (dict(hidden_size=32, head_dim=8), "it was made for another model"),
        (dict(architectures=["LlamaForCausalLM"]), "not an EAGLE-3 head: architectures"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "layers \\[1, 2, 9\\]"),
    ]:
        folder = write(tmp_path / words[:6], config | change, tensors)
        with pytest.raises(CheckpointError, match=words):
            LLM(
                "preset:six-layers:fp32",
                device="cpu",
                max_model_len=96,
                speculate=f"eagle3:{folder}",
            )
    tensors["d2t"] += TOKENS
    with pytest.raises(CheckpointError, match="d2t names tokens"):
        LLM(
            "preset:six-layers:fp32",
            device="cpu",
            max_model_len=96,
            speculate=f"eagle3:{write(tmp_path / 'ids', config, tensors)}",
        )


def test_the_option_names_a_head():
    assert Speculation.parse("eagle3:./head:5") == Speculation("eagle3", "./head", 5)
    assert Speculation.parse("mtp:2") == Speculation("mtp", None, 2)
    assert Speculation.parse("eagle3:x").is_head and not Speculation.parse("ngram").is_head
    with pytest.raises(OptionError, match="eagle3 needs a folder"):
        Speculation.parse("eagle3")
    with pytest.raises(CheckpointError, match="no head of its own"):
        LLM("preset:six-layers:fp32", device="cpu", max_model_len=96, speculate="mtp")


def test_the_last_right_row_of_each_sequence():
    chosen = torch.tensor([4, 5, 6, 1, 9, 8, 7, 3])
    # all right; none made; one right, then wrong
    guesses = torch.tensor([4, 5, -1, -1, 9, 2, 7, -1])
    assert last_rows(chosen, guesses, torch.tensor([0, 3, 4])).tolist() == [2, 3, 5]


def test_nothing_is_written_where_nobody_asks():
    llm = LLM(
        "preset:six-layers:fp32", device="cpu", max_model_len=96, native=False, speculate="ngram"
    )
    assert llm.decoder.taps is None and llm.engine.runner.follower is None


@pytest.fixture
def with_mtp(monkeypatch):
    """Presets that have a head of their own, under the names of Qwen3-Next."""
    plain = presets.PresetWeights.__init__

    def make(self, *arguments, **options):
        plain(self, *arguments, **options)
        layer = plan_of(ModelConfig.from_dict(self.config)).layers[0]
        self.shapes |= {
            f"mtp.layers.0.{name}": shape for name, shape in presets.layer_shapes(layer).items()
        }
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in norms} | {
            "mtp.fc.weight": (HIDDEN, 2 * HIDDEN)
        }

    monkeypatch.setattr(presets.PresetWeights, "__init__", make)


def test_mtp_guesses_are_those_of_a_plain_forward_pass(with_mtp):
    llm = LLM(
        "preset:six-layers:fp32",
        device="cpu",
        max_model_len=96,
        speculate="mtp:3",
        max_num_batched_tokens=20,
    )
    plain = LLM("preset:six-layers:fp32", device="cpu", max_model_len=96, native=False)
    seen = watch(llm)
    want, got = (
        one.generate(PROMPTS, max_tokens=8, temperature=0, ignore_eos=True) for one in (plain, llm)
    )
    assert [one.completions[0].token_ids for one in got] == [
        one.completions[0].token_ids for one in want
    ]
    decoder, head, weights = llm.decoder, llm.engine.speculator.drafter.head, llm.weights

    def norm(x, name):
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            * weights.tensor(f"{name}.weight")
        )

    def guesses_of(tokens):
        decoder.forward_whole(torch.tensor([tokens[:-1]]))
        hidden, found = norm(decoder.taps.states[0], "model.norm"), []
        for _ in range(3):
            embedded = decoder.embedding(torch.tensor([*tokens[1:], *found]))
            x = torch.cat(
                [
                    norm(embedded, "mtp.pre_fc_norm_embedding"),
                    norm(hidden, "mtp.pre_fc_norm_hidden"),
                ],
                -1,
            )
            x = (x @ weights.tensor("mtp.fc.weight").T)[None]
            out = norm(head.block.run(x, decoder.whole(x.shape[1]))[0], "mtp.norm")
            found.append(int(decoder.head(out[-1:]).argmax()))
            hidden = torch.cat([hidden, out[-1:]])
        return found

    assert len(seen) > 12
    for tokens, guesses in seen[:: len(seen) // 6]:
        assert guesses == guesses_of(tokens)[: len(guesses)]
