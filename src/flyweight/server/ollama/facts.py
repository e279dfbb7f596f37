"""What /api/tags and /api/show say of a model, from its folder."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flyweight.server.service import Service


def read_config(folder: str) -> dict[str, Any]:
    try:
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a preset has none
        return {}


def weight_bytes(folder: str) -> int:
    """0: a preset has no files."""
    path = Path(folder)
    files = (
        [file for kind in ("*.safetensors", "*.gguf") for file in path.glob(kind)]
        if path.is_dir()
        else []
    )
    return sum(file.stat().st_size for file in files)


def details(service: Service) -> dict[str, Any]:
    config = read_config(service.settings.model)
    family = str(config.get("model_type") or "unknown")
    quantization = config.get("quantization_config") or {}
    level = (
        quantization.get("quant_method")
        or config.get("dtype")
        or config.get("torch_dtype")
        or "unknown"
    )
    kind = "gguf" if quantization.get("quant_method") == "gguf" else "safetensors"
    return {
        "parent_model": "",
        "format": kind,
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": str(level),
    }


def listed(service: Service, name: str) -> dict[str, Any]:
    path = Path(service.settings.model)
    modified = path.stat().st_mtime if path.exists() else 0
    return {
        "name": name,
        "model": name,
        "size": weight_bytes(service.settings.model),
        "modified_at": datetime.fromtimestamp(modified, UTC).isoformat().replace("+00:00", "Z"),
        "digest": hashlib.sha256(f"{name} {modified}".encode()).hexdigest(),
        "details": details(service),
    }


def shown(service: Service) -> dict[str, Any]:
    config = read_config(service.settings.model)
    family = str(config.get("model_type") or "unknown")
    template = service.prompts.template if service.prompts.tokenizer else ""
    capabilities = ["completion"]
    if "tools" in template:
        capabilities.append("tools")
    if "</think>" in template:
        capabilities.append("thinking")
    sizes = {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "vocab_size": "vocab_size",
    }
    info: dict[str, Any] = {"general.architecture": family}
    info |= {f"{family}.{theirs}": config[ours] for theirs, ours in sizes.items() if ours in config}
    info[f"{family}.context_length"] = service.engine.facts.get("max_model_len")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "license": "",
        "details": details(service),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": listed(service, "")["modified_at"],
    }
