"""Flags: Triton's command lines are obeyed, or refused with a reason; nothing is swallowed."""

from __future__ import annotations

from collections.abc import Mapping

import click
import pytest
from click.shell_completion import ShellComplete
from hypothesis import given
from hypothesis import strategies as st

from tensord.config import layers
from tensord.config.layers import ConfigurationError
from tensord.config.options import Options
from tensord.daemon import flags


def parsed(*arguments: str, environment: Mapping[str, str] | None = None) -> Options:
    command = flags.FlagCommand("tensord", add_help_option=False)
    with command.make_context("tensord", list(arguments)) as context:
        return layers.read(environment=environment, flags=flags.settings(context)).options


def test_a_triton_command_line() -> None:
    options = parsed(
        "--model-repository=/a,b",
        "--model-repository",
        "/c",
        "--model-control-mode=explicit",
        "--load-model=x",
        "--load-model=*",
        "--http-port=9000",
        "--http-address",
        "0.0.0.0",
        "--allow-grpc=false",
        "--grpc-port=9001",
        "--metrics-port=9002",
        "--metrics-address=0.0.0.0",
        "--metrics-interval-ms=500",
        "--metrics-config=counter_latencies=true",
        "--allow-metrics=0",
        "--allow-gpu-metrics=false",
        "--exit-timeout-secs=5",
        "--exit-on-error=false",
        "--strict-readiness=true",
        "--log-verbose=1",
        "--log-info=False",
        "--log_format=json",
        "--id=me",
        "--http-thread-count=8",
    )
    assert options.repository.paths == ("/a,b", "/c")
    assert (options.repository.control_mode, options.repository.load) == ("explicit", ("x", "*"))
    assert (options.http.port, options.http.address) == (9000, ("0.0.0.0",))
    assert (options.metrics.enabled, options.metrics.port, options.metrics.address) == (False, 9002, "0.0.0.0")
    assert options.metrics.gpus is False
    assert (options.supervisor.exit_timeout, options.repository.exit_on_error) == (5.0, False)
    assert (options.log.verbose, options.log.info, options.log.format, options.server_name) == (1, False, "json", "me")


def test_switches_take_a_value_or_none() -> None:
    for arguments in (
        ["--exit-on-error"],
        ["--exit-on-error", "true"],
        ["--exit-on-error=1"],
        ["--exit-on-error=TRUE"],
    ):
        assert parsed(*arguments, "--http-port", "1").repository.exit_on_error
    assert parsed("--allow-http", "false").http.enabled is False
    assert parsed("--exit-on-error", "False").repository.exit_on_error is False
    assert parsed().repository.exit_on_error == "auto"


@pytest.mark.parametrize("off", ["--trace-config=level=OFF", "--trace-config=triton,level=OFF", "--trace-level=OFF"])
def test_traces_are_turned_off_whatever_the_environment_says(off: str) -> None:
    environment = {"TENSORD_TRACE_FILE": "/tmp/t", "TENSORD_TRACE_LEVEL": "TIMESTAMPS"}

    def level(*arguments: str) -> tuple[str, ...]:
        return parsed(*arguments, environment=environment).trace.level

    assert level() == level("--trace-config=mode=triton") == ("TIMESTAMPS",)
    assert level(off) == ()
    assert level("--trace-level=TENSORS", "--trace-config=level=TIMESTAMPS") == ("TENSORS", "TIMESTAMPS")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grpc-keepalive-time=2h"], "--grpc-keepalive-time=2h: a number of milliseconds is expected"),
        (["--allow-cpu-metrics"], "--allow-cpu-metrics=true: the metrics are of the daemon only; of the host"),
        (["--metrics-config=summary_latencies=true"], "durations are counters"),
        (["--trace-config=level=TIMESTAMPS"], "trace.level: needs trace.file or trace.otlp"),
        (["--trace-config", "opentelemetry,url=x"], "set trace.otlp in the file, or by TENSORD_TRACE_OTLP"),
        (["--trace-config=mode=opentelemetry"], "set trace.otlp in the file"),
        (["--trace-config=nonsense"], r"expected \[triton,\]SETTING=VALUE"),
        (["--cache-config=redis,host=x"], "the one response cache is local,size=BYTES"),
        (["--cache-config", "local,size=1G"], "expected local,size=BYTES"),
        (["--cache-config=local"], "expected local,size=BYTES"),
        (["--backend-directory=/x"], "back ends are part of tensord"),
        (
            ["--model-control-mode=pol"],
            "--model-control-mode: repository.control_mode: expected none, explicit or poll, given 'pol'",
        ),
        (
            ["--repository-poll-secs=0"],
            "--repository-poll-secs: repository.poll_interval: expected float >= 0.1, given '0'",
        ),
        (["--http-prot=1"], r"--http-prot: unknown flag; did you mean --http-port\?"),
        (["--xyzzy"], "--xyzzy: unknown flag"),
        (
            ["--metrics-agent-port=1"],
            "metrics.agent_port has no flag; set it in the file, or by TENSORD_METRICS_AGENT_PORT",
        ),
        (["--http-port"], "--http-port: needs a value"),
        (["--http-port", "--id=x"], "--http-port: needs a value"),
        (["--http-port=x"], "--http-port: http.port: expected int, got str, given 'x'"),
        (["models"], "unexpected argument 'models'"),
        (["-x"], "unexpected argument '-x'"),
        (["--load-model=x"], "needs repository.control_mode"),
    ],
)
def test_what_an_operator_reads(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parsed(*arguments)


def test_the_response_cache_has_two_spellings() -> None:
    for line in (["--cache-config", "local,size=1048576"], ["--response-cache-byte-size=1048576"]):
        assert parsed(*line).response_cache.byte_size == 1 << 20
    assert parsed().response_cache.byte_size == 0


def test_the_rate_limiter() -> None:
    found = parsed("--rate-limit=execution_count", "--rate-limit-resource=R1:10", "--rate-limit-resource", "R2:4:0")
    assert (found.rate_limit.mode, found.rate_limit.resources) == ("execution_count", ("R1:10", "R2:4:0"))
    with pytest.raises(
        ConfigurationError, match=r"rate_limit.resources: expected NAME:COUNT or NAME:COUNT:DEVICE, given 'R1'"
    ):
        parsed("--rate-limit-resource=R1")


def test_every_flag_names_a_key_and_stands_in_the_help() -> None:
    keys = layers.known_keys()
    assert all(flag.key in keys for flag in flags.FLAGS)
    command = flags.FlagCommand("tensord")
    text = command.get_help(click.Context(command, max_content_width=300, terminal_width=300))
    for flag in flags.FLAGS:
        assert f"--{flag.name}" in text
        assert f"[{flag.key}:" in text
    assert "[http.port: int from 0 to 65535; default 8000]" in text
    assert "[http.response_compression: none, low, medium or high; default 'none']" in text
    assert "[http.processes: auto or int from 1 to 64; default 'auto']" in text
    assert "[workers.gpu_memory_fraction: number above 0 to 1; default 0.75]" in text
    assert "--exit-on-error[=true|false|auto]" in text
    # What such a flag takes, and not the key's seconds.
    assert "[grpc.keepalive_time: milliseconds; default 7200000]" in text


def completed(*words: str) -> list[str]:
    """Returns the completions that a shell is offered for the last of these words."""
    command = flags.FlagCommand("tensord")
    *before, last = words
    return [item.value for item in ShellComplete(command, {}, "tensord", "X").get_completions(before, last)]


def test_a_shell_completes_flags_and_their_values() -> None:
    assert completed("--http-po") == ["--http-port"]
    assert completed("--http-port", "1", "--model-rep") == ["--model-repository"]
    assert completed("--log-format=I") == ["ISO8601"]
    assert completed("--model-control-mode", "") == ["none", "explicit", "poll"]
    assert completed("--allow-grpc=") == ["true", "false"]
    assert completed("--exit-on-error=") == ["true", "false", "auto"]
    assert completed("--grpc-processes=") == ["auto"]
    assert completed("--trace-level", "T") == ["TIMESTAMPS", "TENSORS"]


@given(st.lists(st.text(max_size=20) | st.sampled_from([f"--{flag.name}" for flag in flags.FLAGS]), max_size=5))
def test_any_line_gives_options_or_a_sentence(arguments: list[str]) -> None:
    try:
        parsed(*arguments)
    except ConfigurationError as error:
        assert str(error)


def test_several_addresses() -> None:
    options = parsed("--http-address=127.0.0.1", "--http-address=unix:/a,b", "--grpc-address=unix:/c")
    assert (options.http.address, options.grpc.address) == (("127.0.0.1", "unix:/a,b"), ("unix:/c",))
