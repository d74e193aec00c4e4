"""Starts services on this machine for two questions at a time: python examples/local_services.py PACK"""

import asyncio
import sys

from headrace import AsyncClient, LocalPlan, LocalServices

QUESTIONS = ("Why do rivers meander?", "What does a levee do?", "How is rain measured?", "What is silt?")


async def ask_all(target: tuple[str, ...]) -> None:
    """Asks two questions at a time and prints each answer when it is complete."""
    two_at_a_time = asyncio.Semaphore(2)

    async def ask(client: AsyncClient, question: str) -> None:
        async with two_at_a_time:
            answer = await client.complete(messages=[{"role": "user", "content": question}], max_tokens=48)
        print(f"{question}\n    {answer.text.strip()}  [{answer.finish_reason}]")

    async with AsyncClient(target) as client:
        await asyncio.gather(*(ask(client, question) for question in QUESTIONS))


with LocalServices(LocalPlan(pack=sys.argv[1], memory="1GiB")) as services:
    asyncio.run(ask_all(services.target))
