"""The batch's output: each answer as its line asks for it, simply or in the shape of OpenAI's batch files.

Tokens of log-probabilities are named by their ids, as in "token_id:42": a client has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.job_line import Job
from headrace.openai_body import CHAT

Answer = dict[str, Any]
"""What came of one job: id, text, finish_reason, usage, timings, and logprobs where the job asks for them; or id and
error (status: the gRPC status code's name, message)."""


def output_line(job: Job, answer: Answer, *, key: str, model_digest: str, created_s: int) -> dict[str, Any]:
    """The line to write for an answer or an error.

    Args:
        key: identifies job and model.
        model_digest: of the model that answered; told as the model's name where the line gave none.
        created_s: when the answer was finished, in seconds since 1970.
    """
    if job.form == "simple":
        return answer
    line = {"id": f"batch_req_{key}", "custom_id": job.id, "response": None, "error": None}
    if "error" in answer:
        return line | {"error": {"code": answer["error"]["status"], "message": answer["error"]["message"]}}
    body = {
        "id": f"{'chatcmpl' if job.form == CHAT else 'cmpl'}-{key}",
        "object": "chat.completion" if job.form == CHAT else "text_completion",
        "created": created_s,
        "model": job.model or model_digest,
        "system_fingerprint": model_digest,
        "choices": [_choice(job, answer)],
        "usage": _usage(answer["usage"]),
        "timings": answer["timings"],
    }
    return line | {"response": {"status_code": 200, "request_id": job.id, "body": body}}


def _choice(job: Job, answer: Answer) -> dict[str, Any]:
    places = answer.get("logprobs")
    if job.form == CHAT:
        said = {"message": {"role": "assistant", "content": answer["text"]}}
        logprobs = None if places is None else {"content": [_chat_place(place) for place in places]}
    else:
        said = {"text": answer["text"]}
        logprobs = None if places is None else _completion_logprobs(places)
    return {"index": 0, **said, "logprobs": logprobs, "finish_reason": answer["finish_reason"]}


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    ours = {name: usage[name] for name in ("draft_tokens", "accepted_tokens", "passes")}
    cached = {"prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]}}
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total} | cached | ours


def _chat_place(place: Mapping[str, Any]) -> dict[str, Any]:
    return _chat_token(place["token_id"], place["logprob"]) | {
        "top_logprobs": [_chat_token(token_id, logprob) for token_id, logprob in place["top"]]
    }


def _chat_token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": logprob, "bytes": None}


def _completion_logprobs(places: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [_name(place["token_id"]) for place in places],
        "token_logprobs": [place["logprob"] for place in places],
        "top_logprobs": [{_name(token_id): logprob for token_id, logprob in place["top"]} for place in places],
        "text_offset": None,
    }


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"
