"""Random EAGLE heads for small models, as training such a head would have left them on disk."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_head(
    directory: Path,
    model_dir: Path,
    *,
    kept: Sequence[int] = (),
    own_embedding: bool = False,
    older: bool = False,
    seed: int = 0,
) -> Path:
    """A head for the model in `model_dir`; gives its directory.

    kept: the tokens that it can draft, with an output layer of its own; by default it has the
    model's. own_embedding: it has its own, as a copy that training has moved. older: EAGLE in place
    of EAGLE-3.
    """
    model = json.loads((model_dir / "config.json").read_text())
    hidden, ffn, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    head_dim = hidden // model["num_attention_heads"]
    queries, keys = (model[f"num_{n}_heads"] * head_dim for n in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    layer = {
        "hidden_norm": 1 + random(hidden),
        "input_layernorm": 1 + random(hidden),
        "post_attention_layernorm": 1 + random(hidden),
        "self_attn.q_proj": random(queries, 2 * hidden),
        "self_attn.k_proj": random(keys, 2 * hidden),
        "self_attn.v_proj": random(keys, 2 * hidden),
        "self_attn.o_proj": random(hidden, queries),
        "mlp.gate_proj": random(ffn, hidden),
        "mlp.up_proj": random(ffn, hidden),
        "mlp.down_proj": random(hidden, ffn),
    }
    if older:
        layer["self_attn.q_proj"], layer["self_attn.k_proj"], layer["self_attn.v_proj"] = (
            random(rows, hidden) for rows in (queries, keys, keys)
        )
        del layer["hidden_norm"], layer["input_layernorm"]
        weights = {f"layers.0.{name}.weight": tensor for name, tensor in layer.items()}
        weights |= {"fc.weight": random(hidden, 2 * hidden)}
    else:
        weights = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
        weights |= {"fc.weight": random(hidden, 3 * hidden), "norm.weight": 1 + random(hidden)}
    if kept:
        ids = torch.tensor(sorted(kept))
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        weights["lm_head.weight"] = random(len(ids), hidden)
    if own_embedding:
        weights["embed_tokens.weight"] = random(vocab, hidden)
    config = {
        "architectures": ["EagleLlamaForCausalLM" if older else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": len(kept) or vocab,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory
