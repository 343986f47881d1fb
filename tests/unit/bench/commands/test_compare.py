"""Comparing systems: ratios within a round, the advice, and the remarks on the sizes of busy pools."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from bench.commands import compare
from bench.commands.compare import Terms
from bench.load.client import Record, Target
from bench.load.comparison import OTHER, Outcome, best, busy_shares, table, verdict
from bench.load.metrics import Objective, summarise
from bench.load.run import Run
from bench.load.setup import Prepared
from bench.load.systems import counts, pools, usual_systems
from bench.load.tokens import FileTokenizer
from bench.load.workloads import PlannedRequest
from common import builtin
from common.config.bench.compare import BenchCompareConfig
from common.core.errors import StartError
from deploy.cli import main as cli
from tests.leaked_keys import new_key

KEY = new_key()
OBJECTIVES = (Objective("ttft", 1000.0), Objective("tpot", 40.0))


def outcome(system: str, *rounds: tuple[int, float], prefill: float = 0.0, decode: float = 0.0) -> Outcome:
    """Return an outcome. A round is (requests of 100 inside the objectives, ms between tokens); a run takes 10 s."""
    found = Outcome(system)
    for inside, gap_ms in rounds:
        records = []
        for index in range(100):
            sent = index / 10
            first = sent + (0.5 if index < inside else 2.0)
            moments = [first, first + gap_ms / 1000]
            records.append(Record(sent, 10, sent, moments, output_tokens=2))
        if prefill or decode:
            for index, record in enumerate(records):
                record.stages = {"prefill": "p", "decode": "d", "prefill_ms": prefill * 100}
                first = index / 10 + 0.1
                record.moments = [first, first + decode / 10]
        found.runs.append(Run(records, 10.0, 0.0))
        found.summaries.append(summarise(found.runs[-1], objectives=OBJECTIVES))
    return found


def test_a_gain_in_every_round_is_advised() -> None:
    lines = verdict([outcome("1p1d", (90, 10), (95, 10)), outcome("1c", (50, 35), (60, 25))], OBJECTIVES)
    assert lines[0].startswith("Disaggregate, as 1p1d: 1.69 (1.58 to 1.80) times as many")
    assert "3.00 (2.50 to 3.50) times as long with 1c" in lines[1]


def test_verdict_keeps_colocated_on_equal_goodput() -> None:
    """Short prompts and a light load: all requests are inside the objectives with both systems."""
    lines = verdict([outcome("1p1d", (100, 10), (100, 10)), outcome("1c", (100, 12), (100, 12))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate: 1p1d has 1.00 times")


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (((40, 10), (45, 10)), "has only 0.85"),
        (((90, 10), (40, 10)), "but not more in every round"),
        (((51, 10), (51, 10)), "less than the 1.05 times"),
        (((0, 10), (0, 10)), "has only 0.00"),
    ],
)
def test_less_or_doubtful_gain_is_not_advised(apart: tuple[tuple[int, float], ...], said: str) -> None:
    lines = verdict([outcome("1p1d", *apart), outcome("2c", (50, 10), (50, 10))], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate") and said in lines[0]


def test_a_run_that_only_took_longer_is_no_worse() -> None:
    """This holds for requests with arrival times of their own. If all are sent at once, the total time counts."""
    apart, together = outcome("1p1d", (100, 10)), outcome("1c", (100, 10))
    together.runs[0] = replace(together.runs[0], seconds=12.0)
    together.summaries[0] = summarise(together.runs[0], objectives=OBJECTIVES)
    assert verdict([apart, together], OBJECTIVES)[0].startswith("Do not disaggregate")
    for record in (*apart.runs[0].records, *together.runs[0].records):
        record.due_at = 0.0
    assert verdict([apart, together], OBJECTIVES)[0].startswith("Disaggregate, as 1p1d: 1.20")


def test_a_system_that_never_meets_the_objectives_counts_nothing() -> None:
    lines = verdict([outcome("1p1d", (40, 10)), outcome("1c", (50, 90))], OBJECTIVES)
    assert lines[0] == "Disaggregate, as 1p1d: 1c has no request inside ttft:1000 tpot:40 (ms)."


def test_verdict_ignores_gain_in_single_round() -> None:
    """Also if the other system had no request inside in any round."""
    lines = verdict([outcome("1p1d", (30, 10), (0, 10), (0, 10)), outcome("1c", *[(0, 10)] * 3)], OBJECTIVES)
    assert lines[0].startswith("Do not disaggregate: 1p1d has 1.00 (1.00 to inf) times")


def test_systems_that_are_both_overloaded_tell_nothing() -> None:
    """Also if one system has some requests inside, those that came before all others were late."""
    lines = verdict([outcome("1p1d", (0, 10)), outcome("1c", (0, 10))], OBJECTIVES)
    assert lines[0].startswith("This comparison gives no reason to disaggregate: no request is inside ttft:1000")
    lines = verdict([outcome("1p1d", (10, 10), (12, 10)), outcome("1c", (0, 10), (2, 10))], OBJECTIVES)
    assert lines[0].startswith("This comparison gives no reason to disaggregate: at most 12% of requests")
    assert lines[0].count(". ") == 0, "one sentence"


def failing(outcome: Outcome, count: int) -> Outcome:
    """Return ``outcome`` with the last ``count`` requests of each round failed."""
    for index, run in enumerate(outcome.runs):
        for record in run.records[len(run.records) - count :]:
            record.moments, record.error = [], "HTTP 503: full"
        outcome.summaries[index] = summarise(run, objectives=OBJECTIVES)
    return outcome


def test_a_system_that_answers_nothing_gives_no_advice() -> None:
    """Such a system is broken, which says nothing about how it should be built."""
    for count, said in (((100, 0), "1p1d"), ((0, 100), "1c"), ((100, 100), "1p1d and 1c")):
        rounds = [failing(outcome(name, (90, 10)), each) for name, each in zip(("1p1d", "1c"), count, strict=True)]
        assert verdict(rounds, OBJECTIVES) == [f"No advice: {said} answered no request."]


def test_verdict_reports_failed_requests_as_outside_objectives() -> None:
    words = verdict([failing(outcome("1p1d", (100, 10)), 20), outcome("1c", (100, 10))], OBJECTIVES)
    assert "has only 0.80" in words[0]
    assert words[2].startswith("Requests failed, 20 of 100 with 1p1d, 0 of 100 with 1c: they count as outside")
    assert words[3].endswith("0% that for TPOT: of those that were answered.")


def test_few_failures_do_not_make_pools_large_enough() -> None:
    words = verdict([failing(outcome("1p1d", (100, 10)), 3), outcome("1c", (50, 10))], OBJECTIVES)
    assert words[0].startswith("Disaggregate") and words[-1].endswith("TPOT: of those that were answered.")


def test_answers_of_one_token_have_no_time_between_tokens() -> None:
    rounds = [outcome("1p1d", (90, 10)), outcome("1c", (90, 10))]
    for each in rounds:
        for record in each.runs[0].records:
            record.moments, record.output_tokens = record.moments[:1], 1
        each.summaries[0] = summarise(each.runs[0], objectives=OBJECTIVES)
    assert verdict(rounds, OBJECTIVES)[1] == "Output with 1p1d is 1.00 times as much."


def test_the_best_of_each_kind_are_compared() -> None:
    rounds = [outcome("1p1d", (50, 10)), outcome("2p1d", (90, 10)), outcome("1c", (40, 9)), outcome("2c", (40, 5))]
    assert best(rounds[:2], "goodput") is rounds[1] and best(rounds[2:], "inside") is rounds[3]
    assert best([], "goodput") is None
    assert "as 2p1d" in verdict(rounds, OBJECTIVES)[0] and "as 2c" in verdict(rounds, OBJECTIVES)[0]
    assert verdict(rounds[:2], OBJECTIVES)[0].startswith("No advice")
    lines = table([*rounds, outcome("other", (99, 3))])
    assert lines[2].startswith("| 1p1d | 5.00 | 50% |") and lines[-1].startswith(
        "other / 1c, within a round: goodput 2.48"
    )


def test_the_server_at_the_url_is_compared_with_the_best_system() -> None:
    other = outcome("other", (30, 35), (60, 35))
    rounds = [outcome("1p1d", (60, 10), (60, 10)), outcome("1c", (90, 10), (90, 10))]
    assert verdict([*rounds, other], OBJECTIVES)[-1] == (
        "1c has 2.25 (1.50 to 3.00) times as many requests inside ttft:1000 tpot:40 (ms) as the server at --url, whose"
        " P99 time between tokens is 3.50 times as long."
    )
    alone = verdict([rounds[0], other], OBJECTIVES)
    assert alone[0].startswith("No advice") and alone[1].startswith("1p1d has 1.50 (1.00 to 2.00) times")
    dead = failing(outcome("other", (90, 10), (90, 10)), 100)
    assert verdict([*rounds, dead], OBJECTIVES)[-1] == "The server at --url answered no request."
    late = [outcome(name, (0, 10), (0, 10)) for name in ("1p1d", "1c", "other")]
    assert verdict(late, OBJECTIVES)[-1].startswith("Neither 1p1d nor the server at --url has any request inside")


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (70, "it lacks prefill. With another core for prefill, 2p1d may serve more (tandem bench plan estimates"),
        (94, "it lacks prefill. With another core for prefill, 2p1d may serve more"),
        (95, "its pools are large enough for these objectives."),
        (99, "its pools are large enough for these objectives."),
        (100, "its pools are large enough for these objectives."),
    ],
)
def test_the_first_tokens_that_are_late_say_that_prefill_is_too_small(inside: int, said: str) -> None:
    """A few late first tokens say nothing about prefill."""
    lines = verdict([outcome("1p1d", (inside, 10)), outcome("1c", (50, 10))], OBJECTIVES)
    assert lines[0].startswith("Disaggregate") and said in lines[-1]


@pytest.mark.parametrize(
    ("late", "slow", "said"),
    [
        (0, 30, "it lacks decode. With another core for decode, 1p2d may serve more"),
        (20, 30, "both pools are too small. With another core for each, 2p2d may serve more"),
    ],
)
def test_the_objectives_that_are_missed_say_which_pool_is_too_small(late: int, slow: int, said: str) -> None:
    apart = outcome("1p1d", (100 - late, 10))
    for record in apart.runs[0].records[:slow]:
        record.moments = [record.moments[0], record.moments[0] + 0.06]
    apart.summaries[0] = summarise(apart.runs[0], objectives=OBJECTIVES)
    lines = verdict([apart, outcome("1c", (30, 10))], OBJECTIVES)
    assert lines[0].startswith("Disaggregate") and said in lines[-1]


@pytest.mark.parametrize(
    ("inside", "beside"),
    [(10, 0), (60, 90), (60, 60)],  # neither meets the objectives; fewer inside; as many inside
)
def test_where_it_is_not_advised_to_disaggregate_no_larger_pools_are(inside: int, beside: int) -> None:
    """The output still names the missed objectives and how busy the pools were."""
    apart = outcome("1p1d", (inside, 10))
    for record in apart.runs[0].records:
        record.stages = {"prefill": "p", "decode": "d", "prefill_ms": 90.0}
    lines = verdict([apart, outcome("1c", (beside, 10))], OBJECTIVES)
    assert not lines[0].startswith("Disaggregate")
    assert lines[-1].startswith(f"With 1p1d {100 - inside}% miss the objective for TTFT, 0% that for TPOT; prefill")
    assert lines[-1].endswith("of the time.") and "2p1d" not in " ".join(lines)


def test_how_busy_workers_were() -> None:
    apart = outcome("1p1d", (100, 10), prefill=0.9, decode=0.3)
    assert busy_shares(apart.runs[0]) == pytest.approx({"prefill": 0.9, "decode": 0.3}, rel=0.01)
    words = verdict([apart, outcome("1c", (50, 10))], OBJECTIVES)[-1]
    assert "prefill workers were busy 90% of the time, decode workers were busy 30% of the time" in words


def test_time_in_which_several_requests_run_counts_once() -> None:
    run = outcome("1p1d", (90, 10), decode=5.0).runs[0]
    assert busy_shares(run)["decode"] == pytest.approx((9.9 + 0.5) / 10)


def test_a_prompt_that_decode_computed_kept_decode_busy() -> None:
    run = outcome("1p1d", (90, 10), prefill=0.9, decode=0.3).runs[0]
    before = busy_shares(run)
    for record in run.records:
        assert record.stages is not None
        record.stages |= {"path": "local", "prefill": record.stages["decode"]}
    assert busy_shares(run) == pytest.approx({"decode": before["decode"] + before["prefill"]}, rel=0.2)


def test_names_of_systems() -> None:
    assert pools("2p3d") == ["--prefill", "2", "--decode", "3"] and pools("2c") == ["--colocated", "2"]
    for wrong in ("", "1p", "d", "1p1d1c", "c", "colocated"):
        with pytest.raises(StartError):
            pools(wrong)
    for words in (["--systems", "1p1d,x"], ["--systems", "1c,1c"], ["--systems", ","]):
        assert cli.main(["bench", "compare", *words]) == 1


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace measurements by perfect outcomes; return the list of measured systems, in order."""
    names: list[str] = []

    def measure(config: object, found: Outcome, number: int, terms: Terms, _: object) -> None:
        names.append(found.system)
        one = outcome(found.system, (100, 10))
        found.runs += one.runs
        found.summaries += one.summaries
        terms.objectives = OBJECTIVES

    monkeypatch.setattr(compare, "_measure", measure)
    return names


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        (1, ["1p1d", "1c", "2c"]),
        (2, ["1p1d", "1c", "2c"]),
        (3, ["1p1d", "1c", "2c", "2p1d", "1p2d", "3c"]),
        (8, ["1p1d", "1c", "2c", "2p1d", "1p2d", "3c"]),
    ],
)
def test_sizes_of_pools_are_compared_where_there_are_cores_for_them(
    cores: int,
    wanted: list[str],
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert cli.main(["bench", "compare", "--runs", "1"]) == 0
    assert measured == wanted == usual_systems(cores).split(",") and all(map(counts, wanted))
    said = " ".join(capsys.readouterr().err.split())
    assert f"comparing {','.join(wanted)}, chosen for {cores} core{'s' if cores > 1 else ''} (--systems" in said


def test_systems_that_are_named_are_those_that_are_compared(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "compare", "--systems", "2p1d, 1c", "--runs", "2"]) == 0
    assert measured == ["2p1d", "1c"] * 2 and "comparing" not in capsys.readouterr().err


@pytest.mark.parametrize("runs", [1, 2])
def test_compare_warns_about_single_round(
    runs: int, measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    assert cli.main(["bench", "compare", "--systems", "1p1d,1c", "--runs", str(runs), "--save", str(saved)]) == 0
    line = "One round only: how much of this is chance is unknown (--runs)."
    assert (line in capsys.readouterr().out.splitlines()) is (runs == 1)
    figures = json.loads(saved.read_text())
    assert (line in figures["advice"]) is (runs == 1)
    assert figures["ratios_to"] == "1c" and list(figures["ratios"]) == ["1p1d"]
    assert figures["ratios"]["1p1d"]["goodput"] == {"median": 1, "low": 1, "high": 1}


class _Models(BaseHTTPRequestHandler):
    """A server that requires a key and has one model."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {KEY}"
        body = json.dumps({"data": [{"id": "some"}]} if known else {"error": {"message": "no such key"}}).encode()
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def models() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Models)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_wrong_url_is_found_before_anything_is_started(
    models: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--url", models, "--api-key", new_key()], "no such key"),
        (["--url", models, "--api-key", KEY, "--served-model-name", "none"], "does not serve none"),
    ):
        assert cli.main(["bench", "compare", *words]) == 1
        assert said in (error := capsys.readouterr().err) and "keeps running" not in error and not measured


def test_a_model_of_the_other_server_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that server is asked for it."""
    asked: list[tuple[str, str | None, str | None]] = []

    def stop(_: object, url: str, key: str | None, model: str | None, longest: int | None) -> None:
        asked.append((url, key, model))
        raise StartError("enough", "it is known", "go on")

    monkeypatch.setattr(compare, "prepare", stop)
    monkeypatch.setattr(compare, "running", lambda *_: nullcontext("http://ours"))
    config = BenchCompareConfig(
        model="some", systems="1p1d", url="http://theirs", api_key=KEY, served_model_name="second"
    )
    for system in ("1p1d", OTHER):
        with pytest.raises(StartError, match="enough"):
            compare._measure(config, Outcome(system), 0, Terms(), Console(stderr=True))
    assert asked == [("http://ours", None, None), ("http://theirs", KEY, "second")]


def test_all_systems_get_the_same_requests() -> None:
    """Requests too long for one system are left out for the later ones; a system that would get others is refused."""
    limits: list[int | None] = []

    def prepared(system: str, longest: int, lengths: tuple[int, ...]) -> Prepared:
        asks = [PlannedRequest([1] * length, length, 10) for length in lengths]
        return Prepared(Target(f"http://{system}", "some"), asks, FileTokenizer(builtin.path()), [], longest)

    terms = Terms()
    for number in range(2):
        for system in ("1p1d", "1c"):
            terms.hold(prepared(system, 100, (20, 30 + number)), number, system)
            limits.append(terms.longest)
    assert limits == [100] * 4
    with pytest.raises(StartError, match="other would not get the same requests"):
        terms.hold(prepared("other", 40, (20, 25)), 1, "other")


def test_compare_warns_that_url_server_uses_cores(
    models: str, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--systems", "1p1d,1c", "--runs", "2", "--url", models, "--api-key", KEY]
    assert cli.main(["bench", "compare", *words]) == 0
    assert measured == ["1p1d", "1c", "other"] * 2
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("note: the server at --url keeps running while the others are measured: if it is on this") == 1


def test_flags_of_the_systems_are_saved() -> None:
    config = BenchCompareConfig(model="", up_flags="--max-num-seqs 8")
    assert compare._as_json(config, [Outcome("1c")], (), [])["up_flags"] == "--max-num-seqs 8"
    assert compare._as_json(replace(config, up_flags=None), [Outcome("1c")], (), [])["up_flags"] == ""


@pytest.mark.parametrize("flags", ["--api-key KEY", "--admin_api_key=KEY", "--api-key 'KEY"])
def test_flags_of_the_systems_hold_no_key_and_errors_do_not_show_it(flags: str) -> None:
    """They become arguments of processes, which every user of the machine can read."""
    with pytest.raises(StartError) as refused:
        BenchCompareConfig(model="", up_flags=flags.replace("KEY", KEY))
    assert KEY not in str(refused.value)
