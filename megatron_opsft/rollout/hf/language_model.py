"""transformers' configuration of the model that is trained and sampled."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig


def language_config(model_dir: str | Path) -> PreTrainedConfig:
    """Read config.json. Where a language model is part of a larger one, such as one that also sees,
    return the language model's part.

    The larger model alone may say that the head is the embedding. Code beside the weights is never
    run. Errors: those of transformers.
    """
    whole = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    config = whole.get_text_config()
    config.tie_word_embeddings = whole.tie_word_embeddings
    return config
