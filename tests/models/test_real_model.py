import pytest
import torch
import transformers
from model_helpers import assert_same_logits, run_paged

from flyweight.checkpoint.reader import Checkpoint
from flyweight.models.decoder import Decoder

TEXT = (
    "The history of the lighthouse begins with fires built on hilltops. "
    "Raising the fire would improve its visibility, "
    "and so platforms became a practice that led to the development of the lighthouse. "
    "In antiquity it"
)


@pytest.fixture(scope="module")
def real(smollm2):
    """(transformers' logits, our decoder, the tokens) of a piece of English."""
    checkpoint = Checkpoint(smollm2)
    tokens = checkpoint.tokenizer()(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    del model
    return expected, Decoder.load(checkpoint, device="cpu", dtype=torch.float32), tokens


def test_the_default_model_gives_the_logits_of_transformers(real):
    expected, decoder, tokens = real
    assert_same_logits(decoder.forward_whole(torch.tensor([tokens]))[0], expected)


@pytest.mark.parametrize("chunk", [[32, 1], 9], ids=["prefill and decode", "chunked prefill"])
def test_the_default_model_gives_them_over_pages_too(real, chunk):
    expected, decoder, tokens = real
    assert_same_logits(
        run_paged(decoder, [tokens[:40], tokens[:33]], chunk, block_size=16)[0], expected[:40]
    )
