"""Every tap fires exactly once, looking changes nothing, and no hook outlives the capture."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.probe import Probe
from quantwatch.capture.side_by_side import capture_suite
from quantwatch.domain import Scope
from quantwatch.errors import CaptureError


def _num_hooks(*models: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for model in models
        for module in model.modules()
    )


def _never(model: Any) -> None:
    """Make a layer call its MLP past its hooks, as a compiled or fused forward does."""
    mlp = model.model.layers[1].mlp
    past_hooks = {"__call__": lambda self, *args: self.forward(*args)}
    mlp.__class__ = type("Fused", (type(mlp),), past_hooks)


def _twice(model: Any) -> None:
    """Call a layer's MLP twice."""
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer.mlp(hidden_states)
        return original(hidden_states, *args, **kwargs)

    layer.forward = forward


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_never, r"tap layers\.1\.mlp \(model\.layers\.1\.mlp\) fired 0 times.*never called"),
        (_twice, r"tap layers\.1\.mlp \(model\.layers\.1\.mlp\) fired 2 times.*shared"),
    ],
    ids=["never", "twice"],
)
@pytest.mark.parametrize("side", ["reference", "c"])
def test_tap_that_does_not_fire_once(kit: Any, spoil: Any, words: str, side: str) -> None:
    """Would catch sensitivities of a module that never ran (ModelOpt#641) or ran twice."""
    models = {"reference": kit.build("llama"), "c": kit.build("llama")}
    spoil(models[side])
    before = _num_hooks(*models.values())
    with pytest.raises(CaptureError, match=f"^{side}: {words}"):
        kit.capture(models["reference"], {"c": models["c"]}, kit.suite([9, 4]))
    assert _num_hooks(*models.values()) == before


def test_shared_layer_is_refused(kit: Any) -> None:
    """Would catch one module standing for two layers: the last call would win."""
    model = kit.build("own")
    model.blocks[2] = model.blocks[1]
    with pytest.raises(CaptureError, match=r"tap layers\.1\.attention .* fired 2 times"):
        kit.capture(model, {"c": copy.deepcopy(model)}, kit.suite([9]))


def test_missing_layer_is_refused_before_any_forward(kit: Any) -> None:
    """Would catch layers compared with one another's neighbours."""
    model = kit.build("llama")
    with pytest.raises(CaptureError, match=r"c has 2 layers.*reference has 3"):
        kit.capture(model, {"c": kit.build("llama", num_hidden_layers=2)}, kit.suite([9]))


def test_other_width_is_refused(kit: Any) -> None:
    """Would catch a broadcast between hidden states of different widths."""
    model = kit.build("llama")
    with pytest.raises(CaptureError, match="c: embedding is 16 wide, the reference's is 32"):
        kit.capture(model, {"c": kit.build("llama", hidden_size=16)}, kit.suite([9]))


class _Paired(nn.Module):
    """Takes its hidden states packed in a tuple."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pair: tuple[torch.Tensor]) -> Any:
        return self.inner(pair[0])


def _pack(model: Any) -> Any:
    block = model.blocks[0]
    block.ffn = _Paired(block.ffn)
    block.forward = lambda h: h + block.attn(h) + block.ffn((h,))
    return model


def test_module_that_takes_something_else_is_refused(kit: Any) -> None:
    """Would catch a module that is silently fed its own input in isolation."""
    model = kit.build("own")
    with pytest.raises(CaptureError, match=r"c: layers\.0\.mlp takes hidden states of widths \[\]"):
        kit.capture(model, {"c": _pack(copy.deepcopy(model))}, kit.suite([9]))


def test_module_whose_input_is_hidden_is_not_measured_in_isolation(kit: Any) -> None:
    """Would catch an isolated error of a module that was not fed the reference's input."""
    models = [_pack(kit.build("own")) for _ in range(2)]
    with torch.no_grad():
        models[1].blocks[0].attn.weight.mul_(1.1)
    captured = kit.capture(models[0], {"c": models[1]}, kit.suite([9]))
    isolated = captured.sink.largest("c", "isolated_error")
    assert "layers.0.mlp" not in isolated
    assert isolated["layers.0"] > 0
    assert isolated["layers.1.mlp"] == 0
    assert "one row per token" in captured.report.missing["layers.0.mlp"]["reference"]


def test_in_place_residuals_do_not_rewrite_what_was_seen(kit: Any) -> None:
    """Would catch views instead of copies: `own` adds its residuals in place."""
    model = kit.build("own")
    candidate = kit.perturb(model)
    captured = kit.capture(model, {"c": candidate}, kit.suite([9]), CapturePlan())
    ids = torch.tensor([kit.suite([9]).prompts[0].token_ids])
    outputs = []
    for module in (model, candidate):
        module.blocks[0].register_forward_hook(lambda *a: outputs.append(a[2].clone()))
        with torch.no_grad():
            module(ids)
    h, g = (output[0].double() for output in outputs)
    wanted = ((h - g).norm(dim=-1) / h.norm(dim=-1)).numpy()
    assert captured.sink.row("c", 0, "rel_error", "layers.0")[0] == pytest.approx(wanted, rel=1e-6)


def _fail_in_sink(kit: Any) -> Any:
    class Full(kit.memory):  # type: ignore[misc]
        def observe(self, observation: Any) -> None:
            raise OSError("disk full")

    return Full()


@pytest.mark.parametrize("how", ["interrupt", "sink"])
def test_no_hook_outlives_the_capture(kit: Any, how: str) -> None:
    """Would catch hooks left behind by Ctrl-C or an error: the model would stay slow and wrong."""
    model = kit.build("llama")
    candidate, suite = kit.perturb(model), kit.suite([9, 20, 4])
    before = _num_hooks(model, candidate)
    sink = _fail_in_sink(kit) if how == "sink" else kit.memory()
    steps = kit.steps(interrupt_after=25) if how == "interrupt" else kit.steps()
    reference, loaded = kit.load(model), {"c": kit.load(candidate)}
    models = {"reference": reference, **loaded}
    with pytest.raises(OSError if how == "sink" else KeyboardInterrupt):
        capture_suite(models, suite, CapturePlan(), sink, kit.memory(), steps)
    assert _num_hooks(model, candidate) == before
    with torch.no_grad():
        logits = model(torch.tensor([suite.prompts[0].token_ids])).logits
    assert logits.shape == (1, 9, 64)


def test_hooking_that_fails_halfway_leaves_nothing(kit: Any) -> None:
    """Would catch the hooks of the modules before the one that can't be hooked."""
    loaded = kit.load(kit.build("llama"))
    loaded.anatomy.taps[Scope("layers.9")] = "no.such.module"
    before = _num_hooks(loaded.module)
    with pytest.raises(AttributeError, match="no"), Probe("model", loaded):
        pass
    assert _num_hooks(loaded.module) == before


def test_capture_leaves_no_hooks_and_no_gradients(kit: Any) -> None:
    """Would catch the same after success, and memory held by an autograd graph."""
    model = kit.build("gpt2")
    candidate = kit.perturb(model)
    before = _num_hooks(model, candidate)
    kit.capture(model, {"c": candidate}, kit.suite([9]))
    assert _num_hooks(model, candidate) == before
    assert torch.is_grad_enabled()


class _Sharpened(nn.Module):
    """A causal model that does something of its own to its logits."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.model, self.lm_head = inner.model, inner.lm_head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(input_ids)[0])
        return logits * 1.01


def test_unknown_transformation_of_logits_is_found(kit: Any) -> None:
    """Would catch a lost soft-capping (exllamav3 4bf0165): KL of something else is reported."""
    model = kit.build("llama")
    with pytest.raises(CaptureError, match=r"^c: its logits under observation differ .* by "):
        kit.capture(model, {"c": _Sharpened(copy.deepcopy(model))}, kit.suite([9]))


def test_module_between_norm_and_head_is_found(kit: Any) -> None:
    """Would catch a lens that reads layers without a projection that the model has."""

    class Scaled(type(kit.build("own"))):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor) -> Any:
            h = self.tokens(ids)
            for block in self.blocks:
                h = block(h)
            return self.unembed(2 * self.closing_norm(h))

    torch.manual_seed(0)
    model = Scaled().eval()
    with pytest.raises(CaptureError, match=r"read off layers\.2 through final norm and head"):
        kit.capture(model, {"c": copy.deepcopy(model)}, kit.suite([9]))
    off = CapturePlan(lens_positions=0)
    captured = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([9]), off)
    assert not captured.sink.matrices("c", "lens_kl")


def test_head_that_sees_only_the_last_position_is_refused(kit: Any) -> None:
    """Would catch logits of one position taken for all."""

    class Last(type(kit.build("own"))):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor) -> Any:
            h = self.tokens(ids)
            for block in self.blocks:
                h = block(h)
            return self.unembed(self.closing_norm(h)[:, -1:])

    with pytest.raises(CaptureError, match="the model returned"):
        kit.capture(Last().eval(), {"c": Last().eval()}, kit.suite([9]))


def test_report_is_plain_json(kit: Any) -> None:
    """Would catch a report that the store can't keep."""
    import json

    model = kit.build("opt")
    report = kit.capture(model, {"c": kit.perturb(model)}, kit.suite([9, 4])).report
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["firings"]["layers.0.attention"]["c"] == report.num_forwards["c"]
    assert "no child module" in document["missing"]["layers.0.mlp"]["reference"]
    assert np.isfinite(list(document["timings_s"].values())).all()
