"""Both hops encrypted: a client, a decode process and a prefill process that each prove who they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.local import LocalPlan, LocalServices
from tests.certificates import self_signed
from tests.headrace.processes import run


async def test_an_answer_over_tls_from_end_to_end(endless_pack: Path, tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    serves = ("--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key))
    serves += ("--tls-client-ca", str(pair.certificate))
    proofs = ("ca-file", pair.certificate), ("certificate", pair.certificate), ("key", pair.key)
    proofs += (("server-name", "headrace.test"),)
    calls_prefill = [word for name, value in proofs for word in (f"--prefill-{name}", str(value))]
    calls = [word for name, value in proofs for word in (f"--{name}", str(value))]
    plan = LocalPlan(
        pack=str(endless_pack),
        memory="1GiB",
        prefill_command=(sys.executable, "-m", "prefill_service", *serves),
        decode_command=(sys.executable, "-m", "decode_service", *serves, *calls_prefill),
    )
    with LocalServices(plan) as services:
        request = ("generate", "5 6 7", "--token-ids", "--max-tokens", "4", "--json")
        answered = await run(*request, "--target", ",".join(services.target), *calls)
        refused = await run(*request, "--target", ",".join(services.target), "--timeout", "1s")
        shown = await run("status", *services.addresses, *calls)
    assert (answered[0], len(json.loads(answered[1])["token_ids"])) == (0, 4), answered
    assert refused[0] == 1
    assert shown[0] == 0
    assert shown[1].count("serving") == 2
