"""Tiny random models of every family, and a paged run of a Decoder that needs no engine."""

import torch
import transformers

from flyweight.batch import Batch, SequenceState
from flyweight.engine.memory import CacheShape
from flyweight.errors import CheckpointError
from flyweight.models.decoder import Decoder
from flyweight.models.rope import long_rows
from flyweight.tensors import Plain

TINY = dict(
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    vocab_size=97,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

# name: (model_type, what differs from TINY)
MODELS = {
    "llama": ("llama", {}),
    "llama tied, biases": (
        "llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama odd heads": (
        "llama",
        dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, rms_norm_eps=1e-5),
    ),
    "llama one kv head": ("llama", dict(num_key_value_heads=1, head_dim=20)),
    "llama linear": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=5000.0)),
    ),
    "llama dynamic": (
        "llama",
        dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)),
    ),
    "llama llama3": ("llama", dict(rope_parameters=LLAMA3 | dict(rope_theta=500.0))),
    "llama yarn": ("llama", dict(rope_parameters=YARN | dict(rope_theta=1000.0))),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral window": ("mistral", dict(sliding_window=7, head_dim=16)),
    "qwen2": ("qwen2", dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))),
    "qwen2 tied, window": (
        "qwen2",
        dict(
            tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
    ),
    "qwen3": (
        "qwen3",
        dict(head_dim=16, num_attention_heads=5, num_key_value_heads=1, hidden_size=40),
    ),
    "qwen3 tied, biases": (
        "qwen3",
        dict(head_dim=16, tie_word_embeddings=True, attention_bias=True),
    ),
    "qwen3 yarn": (
        "qwen3",
        dict(head_dim=16, rope_parameters=YARN | dict(rope_theta=1e4, attention_factor=1.2)),
    ),
}


def transformers_model(name, **changes):
    """Every parameter random, norms and biases too: at their initial 1 and 0 a forgotten one would
    not be noticed."""
    model_type, extra = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **TINY | extra | changes)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(float(parameter_name.endswith("norm.weight")), 0.15)
    return model


class DictWeights:
    """The reader's interface over a state dict; `linears` overrides single projections with
    QuantTensors."""

    def __init__(self, tensors, config, linears=None):
        self.tensors, self.config, self.linears = dict(tensors), config, linears or {}
        self.used = set()

    @classmethod
    def of(cls, model, linears=None):
        tensors = model.state_dict()
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        return cls(tensors, model.config.to_dict(), linears)

    def has(self, name):
        return name in self.tensors

    def tensor(self, name):
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing")
        self.used.add(name)
        return self.tensors[name]

    def linear(self, prefix):
        weight = self.tensor(f"{prefix}.weight")
        return self.linears.get(prefix) or Plain(weight)

    def check_used(self):
        if left := sorted(set(self.tensors) - self.used):
            raise CheckpointError(f"tensors have no place in the model: {', '.join(left)}")


def load(model, linears=None, **options):
    return Decoder.load(
        DictWeights.of(model, linears), device="cpu", dtype=torch.float32, **options
    )


def tokens_of(count, seed=0):
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_paged(decoder, sequences, chunk, *, block_size=4, shuffled=True):
    """Logits of every token of every sequence, `chunk` tokens a step (a list: of the first, second
    … step of each).

    Pages are handed out in shuffled order, or one after the other, and never cleared: what was not
    written is NaN.
    """
    config = decoder.config
    needed = [-(-len(tokens) // block_size) for tokens in sequences]
    order = torch.arange(sum(needed) + 2, dtype=torch.int32)
    if shuffled:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(5))]
    tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
    for i, count in enumerate(needed):
        tables[i, :count] = order[sum(needed[:i]) : sum(needed[: i + 1])]
    shape = CacheShape.of(config, torch.float32)
    caches = [
        shape.storage(layer, len(order), block_size, torch.device("cpu"), slots=len(sequences))
        for layer in range(config.layers)
    ]
    for cache in caches:
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
        if cache.state is not None:
            cache.state.conv.fill_(torch.nan)
            cache.state.recurrent.fill_(torch.nan)
    done, outputs, step = [0] * len(sequences), [[] for _ in sequences], 0
    while live := [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]:
        width = chunk if isinstance(chunk, int) else chunk[min(step, len(chunk) - 1)]
        ends = {i: min(done[i] + width, len(sequences[i])) for i in live}
        spans = [(i, at) for i in live for at in range(done[i], ends[i])]
        starts = [0]
        for i in live:
            starts.append(starts[-1] + ends[i] - done[i])
        batch = Batch(
            tokens=torch.tensor([sequences[i][at] for i, at in spans]),
            positions=torch.tensor([at + long_rows(config, len(sequences[i])) for i, at in spans]),
            slots=torch.tensor(
                [int(tables[i, at // block_size]) * block_size + at % block_size for i, at in spans]
            ),
            block_tables=tables[live],
            query_starts=starts,
            kv_lengths=[ends[i] for i in live],
            output_rows=torch.arange(len(spans)),
            states=torch.tensor(
                [
                    SequenceState(starts[row], ends[i] - done[i], done[i], i if done[i] else -1, i)
                    for row, i in enumerate(live)
                ],
                dtype=torch.int32,
            ),
        )
        logits = decoder.forward(batch, caches)
        for row, i in enumerate(live):
            outputs[i].append(logits[starts[row] : starts[row + 1]])
            done[i] = ends[i]
        step += 1
    return [torch.cat(parts) for parts in outputs]


def assert_same_logits(found, expected, tolerance=1e-5):
    """Relative error within the tolerance, and the same best token wherever the runner-up is 1e-3
    behind."""
    assert found.shape == expected.shape and found.dtype == torch.float32
    error = (found - expected).norm() / expected.norm()
    assert error <= tolerance, f"relative error {error:.2e}"
    best = expected.topk(2).values
    clear = best[..., 0] - best[..., 1] > 1e-3
    assert clear.any() and torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])
