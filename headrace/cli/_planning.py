"""What `headrace plan` asks of this machine and of the services before it can plan."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from headrace.local import Draft
from shared.calibration import Calibration, calibrated
from shared.config import parse_bytes
from shared.demand import DecodeSettings, PrefillSettings, decode_demand, prefill_demand, spool_bytes
from shared.draft_pack import DraftPack
from shared.draft_plan import worthwhile_draft
from shared.errors import ConfigurationError, HeadraceError
from shared.forecast import Machine, ModelSpeed, Speculation
from shared.limits import LOCAL_PASS_TOKENS, PREFILL_PASS_TOKENS
from shared.machine import cached, kernel_versions, machine_key
from shared.pack.reader import Pack
from shared.prospect import Outlook, model_speed
from shared.quant.candidates import DECODE_ROWS, PROMPT_ROWS, Rows
from shared.shift import Drafting
from shared.streaming.plan import Demand, MemoryPlan, plan_memory

Stage = Literal["prefill", "decode", "colocated"]

PLANNED_DRAFT_LENGTH = 4
"""For the forecast of a pass, where the length is left to the service."""
MODEL_ACCEPTANCE, NGRAM_ACCEPTANCE = 0.8, 0.3
"""Assumed where nothing was measured. n-grams are right now and then, and often there is none to propose."""


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A pack, its draft, and the settings of the services that are planned."""

    pack: Pack
    draft: Draft
    draft_path: Path | None
    draft_length: int | None
    given_acceptance: float | None
    batch: int
    context_length: int | None
    prefix_cache: str | None
    again: bool
    """Measure what was measured before."""
    device: str = "cpu"
    device_memory: str | None = None
    """The device's budget, as users write it; None leaves it to the services."""

    @cached_property
    def draft_pack(self) -> DraftPack | None:
        """The pack of a draft that is a model."""
        return DraftPack.open(self.draft, self.draft_path, self.pack)

    @property
    def acceptance(self) -> float:
        """Chance that a draft token is right."""
        if self.given_acceptance is not None:
            return self.given_acceptance
        return NGRAM_ACCEPTANCE if self.draft_pack is None else MODEL_ACCEPTANCE

    def within(self, budget_bytes: int, stage: Stage) -> Planning:
        """The same services, without the draft's pack where a process of a stage would leave it out.

        Raises:
            BudgetError: the budget is too small; the message names the smallest that works.
        """
        if stage == "prefill":
            plan_memory(budget_bytes, self.demand(stage))
            return self

        def planned(draft_pack: DraftPack | None) -> MemoryPlan:
            return plan_memory(budget_bytes, self._decode_demand(stage, draft_pack))

        _, used = worthwhile_draft(self.draft, self.draft_pack, planned)
        return self if used is self.draft_pack else replace(self, draft_path=None)

    def without_draft(self) -> Planning:
        """The same services without a draft."""
        return replace(self, draft="none", draft_path=None, draft_length=None, again=False)

    def demand(self, stage: Stage) -> Demand:
        """What a process of a stage needs."""
        if stage != "prefill":
            return self._decode_demand(stage, self.draft_pack)
        return prefill_demand(self.pack, self.prefill_settings, self.runtime_bytes(stage))

    def _decode_demand(self, stage: Stage, draft_pack: DraftPack | None) -> Demand:
        return decode_demand(self.pack, draft_pack, self.decode_settings(stage), self.runtime_bytes(stage))

    @property
    def prefill_settings(self) -> PrefillSettings:
        """Of a prefill service."""
        return PrefillSettings(
            context_length=self._context,
            pass_tokens=PREFILL_PASS_TOKENS,
            spool_bytes=spool_bytes(self.pack, max(self._context, PREFILL_PASS_TOKENS)),
            prefix_cache_bytes=parse_bytes(self.prefix_cache) if self.prefix_cache else None,
        )

    def decode_settings(self, stage: Stage) -> DecodeSettings:
        """Of a decode service; colocated it computes prompts too."""
        colocated = stage == "colocated"
        return DecodeSettings(
            context_length=self._context,
            batch=self.batch,
            draft_length=self.draft_length,
            receives=not colocated,
            prompt_tokens=LOCAL_PASS_TOKENS if colocated else 0,
        )

    @property
    def _context(self) -> int:
        return min(self.context_length or self.pack.spec.context_length, self.pack.spec.context_length)

    @cached_property
    def _calibration(self) -> Calibration:
        return self._calibrated(DECODE_ROWS)

    def _calibrated(self, rows: Rows) -> Calibration:
        return calibrated(self.pack.for_rows(rows), torch.get_num_threads(), again=self.again)

    @cached_property
    def model(self) -> ModelSpeed:
        """The packed model as decode computes it on this machine."""
        return model_speed(self.pack, self._calibration, self._written_token_s)

    @cached_property
    def prefill_model(self) -> ModelSpeed:
        """And as prefill does, whose products may be others."""
        return model_speed(self.pack, self._calibrated(PROMPT_ROWS))

    @cached_property
    def draft_model(self) -> ModelSpeed | None:
        """And the draft, if it is a model."""
        if self.draft_pack is None:
            return None
        found = calibrated(self.draft_pack.pack, torch.get_num_threads(), again=self.again)
        return model_speed(self.draft_pack.pack, found)

    @cached_property
    def _written_token_s(self) -> float:
        """What the service takes of the processor for a token that is chosen: only it has its imports."""
        tokenizer = hashlib.sha256(self.pack.tokenizer_json().encode()).hexdigest()
        key = {"tokenizer": tokenizer, "python": sys.version, "machine": machine_key()}
        command = [sys.executable, "-m", "decode_service.answer_speed", str(self.pack.path)]
        return float(cached("answer", key, lambda: float(_asked(command)), again=self.again))

    @cached_property
    def machine(self) -> Machine:
        """Its bandwidths."""
        return Machine(
            disk_bytes_per_s=self._calibration.disk_bytes_per_s,
            memory_bytes_per_s=self._calibration.memory_bytes_per_s,
        )

    def outlook(self, stage: Stage) -> Outlook:
        """What forecasts of a stage's passes depend on."""
        speculation = Speculation(
            length=0 if self.draft == "none" else self.draft_length or PLANNED_DRAFT_LENGTH,
            acceptance=self.acceptance,
            draft=self.draft_model,
        )
        return Outlook(
            model=self.prefill_model if stage == "prefill" else self.model,
            machine=self.machine,
            speculation=None if stage == "prefill" else speculation,
            pass_tokens=PREFILL_PASS_TOKENS,
        )

    @property
    def drafting(self) -> Drafting:
        """How the draft goes in forecasts of whole jobs."""
        return Drafting(name=self.draft, acceptance=self.acceptance, draft=self.draft_model, length=self.draft_length)

    def runtime_bytes(self, stage: Stage) -> int:
        """What the service itself says that it takes without weights: only it has its imports. Kept on this machine."""
        module = "prefill_service" if stage == "prefill" else "decode_service"
        drafting = None if stage == "prefill" else self.draft_pack
        packs = [self.pack.manifest.model_digest, drafting.pack.manifest.model_digest if drafting else None]
        draft = None if stage == "prefill" else self.draft
        on_device = ["--device", self.device] if self.device != "cpu" else []
        key = {"service": module, "packs": packs, "draft": draft, "python": sys.version, "kernels": kernel_versions()}
        command = [sys.executable, "-m", module, str(self.pack.path), "--show-runtime", "--log-level", "error"]
        if on_device:
            key["device"] = self.device
        command += on_device + (["--device-memory", self.device_memory] if self.device_memory else [])
        if module == "decode_service":
            command += ["--draft", self.draft, *(["--draft-pack", str(drafting.pack.path)] if drafting else [])]
        return int(cached("runtime", key, lambda: int(_asked(command)), again=self.again))


def _asked(command: Sequence[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        kind = ConfigurationError if run.returncode == 2 else HeadraceError
        raise kind(run.stderr.strip().removeprefix("error: "))
    return run.stdout
