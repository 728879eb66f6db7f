"""Define chat templates of ten families, shortened, with their control tokens."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from motet_shared.tool_formats.registry import detect_format
from motet_tokenizer.encoding.template import ChatTemplate
from support.checkpoints.tiny_tokenizers import CONTEXT, byte_level


@dataclass(frozen=True)
class Family:
    """Hold a template.

    special: tokens marked special. plain: added tokens that the template writes, but that are not
    special.
    """

    name: str
    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        copy = Tokenizer.from_str(byte_level().to_str())
        copy.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self.special]
        )
        copy.add_tokens(
            [AddedToken(token, special=False, normalized=False) for token in self.plain]
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=copy, bos_token=self.special[0], eos_token=self.special[-1]
        )
        fast.chat_template = self.template
        return fast

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        found = detect_format(self.template)
        length = 0 if found is None or found.parser is None else found.parser.id_length
        return ChatTemplate(self.tokenizer, self.name, id_length=length)

    def ids(self, text: str) -> list[int]:
        """Tokenize a text, control tokens included."""
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def write_folder(self, path: Path, **config: Any) -> Path:
        """Write a checkpoint folder without weights, whose end token is the last special one."""
        self.tokenizer.save_pretrained(path)
        settings = {
            "max_position_embeddings": CONTEXT,
            "eos_token_id": self.tokenizer.eos_token_id,
            **config,
        }
        (path / "config.json").write_text(json.dumps(settings))
        return path

    @property
    def control(self) -> frozenset[int]:
        return frozenset(self.tokenizer.convert_tokens_to_ids([*self.special, *self.plain]))


_CHATML = Family(
    "chatml",
    """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}{% if message.name %} name={{ message.name }}{% endif %}
{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    ("<tool_call>", "</tool_call>"),
)

_QWEN3 = Family(
    "qwen3",
    """\
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == "user" and message.content is string
 and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and reasoning %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    ("<|im_start|>", "<|im_end|>"),
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)

_LLAMA3 = Family(
    "llama3",
    """\
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- for call in message.tool_calls %}<|python_tag|>{{ call.function.name + "(" }}
{%- for key, value in call.function.arguments | items %}{{ key + '="' ~ value ~ '"' }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% endfor %}<|eot_id|>
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ message.content | tojson }}<|eot_id|>
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
        "<|eot_id|>",
    ),
)

_MISTRAL = Family(
    "mistral",
    """\
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS][
{%- for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}][/AVAILABLE_TOOLS]
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'system') %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' ~ message.content ~ ', "call_id": "' ~ message.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id is defined and call.id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- call.function | tojson }}{% endfor %}{{ ']' + eos_token }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}""",
    (
        "<s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "</s>",
    ),
)

_GEMMA = Family(
    "gemma",
    """\
{{- bos_token }}
{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (message.content | trim) }}
{%- for call in message.tool_calls or [] %}
{%- for key in call.function.arguments %}{{ key }}={{ call.function.arguments[key] }};{% endfor %}{% endfor %}
{{- '<end_of_turn>\\n' }}{% endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
)

_PHI = Family(
    "phi",
    """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- if message.name %}{{ '<|' + message.name + '|>' }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<|tool_call|>' + call.function | tojson + '<|/tool_call|>' }}{% endfor %}
{%- endfor %}
{%- if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    (
        "<s>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        "<|tool|>",
        "<|/tool|>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|endoftext|>",
    ),
)

_DEEPSEEK = Family(
    "deepseek",
    """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    (
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
    ("<think>", "</think>"),
)

_GLM = Family(
    "glm",
    """\
[gMASK]<sop>
{%- if tools %}<|system|>
<tools>{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}{% endfor %}
</tools>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>
{{ message.content.split('</think>')[-1].strip() }}
{%- for call in message.tool_calls or [] %}
{{ '\\n<tool_call>' + call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- elif message.role == 'tool' %}<|observation|>
<tool_response>
{{ message.content }}
</tool_response>
{%- else %}{{ '<|' ~ message.role ~ '|>' }}
{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    (
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|endoftext|>",
    ),
    (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<think>",
        "</think>",
    ),
)

_GRANITE = Family(
    "granite",
    """\
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content }}
{%- if message.tool_calls %}{{ '<|tool_call|>' + message.tool_calls | tojson(ensure_ascii=True) }}{% endif %}
{{- '<|end_of_text|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"),
)

_HARMONY = Family(
    "harmony",
    """\
{%- macro typed(spec) -%}
{%- if spec.type == 'string' -%}string{%- elif spec.type == 'array' -%}{{ typed(spec['items'] or {}) }}[]
{%- else -%}any{%- endif -%}{%- endmacro -%}
{{- '<|start|>system<|message|>You are a model.\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\nnamespace functions {\\n' }}
{%- for tool in tools %}
{{- '// ' + (tool.function.description or '') + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}
{%- for name, spec in (tool.function.parameters.properties or {}) | items %}{{ name + ': ' + typed(spec) + ',\\n' }}
{%- if spec.enum %}{{ spec.enum | join(' | ') | upper | lower }}{% endif %}{% endfor %}}) => any;
{% endfor %}{{ '}<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking and (loop.last or message.tool_calls) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' ~ call.function.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.function.arguments | tojson }}{{ '<|call|>' }}{% endfor %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' ~ message.name ~ ' to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    (
        "<|start|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
        "<|end|>",
        "<|return|>",
    ),
)


def family(name: str) -> Family:
    """Return the family of a name."""
    return next(one for one in FAMILIES if one.name == name)


FAMILIES = (_CHATML, _QWEN3, _LLAMA3, _MISTRAL, _GEMMA, _PHI, _DEEPSEEK, _GLM, _GRANITE, _HARMONY)
