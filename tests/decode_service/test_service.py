"""Options of the decode service that are refused before anything is loaded."""

from __future__ import annotations

import pytest

from decode_service.service import main


@pytest.mark.parametrize("targets", ["", ",", "prefill", "127.0.0.1:5,", "127.0.0.1:70000"])
def test_an_empty_or_unreadable_prefill_target_is_refused_and_never_means_none(
    targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-pack", "--prefill", targets])
    assert ended.value.code == 2
    assert "is not a prefill target; write host:port" in capsys.readouterr().err
