"""The naive job by transformers: reads conversations, or prompts' tokens, as JSON, answers one by one, prints JSON.

python -m bench.transformers_peer CHECKPOINT TOKENS < conversations.json
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main() -> None:
    """Loads the checkpoint in bfloat16 and generates greedily, exactly so many tokens each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint, tokens = sys.argv[1], int(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    conversations = json.load(sys.stdin)
    answers, prompt_tokens = [], 0
    started_s, processor_s = time.monotonic(), time.process_time()
    for asked in conversations:
        if isinstance(asked[0], int):
            token_ids = torch.tensor([asked])
            prompt = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
        else:
            prompt = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        length = prompt["input_ids"].shape[1]
        output = model.generate(**prompt, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens)
        answers.append(output[0, length:].tolist())
        prompt_tokens += length
    found = {
        "wall_s": time.monotonic() - started_s,
        "processor_s": time.process_time() - processor_s,
        "prompt_tokens": prompt_tokens,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "answers": answers,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
