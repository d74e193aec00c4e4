"""Reports to be written: one instruction that all share, and notes of which no two are alike."""

from __future__ import annotations

import json
from itertools import cycle, islice

from bench.prompts import REPORTS_FILE, BenchPrompt

INSTRUCTION = """You write the office's version of field notes. Begin with one sentence that says what was visited, \
when, and by whom. Then say what was found, in the order of the notes, with every figure and its unit as in the notes. \
Write out abbreviations the first time. Say what was done on the spot, what has to be done next, and who has to do it. \
Where the notes are not sure of something, say so in the same words; where they contradict themselves, give both \
statements. Do not judge, do not advise beyond the notes, and leave nothing out because it seems small: offices order \
spare parts, boats and people by these pages. Write plain paragraphs without headings, lists or bold type, in the past \
tense, and end with the recommendation."""
CHARACTERS_PER_TOKEN = 3.6
"""Of the embedded model on these texts, roughly."""
FEWEST_NOTES_CHARACTERS = 80


def report_prompts(count: int, prompt_tokens: int) -> list[BenchPrompt]:
    """So many prompts of about that length, made of the example reports' notes."""
    room = max(FEWEST_NOTES_CHARACTERS, int(prompt_tokens * CHARACTERS_PER_TOKEN) - len(INSTRUCTION))
    prompts = []
    for number, notes in enumerate(islice(cycle(_notes()), count), 1):
        longer = f"Sheet {number}. " + " ".join(islice(cycle([notes]), 1 + room // len(notes)))
        content = f"Notes:\n\n{longer[:room]}"
        messages = ({"role": "system", "content": INSTRUCTION}, {"role": "user", "content": content})
        prompts.append(BenchPrompt("report", messages))
    return prompts


def _notes() -> list[str]:
    lines = map(json.loads, REPORTS_FILE.read_text(encoding="utf-8").splitlines())
    return [line["messages"][-1]["content"].partition("\n\n")[2] for line in lines]
