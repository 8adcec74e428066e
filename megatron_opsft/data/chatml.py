"""ChatML, the chat template that a run or an evaluation gives to a base model that has none.

A message ends with `<|im_end|>` where that is a token of the model, else with the model's own end
token: one that the model can learn to write. Prompts begin as the tokenizer begins any text.
"""

import json
from pathlib import Path
from string import Template

from transformers import PreTrainedTokenizerBase

from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.config_from_hf import read_json
from megatron_opsft.records import TokenIds

_HEAD, _END = "<|im_start|>assistant", "<|im_end|>"
# Jinja; $begin and $end stand for texts of the tokenizer.
_SOURCE = Template(
    "{{ $begin }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + $end + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml_of(tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """Return ChatML for a tokenizer, as a Jinja template.

    key: the key that asks for it, for errors. Errors: `UserError` for a tokenizer without an end
    token, and for one that cannot spell the head of a message.
    """
    where = f"{key}=chatml: the tokenizer of {tokenizer.name_or_path}"
    if _end_token_id(tokenizer) is None and tokenizer.eos_token is None:
        raise UserError(
            f"{where} has no {_END} and no eos_token; set eos_token in tokenizer_config.json"
        )
    spelled = tokenizer.decode(tokenizer.encode(_HEAD, add_special_tokens=False))
    if spelled.strip() != _HEAD:
        raise UserError(
            f"{where} makes {spelled!r} of {_HEAD!r}; put a chat_template.jinja of your own beside "
            "it"
        )
    return _chatml(tokenizer)


def chatml_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token `<|im_end|>` if the tokenizer has it, and its chat template is ChatML as
    above: such a model may end a response with it.
    """
    if tokenizer.chat_template != _chatml(tokenizer):
        return None
    return _end_token_id(tokenizer)


def chatml_files(
    tokenizer: PreTrainedTokenizerBase, end_tokens: TokenIds, model_dir: Path
) -> dict[str, bytes]:
    """Return the files by which a trained model keeps ChatML and its end tokens wherever it is
    loaded: name -> content; {} if its tokenizer has another chat template.

    model_dir: the directory of the model that it was made from.
    """
    if tokenizer.chat_template != _chatml(tokenizer):
        return {}
    files = {"chat_template.jinja": str(tokenizer.chat_template).encode()}
    if chatml_end(tokenizer) is not None:
        file = model_dir / "generation_config.json"
        config = read_json(file) if file.is_file() else {}
        config["eos_token_id"] = list(end_tokens)
        files[file.name] = (json.dumps(config, indent=2) + "\n").encode()
    return files


def _end_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.content == _END:
            return int(token_id)
    return None


def _chatml(tokenizer: PreTrainedTokenizerBase) -> str:
    begin, end = "", tokenizer.eos_token if _end_token_id(tokenizer) is None else _END
    if tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        begin = tokenizer.bos_token
    # JSON's texts are literals of Jinja, too.
    begin, end = (json.dumps(text, ensure_ascii=False) for text in (begin, end))
    return _SOURCE.substitute(begin=begin, end=end)
