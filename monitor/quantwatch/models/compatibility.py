"""Can two models be compared? Decided from tokenizers, configurations and shapes alone."""

import json
from collections.abc import Iterator
from typing import Any

from quantwatch.errors import IncompatibleError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.quiet import shorten
from quantwatch.models.shapes import hidden_size, logit_width, text_settings
from quantwatch.models.tokenizers import backend_parts, vocabulary

# Case, digits, runs of spaces, code, accents composed and decomposed, full width, other scripts,
# emoji with joiners: what normalizers and pre-tokenizers disagree about.
PROBE = (
    "The QUICK brown fox's 12,345.67 jumps;\n\n    def f(x): return x**2\t# don't\r\n"
    "naïve nai\u0308ve ＦＵＬＬ ﬁne 你好,世界 Привет नमस्ते 👩\u200d💻 \u00a0 a  b   c https://x.y/?q=1%20"
)


def check_compatible(reference: LoadedModel, candidate: LoadedModel) -> tuple[str, ...]:
    """Return notes on what differs but can be compared; run nothing.

    Raises:
        IncompatibleError: another architecture, tokenizer, or a narrower vocabulary; names what.
    """
    _check_architecture(reference, candidate)
    return (
        *_compare_tokenizers(reference.tokenizer, candidate.tokenizer),
        *_compare_widths(reference, candidate),
        *_compare_contexts(reference, candidate),
    )


def _check_architecture(reference: LoadedModel, candidate: LoadedModel) -> None:
    differences = [
        f"{what} is {ours} in the reference and {theirs} in {candidate.variant.name!r}"
        for (what, ours), theirs in zip(
            _architecture(reference).items(), _architecture(candidate).values(), strict=True
        )
        if ours != theirs and None not in (ours, theirs)
    ]
    if differences:
        raise IncompatibleError(f"another architecture: {'; '.join(differences)}")


def _architecture(model: LoadedModel) -> dict[str, Any]:
    settings = text_settings(model.module)
    return {
        "model_type": getattr(settings, "model_type", None) or None,
        "number of layers": model.anatomy.num_layers,
        "hidden size": hidden_size(model.module, model.anatomy),
    }


def _compare_tokenizers(reference: Any | None, candidate: Any | None) -> Iterator[str]:
    if candidate is None:
        yield "uses the reference's tokenizer: it has none of its own"
        return
    if reference is None:
        yield "the reference has no tokenizer to compare this one's with"
        return
    yield from _compare_vocabularies(reference, candidate)
    ours, theirs = backend_parts(reference), backend_parts(candidate)
    if ours == theirs:
        return
    _check_merges(ours, theirs)
    _check_probe(reference, candidate)
    parts = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    yield f"tokenizers differ in {shorten(parts, 6)}, but encode the probe text the same"


def _compare_vocabularies(reference: Any, candidate: Any) -> Iterator[str]:
    """Every id of the reference must mean the same; the candidate may have more above them."""
    ours, theirs = vocabulary(reference), vocabulary(candidate)
    top = max(ours.values(), default=-1)
    moved = [token for token in ours if theirs.get(token) != ours[token]]
    added = [token for token in theirs if token not in ours]
    taken = [token for token in added if theirs[token] <= top]
    differing = sorted({*moved, *taken}, key=lambda token: ours.get(token, theirs.get(token, 0)))
    if differing:
        texts = [_entry(reference, token, ours, theirs) for token in differing]
        raise IncompatibleError(
            f"another tokenizer: {len(texts)} vocabulary entries differ: {shorten(texts)}"
        )
    if added:
        yield f"its tokenizer has {len(added)} more entries above the reference's {top + 1} ids"


def _entry(reference: Any, token: str, ours: dict[str, int], theirs: dict[str, int]) -> str:
    text = reference.decode([ours[token]]) if token in ours else token
    here = f"id {ours[token]}" if token in ours else "absent"
    there = theirs.get(token, "absent") if token in ours else f"id {theirs[token]}"
    return f"{text!r} is {here} in the reference and {there} in the candidate"


def _check_merges(ours: Any, theirs: Any) -> None:
    left, right = (parts.get("model", {}).get("merges") for parts in (ours, theirs))
    if left == right or left is None or right is None:
        return
    pairs = enumerate(zip(left, right, strict=False))
    rank = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    found = [
        json.dumps(m[rank], ensure_ascii=False) if rank < len(m) else "none" for m in (left, right)
    ]
    raise IncompatibleError(
        f"another tokenizer: merge {rank} is {found[0]} in the reference "
        f"and {found[1]} in the candidate"
    )


def _check_probe(reference: Any, candidate: Any) -> None:
    ours, theirs = (t.encode(PROBE, add_special_tokens=False) for t in (reference, candidate))
    if ours == theirs:
        return
    shared = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(ours), len(theirs)))
    here, there = (
        t.decode(ids[at : at + 3]) for t, ids in ((reference, ours), (candidate, theirs))
    )
    raise IncompatibleError(
        f"another tokenizer: the same text becomes other ids from token {at} on: "
        f"{here!r} {ours[at : at + 3]} in the reference, "
        f"{there!r} {theirs[at : at + 3]} in the candidate"
    )


def _compare_widths(reference: LoadedModel, candidate: LoadedModel) -> Iterator[str]:
    ours, theirs = (logit_width(m.module, m.anatomy) for m in (reference, candidate))
    if ours is None or theirs is None:
        return
    needed = reference.num_tokens or ours
    if theirs < needed:
        raise IncompatibleError(
            f"a narrower vocabulary: the reference has {needed} token ids, "
            f"{candidate.variant.name!r} only {theirs} logits"
        )
    if theirs != ours:
        yield (
            f"its logits are {theirs} wide, the reference's {ours}: "
            f"compared on the {min(needed, ours)} shared ids"
        )


def _compare_contexts(reference: LoadedModel, candidate: LoadedModel) -> Iterator[str]:
    ours, theirs = reference.max_positions, candidate.max_positions
    if ours is not None and theirs is not None and theirs < ours:
        yield f"its context of {theirs} positions is smaller than the reference's {ours}"
