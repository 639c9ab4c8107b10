"""What can be compared, decided without a forward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantwatch.errors import IncompatibleError
from quantwatch.models.compatibility import PROBE, check_compatible
from quantwatch.models.loading import from_module


@pytest.fixture(autouse=True)
def no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compatibility comes before any forward: nothing may be computed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward pass ran")

    monkeypatch.setattr(nn.Linear, "forward", refuse)
    monkeypatch.setattr(nn.Embedding, "forward", refuse)


def _edit_tokenizer(folder: Path, **parts: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))


def test_copy_has_no_notes(make_folder: Any, load: Any) -> None:
    """Catches a false alarm on two equal models."""
    assert check_compatible(load(make_folder("a")), load(make_folder("b", seed=1))) == ()


def test_swapped_entries_are_named_with_both_ids(
    make_folder: Any, make_tokenizer: Any, load: Any
) -> None:
    """Catches trap "two entries swapped" being blamed on layer 0; the text is shown as it reads."""
    reference = load(make_folder("a"))
    candidate = load(make_folder("b", tokenizer=lambda: make_tokenizer(("Ġthe", "ing"))))
    with pytest.raises(IncompatibleError) as caught:
        check_compatible(reference, candidate)
    message = str(caught.value)
    assert "2 vocabulary entries differ" in message
    assert "' the' is id 258 in the reference and 261 in the candidate" in message
    assert "'ing' is id 261 in the reference and 258 in the candidate" in message


def test_many_differences_are_counted_and_three_named(
    make_folder: Any, make_tokenizer: Any, load: Any
) -> None:
    """Catches a message of 49,152 lines."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {k: 261 - v for k, v in state["model"]["vocab"].items()}
    folder = make_folder("b")
    _edit_tokenizer(folder, **state)
    with pytest.raises(IncompatibleError, match=r"262 vocabulary entries differ.* and 259 more"):
        check_compatible(load(make_folder("a")), load(folder))


def test_other_merges_are_refused(make_folder: Any, load: Any) -> None:
    """Catches equal vocabularies that split text differently."""
    folder = make_folder("b")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["merges"] = [*model["merges"][:4], *reversed(model["merges"][4:])]
    _edit_tokenizer(folder, model=model)
    with pytest.raises(IncompatibleError, match=r'merge 4 is \["i", "n"\] in the reference and'):
        check_compatible(load(make_folder("a")), load(folder))


def test_other_normalizer_is_refused_by_what_it_does(make_folder: Any, load: Any) -> None:
    """Catches a normalizer that changes ids while vocabulary and merges agree."""
    folder = make_folder("b")
    _edit_tokenizer(folder, normalizer={"type": "Lowercase"})
    with pytest.raises(IncompatibleError, match="becomes other ids from token 0 on: 'The' "):
        check_compatible(load(make_folder("a")), load(folder))


def test_other_decoder_is_a_note(make_folder: Any, load: Any) -> None:
    """Catches refusing a tokenizer that only prints differently."""
    folder = make_folder("b")
    _edit_tokenizer(folder, decoder={"type": "Fuse"})
    notes = check_compatible(load(make_folder("a")), load(folder))
    assert notes == ("tokenizers differ in decoder, but encode the probe text the same",)


def test_probe_is_not_trivial(make_tokenizer: Any) -> None:
    """Catches a probe that every normalizer leaves alone."""
    import unicodedata

    assert unicodedata.normalize("NFC", PROBE) != PROBE
    assert unicodedata.normalize("NFKC", PROBE) != unicodedata.normalize("NFC", PROBE)
    assert PROBE.lower() != PROBE
    assert len(make_tokenizer().encode(PROBE)) > 100


def test_more_entries_above_are_a_note(make_folder: Any, make_tokenizer: Any, load: Any) -> None:
    """Catches refusing a candidate with added tokens."""
    candidate = load(make_folder("b", tokenizer=lambda: make_tokenizer(extra=3)))
    notes = check_compatible(load(make_folder("a")), candidate)
    assert "its tokenizer has 3 more entries above the reference's 262 ids" in notes


def test_fewer_entries_are_refused(make_folder: Any, make_tokenizer: Any, load: Any) -> None:
    """Catches ids that the candidate's tokenizer doesn't know."""
    reference = load(make_folder("a", tokenizer=lambda: make_tokenizer(extra=2)))
    with pytest.raises(
        IncompatibleError, match="'<extra_0>' is id 262 in the reference and absent"
    ):
        check_compatible(reference, load(make_folder("b")))


ARCHITECTURES = {
    "layers": ({"num_hidden_layers": 3}, "number of layers is 2 in the reference and 3 in 'm'"),
    "hidden": (
        {"hidden_size": 64, "head_dim": 8},
        "hidden size is 32 in the reference and 64 in 'm'",
    ),
}


@pytest.mark.parametrize(("sizes", "wanted"), ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_other_shape_is_refused(
    sizes: dict[str, int], wanted: str, make_folder: Any, load: Any
) -> None:
    """Catches shapes that fail, or do not, in the middle of a run."""
    with pytest.raises(IncompatibleError, match=wanted):
        check_compatible(load(make_folder("a")), load(make_folder("b", **sizes)))


def test_other_model_type_is_refused(make_folder: Any, load: Any) -> None:
    """Catches two architectures that happen to have equal sizes."""
    folder = make_folder("b")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "mistral"}))
    wanted = "model_type is llama in the reference and mistral in 'm'"
    with pytest.raises(IncompatibleError, match=wanted):
        check_compatible(load(make_folder("a")), load(folder))


def test_narrower_vocabulary_is_refused_wider_is_noted(make_folder: Any, load: Any) -> None:
    """Catches an index out of range, and a padded vocabulary refused."""
    reference = load(make_folder("a"))
    narrow = load(make_folder("b", vocab_size=200, tokenizer=None))
    with pytest.raises(IncompatibleError, match="has 262 token ids, 'm' only 200 logits"):
        check_compatible(reference, narrow)
    wide = load(make_folder("c", vocab_size=364))
    notes = check_compatible(reference, wide)
    assert notes == (
        "its logits are 364 wide, the reference's 300: compared on the 262 shared ids",
    )


def test_shorter_context_and_missing_tokenizer_are_noted(make_folder: Any, load: Any) -> None:
    """Catches silence about what the user would want to know."""
    candidate = load(make_folder("b", max_position_embeddings=64, tokenizer=None))
    notes = check_compatible(load(make_folder("a")), candidate)
    assert "uses the reference's tokenizer: it has none of its own" in notes
    assert "its context of 64 positions is smaller than the reference's 128" in notes
    backwards = check_compatible(candidate, load(make_folder("c")))
    assert backwards == ("the reference has no tokenizer to compare this one's with",)


class _Own(nn.Module):
    """A model without configuration."""

    def __init__(self, layers: int = 2, hidden: int = 16, ids: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ids, hidden)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden)) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, ids, bias=False)


OWN = {
    "layers": ({"layers": 3}, "number of layers is 2"),
    "hidden": ({"hidden": 8}, "hidden size is 16"),
    "ids": ({"ids": 40}, "has 50 token ids, 'b' only 40 logits"),
}


@pytest.mark.parametrize(("sizes", "wanted"), OWN.values(), ids=OWN.keys())
def test_modules_without_configuration(sizes: dict[str, int], wanted: str) -> None:
    """Catches own modules that are compared by configuration only, or not at all."""
    torch.manual_seed(0)
    reference = from_module("a", _Own())
    assert reference.max_positions is None
    assert check_compatible(reference, from_module("b", _Own()))[-1].startswith("uses the ref")
    with pytest.raises(IncompatibleError, match=wanted):
        check_compatible(reference, from_module("b", _Own(**sizes)))
