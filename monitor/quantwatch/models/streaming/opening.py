"""Which checkpoints can be streamed, and how transformers is asked for one."""

from pathlib import Path
from typing import Any

from quantwatch.errors import ModelError
from quantwatch.models.checkpoint import weight_files
from quantwatch.models.quantized import OURS
from quantwatch.models.streaming.skeleton import Skeleton, streamed_class

_METHODS = (OURS, "compressed-tensors")
_REMEDY = 'use memory = "resident"'


def refuse_unstreamable(location: str, folder: Path, settings: Any, method: str | None) -> None:
    """Raise ModelError with the reason for a checkpoint that can't be read layer by layer."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{location} is an adapter, which is merged into a whole model: it can't be streamed; "
            "save the merged model first"
        )
    if type(settings).__module__.startswith("transformers_modules"):
        raise ModelError(
            f"{location} brings its own model code, whose loading isn't known: it can't be "
            f"streamed; {_REMEDY}"
        )
    other = [path.name for path in weight_files(folder) if path.suffix != ".safetensors"]
    if other:
        raise ModelError(
            f"{location} can't be streamed: {other[0]} is no safetensors file; load it once and "
            "write it with save_pretrained"
        )
    if method is not None and method not in _METHODS:
        raise ModelError(
            f"{location} is quantized with {method}, which can't be streamed; allowed: "
            f"{', '.join(_METHODS)}; {_REMEDY}"
        )
    if method == OURS and "layers" not in settings.quantization_config:
        raise ModelError(
            f"{location} asks to be quantized while it is loaded, which needs the whole model: it "
            "can't be streamed; name the recipe in the check"
        )


def streamed_model(
    settings: Any, skeletons: list[Skeleton], location: str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a causal language model without its layers; its skeleton is added to `skeletons`.

    Takes and returns what `AutoModelForCausalLM.from_pretrained` does with `output_loading_info`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.auto_factory import _get_model_class

    mapping = AutoModelForCausalLM._model_mapping
    if type(settings) not in mapping:
        raise ModelError(f"{location}: {settings.model_type} is no causal language model")
    kind = _get_model_class(settings, mapping)
    if kind.config_class is settings.sub_configs.get("text_config"):
        settings = settings.get_text_config()
    options.pop("trust_remote_code", None)
    made: Any = streamed_class(kind, skeletons)
    model, info = made.from_pretrained(location, config=settings, **options)
    model.__class__ = kind
    return model, info
