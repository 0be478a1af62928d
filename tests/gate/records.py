"""A check of four cases, one of each verdict, with round numbers: for texts that are compared letter by letter."""

from optimize.gate.record import (
    AccuracyRecord,
    CaseRecord,
    FindingRecord,
    Record,
    SelfTestRecord,
    SideRecord,
    TimeRecord,
)
from optimize.gate.verdict import Ratio, Verdict
from optimize.measure.runs import Clock


def side(median_s: float, runs: int = 84) -> SideRecord:
    return SideRecord(
        source="net.onnx",
        kind="ONNX",
        target="onnx",
        sha256="ab" * 32,
        size_bytes=378_000,
        output_digest="cd" * 32,
        runs=runs,
        median_s=median_s,
        cpu_median_s=median_s,
        p90_s=1.2 * median_s if runs >= 64 else None,
        load_s=0.03,
        first_call_s=0.005,
        peak_memory_bytes=68_300_000,
    )


def time(ratio: float, e_fail: float, e_pass: float) -> TimeRecord:
    found = Ratio(value=ratio, low=ratio - 0.01, high=ratio + 0.01)
    return TimeRecord(
        max_regression=0.05,
        clock=Clock.CPU,
        clock_reason="neither side ever gave up the processor by itself",
        ratio=found,
        wall=Ratio(value=ratio + 0.002, low=None, high=None),
        cpu=found,
        e_fail=e_fail,
        e_pass=e_pass,
        fail_at=400,
        pass_at=20,
        rounds=21,
        restarts=3,
        restart_ratios=(ratio, ratio + 0.001, ratio - 0.001),
        bimodal=False,
        seconds=1.4,
    )


def finding(verdict: Verdict, found: str, reason: str) -> FindingRecord:
    return FindingRecord(metric="time", verdict=verdict, limit="5 % more", found=found, reason=reason)


SLOWER = "+6.8 % time, beyond doubt more than 2.5 %, half of the 5 % asked: there FAIL begins"
OPEN = "the evidence does not suffice: 3.1 of 400 that it is slower, 0.2 of 20 that it is not"
CASES = (
    CaseRecord(
        name="resnet",
        verdict=Verdict.PASS,
        reason="+0.2 % time, less than 5 % beyond doubt",
        base=side(0.00145),
        candidate=side(0.001453),
        time=time(1.002, 0.03, 1580.0),
        sqnr_db=34.5,
        accuracy=AccuracyRecord(
            metric="top1", value=0.9, base=0.902, samples=1000, drop=0.2, difference_low=-0.01, difference_high=0.006
        ),
        findings=(finding(Verdict.PASS, "+0.2 %", "+0.2 % time, less than 5 % beyond doubt"),),
        warnings=("The machine was busy before measuring began: load 3.1 on 2 cores. Ratios hold.",),
        seconds=2.0,
    ),
    CaseRecord(
        name="repvgg | int8",
        verdict=Verdict.FAIL,
        reason=SLOWER,
        base=side(0.002),
        candidate=side(0.002136, runs=40),
        time=time(1.068, 15800.0, 0.01),
        findings=(finding(Verdict.FAIL, "+6.8 %", SLOWER),),
        seconds=3.0,
    ),
    CaseRecord(
        name="vit",
        verdict=Verdict.INCONCLUSIVE,
        reason=OPEN,
        base=side(0.02),
        candidate=side(0.0207),
        time=time(1.0375, 3.1, 0.2),
        findings=(finding(Verdict.INCONCLUSIVE, "+3.8 %", OPEN),),
        seconds=120.0,
    ),
    CaseRecord(name="<lost>", verdict=Verdict.NOT_COMPARABLE, reason="There is no file 'lost.onnx'", seconds=0.1),
)
RECORD = Record(
    verdict=Verdict.FAIL,
    exit_code=1,
    alpha=0.01,
    beta=0.05,
    on_inconclusive="keep",
    cases=CASES,
    self_test=SelfTestRecord(
        decisions=20,
        false_alarms=0,
        inconclusive=1,
        median_s=1.42,
        spread=0.0081,
        smallest_regression=0.02,
        fit=True,
    ),
    environment={
        "cpu": "AMD EPYC",
        "cores": 2,
        "system": "Linux 6.18",
        "load_average": (3.1, 2.0, 1.0),
        "versions": {"onnxruntime": "1.31.1", "torch": "2.13.0"},
    },
    command="optimize check",
    created="2026-01-02T03:04:05+00:00",
)
