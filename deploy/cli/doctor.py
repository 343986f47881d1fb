"""``tandem doctor``: says what of this machine, of a configuration and of a running system is good, slow or wrong, and
what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from rich.console import Console

from common.config.doctor import DoctorConfig
from common.core.errors import StartError
from common.core.printable import printable
from deploy.cli.main import version
from deploy.doctor.all import checks, gpus_of
from deploy.doctor.finding import Finding, as_json, lines, refused
from deploy.doctor.workload import SUBJECT, Advice, advise


def run(config: DoctorConfig) -> int:
    """Print the findings, as they are made, or as one JSON object; exit code 1 if one is bad."""
    advice = Advice()
    found = list[Finding]()

    def made() -> Iterator[Finding]:
        for each in _findings(config, advice):
            found.append(each)
            yield each

    if config.json:
        list(made())
        print(json.dumps(_summary(found) | {"findings": as_json(found), "workload": advice.figures}))
    else:
        for line in lines(made()):
            print(printable(line), flush=True)
        counts = _summary(found)
        noun = "warning" if counts["warnings"] == 1 else "warnings"
        print(f"\n{counts['bad']} bad, {counts['warnings']} {noun}, {counts['good']} good")
    return 1 if any(each.level == "bad" for each in found) else 0


def _findings(config: DoctorConfig, advice: Advice) -> Iterator[Finding]:
    yield from checks(config, version())
    if (shape := config.shape) is None:
        return
    console = Console(stderr=True, highlight=False, quiet=not sys.stderr.isatty())
    try:
        made = advise(config, shape, gpus_of(config), console)
    except StartError as error:
        yield refused(SUBJECT, error)
        return
    advice.figures = made.figures
    yield from made.findings


def _summary(found: list[Finding]) -> dict[str, int]:
    return {
        "bad": sum(each.level == "bad" for each in found),
        "warnings": sum(each.level == "warning" for each in found),
        "good": sum(each.level == "good" for each in found),
    }
