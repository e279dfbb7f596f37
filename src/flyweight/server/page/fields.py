"""One line about each field of a request, for the reference at /docs and in /openapi.json.

By name, because a field means the same in every API that has it; a description of its own wins.
"""

from __future__ import annotations

from typing import Any

FIELDS = {
    "model": "A served name; may be left out.",
    "messages": "The conversation: a list of {role, content}.",
    "prompt": "Text, token ids, or a list of either.",
    "max_tokens": "Most tokens of an answer; it must fit into the context.",
    "min_tokens": "No end of text and no stop string before so many tokens.",
    "temperature": "0 takes the likeliest token; default: as the model asks.",
    "top_p": "Keep the likeliest tokens up to this share of probability.",
    "top_k": "Keep so many of the likeliest tokens; 0 and -1 keep all.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "n": "How many answers to each prompt.",
    "seed": "The same seed gives the same answer.",
    "stop": "The answer ends before this string, or before the first of several.",
    "stop_token_ids": "Token ids that end the answer.",
    "ignore_eos": "Go on where the model would end, up to max_tokens.",
    "presence_penalty": "Above 0 makes tokens of the answer so far less likely, once each.",
    "frequency_penalty": "Above 0 makes tokens less likely each time they were in the answer.",
    "repetition_penalty": "Above 1 makes tokens of prompt and answer less likely.",
    "logit_bias": "Token id → number added to its logit, -100 to 100.",
    "response_format": "What the answer must be: text, a JSON object, or JSON that fits a schema.",
    "stream": "Send the answer in pieces, as server-sent events.",
    "stream_options": "What a stream tells beside the text, such as include_usage.",
    "tools": "Functions that the model may ask to be called.",
    "tool_choice": "Whether it may, must or must not ask for one.",
    "chat_template_kwargs": "What the chat template takes, such as enable_thinking for Qwen3.",
    "add_generation_prompt": "End the prompt where an answer begins; true by default.",
    "continue_final_message": "Go on with the last message instead of answering it.",
    "add_special_tokens": "False: a text prompt gets no begin-of-text token.",
    "logprobs": "Report the log-probability of each token of the answer.",
    "top_logprobs": "And of so many of the likeliest tokens beside it.",
    "return_token_strs": "Give the text of each token too.",
    "tokens": "Token ids.",
    "guided_regex": "The answer must match this regular expression.",
    "guided_choice": "The answer must be one of these texts.",
    "guided_grammar": "The answer must follow this grammar, in Lark's or EBNF's form.",
    "json_schema": "The answer must be JSON that fits this schema.",
    "ebnf": "The answer must follow this grammar, in EBNF.",
    "structural_tag": "Parts of the answer between such tags must fit their schemas.",
    "reasoning_effort": "How long to think, for chat templates that know it.",
    "enable_thinking": "Whether to think first, for chat templates that know it.",
    "max_output_tokens": "Most tokens of an answer; it must fit into the context.",
    "user": "Who asks, in the caller's words; nothing is done with it.",
    "context": "A conversation of an earlier answer, in Ollama's form; refused.",
    "images": "Pictures beside the text; refused, since no model here reads them.",
    "suffix": "Text behind the gap to be filled; refused.",
    "template": "Another chat template; refused.",
    "verbose": "Tell more than the usual facts.",
}


def describe(schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with a description of every field that has none of its own."""
    for fields in schema["components"]["schemas"].values():
        for name, field in fields.get("properties", {}).items():
            if not field.get("description") and name in FIELDS:
                field["description"] = FIELDS[name]
    return schema
